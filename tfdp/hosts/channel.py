"""`Channel`: one ring as a worker sees it, with an order of its own."""

from __future__ import annotations

import threading
import time

from tfdp.errors import CollectiveError, TfdpError
from tfdp.hosts.agreement import HEADER, Disagreement, Terms
from tfdp.hosts.ring import Receive, Send
from tfdp.hosts.rounded_wire import RoundedWire, wire_type
from tfdp.hosts.wire import Receiver, Sender

__all__ = ["Channel"]


class Channel:
    """The two ends of a ring, and the exchange that is under way in it.

    Args:
      sender: to the worker after.
      receiver: from the worker before.
    """

    def __init__(self, sender: Sender, receiver: Receiver):
        self.sender = sender
        self.receiver = receiver
        self.lock = threading.Lock()
        self.count = 0
        #: What the exchange under way, or the last one, is about.
        self.terms = Terms("gather", 0, 0, "none yet")
        #: When it began (`time.monotonic`).
        self.start = 0.0
        #: Why there will be no other exchange.
        self.failure: TfdpError | None = None

    def begin(self, terms: Terms) -> None:
        """Notes what this worker brings."""
        self.terms, self.start = terms, time.monotonic()

    def agree(self) -> None:
        """Compares what this worker brings with what the worker before does.

        Raises:
          Disagreement: when it differs.
          OSError: as `Receiver.fill`.
        """
        mine = self.terms.header
        self.sender.send(mine)
        theirs = bytes(self.receiver.take(HEADER.size))
        if theirs != mine:
            self.sender.flush()  # the worker after has to see it as well
            raise Disagreement(self.terms, theirs)

    @property
    def words(self) -> str:
        """Names the exchange in errors."""
        return f"exchange {self.count} ({self.terms.label})"

    def ends(self, wire_dtype: str | None) -> tuple[Send, Receive, Send]:
        """What sends, receives and passes on blocks of arrays; see `ring_sum`."""
        send, receive = self.sender.send, self.receiver.fill
        if wire_dtype is None:
            return send, receive, send
        wire = RoundedWire(wire_type(wire_dtype), send, receive)
        return wire.send, wire.receive, wire.pass_on

    def fail_with(self, error: BaseException) -> None:
        """Notes why there is no other exchange; only those of tfdp keep their type."""
        self.failure = (
            error
            if isinstance(error, TfdpError)
            else CollectiveError(f"{type(error).__name__}: {error}")
        )

    def close(self) -> None:
        """Ends both connections; whoever waits in one gets an error."""
        self.sender.close()
        self.receiver.close()
