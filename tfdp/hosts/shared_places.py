"""Memory that two processes of one machine share, in places that are used in turn.

The memory has no name in any file system (`memfd_create`): who has it open keeps it,
and nothing is left of it after any kill. The process that receives opens it by way of
the one that sends, /proc/PROCESS/fd/DESCRIPTOR; that this is the memory that was meant
is shown by random bytes at its beginning.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdp.hosts.messages import checked_integer, checked_text

try:
    import fcntl

    # No end may cut the memory off: the other one's next access would kill it.
    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    memfd_create = os.memfd_create
except (ImportError, AttributeError):  # not Linux
    CAN_SHARE = False
else:
    CAN_SHARE = True

__all__ = ["PLACES", "PLACE_BYTES", "Places"]

# Small enough to stay in the cache between the two processes, and no smaller: each one
# costs two calls of the kernel, and mostly a thread that wakes up. Sums of 102 MB took
# 29 to 35 ms with 256 KiB, 24 to 27 with 512 KiB and 22 to 27 with 1 MiB; with that one
# sums of 2 and 4 MB were not faster.
PLACE_BYTES = 1 << 19
PLACES = 8
PROOF_BYTES = 32
# The first page, so that the places begin at one.
HEAD_BYTES = mmap.PAGESIZE
SIZE_BYTES = HEAD_BYTES + PLACES * PLACE_BYTES
NAME = "tfdp-places"
MOST_PROCESS = 1 << 31
MOST_DESCRIPTOR = 1 << 31


class Places:
    """PLACES places of PLACE_BYTES each.

    Args:
      memory: SIZE_BYTES that two processes share.
    """

    def __init__(self, memory: mmap.mmap):
        whole = np.frombuffer(memory, np.uint8)
        self._proof = whole[:PROOF_BYTES]
        self._places = whole[HEAD_BYTES:].reshape(PLACES, PLACE_BYTES)

    def __getitem__(self, turn: int) -> np.ndarray:
        """uint8 of [PLACE_BYTES]: the place of that turn."""
        return self._places[turn % PLACES]

    @property
    def proof(self) -> bytes:
        """The random bytes that only these have."""
        return self._proof.tobytes()


class OwnPlaces:
    """What the sending process makes, and offers until the other one has opened it.

    Raises:
      OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        if not CAN_SHARE:
            raise OSError("no memory without a name on this system")
        self._descriptor = memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, SIZE_BYTES)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            memory = mmap.mmap(self._descriptor, SIZE_BYTES)
        except BaseException:
            os.close(self._descriptor)
            raise
        memory[:PROOF_BYTES] = secrets.token_bytes(PROOF_BYTES)
        self.places = Places(memory)

    @property
    def offer(self) -> dict[str, Any]:
        """What `open_places` needs to know."""
        return {
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "proof": self.places.proof.hex(),
        }

    def close(self) -> None:
        """Lets go of the descriptor; the memory stays."""
        os.close(self._descriptor)


def open_places(offer: Mapping[str, Any]) -> Places:
    """The places that another process of this machine offers.

    Raises:
      OSError: they cannot be opened from here.
      ValueError: it is no offer, or what lies there is something else.
    """
    process = checked_integer(offer.get("process"), 1, MOST_PROCESS)
    descriptor = checked_integer(offer.get("descriptor"), 0, MOST_DESCRIPTOR)
    proof = bytes.fromhex(checked_text(offer.get("proof"), 2 * PROOF_BYTES))
    if not CAN_SHARE:
        raise OSError("no memory without a name on this system")
    path = f"/proc/{process}/fd/{descriptor}"
    # In another namespace the numbers mean another process' file: to open a pipe or a
    # device could wait, or do something.
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise ValueError("the descriptor is that of something else")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.closing(os.fdopen(opened, "r+b", buffering=0)):
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
        if not sealed or os.fstat(opened).st_size != SIZE_BYTES:
            raise ValueError("not sealed, or of another size")
        places = Places(mmap.mmap(opened, SIZE_BYTES))
    if not secrets.compare_digest(places.proof, proof):
        raise ValueError("the memory of another offer")
    return places
