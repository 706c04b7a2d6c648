"""Ends of connections as the workers of a ring have them."""

import concurrent.futures
import socket
import threading

from tfdp.hosts.shared_memory import OwnSlots, open_slots
from tfdp.hosts.wire import tuned

#: Only there to end a hang.
HANG_SECONDS = 60


def in_a_thread(function, *arguments):
    """The future of something that may hang, in a thread that nobody waits for."""
    done = concurrent.futures.Future()

    def work():
        try:
            done.set_result(function(*arguments))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done


def shared_slots():
    """The slots of the end that sends, and those of the one that receives."""
    own = OwnSlots()
    theirs = open_slots(own.offer)
    own.close()
    return own.slots, theirs


def over_loopback():
    with socket.create_server(("127.0.0.1", 0)) as door:
        here = socket.create_connection(door.getsockname())
        there, _ = door.accept()
    return tuned(here), tuned(there)
