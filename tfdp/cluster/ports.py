"""TCP ports: one that is free here, one by chance, the one that was asked for."""

from __future__ import annotations

import errno
import random
import socket

from tfdp.errors import ConfigurationError

__all__ = [
    "FIRST_PORT",
    "LAST_PORT",
    "LOOPBACK",
    "any_port",
    "checked_port",
    "free_port",
]

# Below the ports that systems give to outgoing connections (Linux: 32768 and up), so
# that none of these takes it while worker 0 is still importing TensorFlow.
FIRST_PORT, LAST_PORT = 20000, 29999
LOOPBACK = "127.0.0.1"


def any_port() -> int:
    """A port from 20000 to 29999, by chance: for hosts that cannot be asked."""
    return random.SystemRandom().randint(FIRST_PORT, LAST_PORT)


def free_port(address: str = LOOPBACK) -> int:
    """A port from 20000 to 29999 that nobody listens on here.

    Args:
      address: where it is to be free; "" at all addresses of this machine.

    Raises:
      ConfigurationError: when a hundred of them are taken.
    """
    for _ in range(100):
        port = any_port()
        if _is_free(port, address):
            return port
    raise ConfigurationError(
        f"no free port was found from {FIRST_PORT} to {LAST_PORT}; end what has "
        "them, or name another one"
    )


def checked_port(port: int) -> int:
    """The port, if it is free.

    Raises:
      ConfigurationError: when another program has it, or this one may not.
    """
    if not _is_free(port):
        raise ConfigurationError(
            f"--port {port}: the port is taken, or this user may not use it. Leave "
            "--port out to get a free one."
        )
    return port


def _is_free(port: int, address: str = LOOPBACK) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connection is only waiting out is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True
