"""One of two workers whose TensorFlow serves: who reaches its port, before and after?

`python -m tests.support.collective_doors MODE`: "filter"; "none", a kernel without
filters; "lies", a worker that comes from another address than it says.
"""

import contextlib
import socket
import sys

import tfdp
from tfdp.hosts import server_guard

# On loopback any address of 127.0.0.0/8 can be a sender, as other machines elsewhere.
STRANGER, WORKER = "127.0.0.2", "127.0.0.1"
DROPPED_SECONDS = 0.5


def main(mode):
    if mode == "none":
        server_guard.admit_only = refuse
    if mode == "lies":
        server_guard._senders = lambda link, told: ["127.0.0.9"]
    seen = []
    keep = server_guard.keep_to_workers

    def noting_keep(link, ports):
        seen.append((keep(link, ports), ports))

    from tfdp.exchange import over_collectives

    over_collectives.keep_to_workers = noting_keep
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(engine="tensorflow", timeout_seconds=120)
    )
    ((is_closed, ports),) = seen
    strategy.barrier()
    for port in ports:
        print("worker reaches", reaches(WORKER, port, 60.0))
        print("stranger reaches", reaches(STRANGER, port, DROPPED_SECONDS))
    print("closed", is_closed)
    strategy.barrier()
    strategy.close()


def refuse(listener, senders):
    raise OSError(92, "Protocol not available")


def reaches(source, port, seconds):
    with contextlib.suppress(TimeoutError):
        # TensorFlow's server speaks first: HTTP/2 settings.
        with socket.create_connection(("127.0.0.1", port), seconds, (source, 0)) as it:
            it.settimeout(60.0)
            it.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
            )
            return bool(it.recv(9))
    return False


if __name__ == "__main__":
    main(sys.argv[1])
