"""One of three workers, two of them on one host: which of its ports are open where.

`python -m tests.support.network_doors RANK COORDINATOR`
"""

import json
import socket
import sys

import numpy as np

from tfdp.hosts import rendezvous
from tfdp.hosts.server_guard import keep_to_workers
from tfdp.hosts.socket_link import SocketLink

WORKERS = 3
TIMEOUT_SECONDS = 100.0


def main(rank, coordinator):
    open_at = []
    for name in ("listen_at", "listen"):
        note(open_at, name)
    link = SocketLink(rank, WORKERS, coordinator, TIMEOUT_SECONDS, secret=b"secret")
    (total,) = link.sum([np.array(rank + 1.0)], "ranks")
    # Stands in for TensorFlow's server, which listens at all addresses.
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1]).encode()
        ports = [int(blob) for blob in link.gather(port, "ports")]
        is_closed = keep_to_workers(link, ports)
        link.gather(b"", "the end")
    link.close()
    facts = {"open_at": open_at, "hosts": link.hosts, "total": float(total)}
    print(json.dumps({**facts, "is_closed": is_closed}))


def note(open_at, name):
    listen = getattr(rendezvous, name)

    def noting_listen(*address):
        opened = listen(*address)
        for listener in opened if isinstance(opened, list) else [opened]:
            open_at.append(listener.getsockname()[0])
        return opened

    setattr(rendezvous, name, noting_listen)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
