"""Gradients in fewer bytes: what crosses between hosts, and what making it small costs.

With n bytes of float32 gradients on M hosts, of which a message has m = `part` n bytes:

    ring     2 m (M - 1) / M     numbers are added on the way
    parts    m (M - 1), and from 3 hosts on 2 m (M - 1) / M: each adds up a part
    gather   m (M - 1)           each gets everybody's message

and n / `bytes_per_second` of one core for encoding, decoding and adding, and where what
was not sent is kept for the next step `KEEPING` n for that, half of it before a bucket
is sent and half after. What replicas of one host add stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from tfdp.tools.simulator.machine import positive, share

MOST_THAT_GATHER = 2
# Tensors from here on are `large`: the rates are those of ResNet-50's gradients, the
# largest of which has 9.4 MB.
LARGE_BYTES = 2**24
# Seconds of one core for a byte of gradients: to add what was left, to keep what is
# left, to look for what is not finite. Fitted to three steps of docs/communication.md
# (Int8, SignSGD and PowerSGD over 1 Gbit/s: 0.7, 0.6 and 0.8 ns; 1.4 to 1.7 while
# numbers were looked at four times for being finite).
KEEPING = 0.7e-9


@dataclasses.dataclass(frozen=True)
class Lossy:
    """A way to send fewer bytes of gradients between hosts.

    Args:
      name: for people.
      part: of the bytes of float32 that a message has, above 0 and at most 1.
      how: messages travel: "ring", "parts" or "gather"; see above.
      bytes_per_second: of float32 gradients, that a host encodes, decodes and adds;
        above 0.
      compute_share: of the replicas' computing that stands still meanwhile, from 0 to
        1: one core's part of those that compute.
      keeps: whether what is not sent is kept (error feedback).
      large_share: of `bytes_per_second`, what is reached with tensors of 16 MiB and
        more, whose numbers are no longer near when they are asked for in another order.

    Raises:
      ConfigurationError: a number means nothing.

    >>> way = Lossy("int8", 1 / 4, "parts", 1e9)
    >>> way.sent_bytes(4000, hosts=2), way.sent_bytes(4000, hosts=4)
    (1000.0, 1500.0)
    """

    name: str
    part: float
    how: Literal["ring", "parts", "gather"]
    bytes_per_second: float
    compute_share: float = 1.0
    keeps: bool = True
    large_share: float = 1.0

    def __post_init__(self) -> None:
        positive("Lossy", "part", self.part)
        share("Lossy", "part", self.part)
        positive("Lossy", "bytes_per_second", self.bytes_per_second)
        share("Lossy", "compute_share", self.compute_share)
        positive("Lossy", "large_share", self.large_share)
        share("Lossy", "large_share", self.large_share)

    def sent_bytes(self, size_bytes: float, hosts: int) -> float:
        """What a host sends of gradients of so many bytes."""
        message = self.part * size_bytes
        if self._is_gathered(hosts):
            return message * (hosts - 1)
        return 2 * message * (hosts - 1) / hosts

    def rounds(self, hosts: int) -> int:
        """Latencies of an exchange."""
        return (1 if self._is_gathered(hosts) else 2) * (hosts - 1)

    def coding_seconds(self, size_bytes: float, tensors: int = 1) -> float:
        """Of one core, for gradients of so many bytes in so many tensors."""
        rate = self.bytes_per_second
        if size_bytes >= LARGE_BYTES * tensors:
            rate *= self.large_share
        return size_bytes * (1 / rate + self.keeps * KEEPING)

    def _is_gathered(self, hosts: int) -> bool:
        is_small = self.how == "parts" and hosts <= MOST_THAT_GATHER
        return self.how == "gather" or is_small


#: Where the rates below are from.
RATES_SOURCE = (
    "benchmarks/compression.py, ResNet-50's gradients on one core of a virtual x86 "
    "machine, 2026-11-23; float16 is taken to be as bfloat16"
)
#: By the names of `tfdp tune --allow-lossy`, each with the arguments of its defaults.
KNOWN_WAYS: dict[str, Lossy] = {
    way.name: way
    for way in (
        Lossy("bfloat16", 1 / 2, "ring", 1.13e9, keeps=False),
        Lossy("float16", 1 / 2, "ring", 1.13e9, keeps=False),
        Lossy("int8", 1 / 3.9, "parts", 1.35e9),
        Lossy("fp8", 1 / 4, "parts", 0.83e9),
        Lossy("int4", 1 / 7.1, "parts", 0.62e9),
        Lossy("sign", 1 / 31, "parts", 1.49e9),
        # A tensor of 67 MB alone: 0.33 GB/s where ResNet-50's have 0.53.
        Lossy("top_k", 1 / 50, "gather", 0.55e9, large_share=0.63),
        Lossy("random_k", 1 / 100, "ring", 0.89e9),
        Lossy("power_sgd", 1 / 309, "ring", 1.86e9),
    )
}


def known_ways(measured: Mapping[str, float] | None = None) -> dict[str, Lossy]:
    """The known ways with the rates of a machine in the place of their own.

    Args:
      measured: bytes per second by name, as `tfdp measure` has found them.
    """
    rates = measured or {}
    return {
        name: dataclasses.replace(
            way, bytes_per_second=rates.get(name, way.bytes_per_second)
        )
        for name, way in KNOWN_WAYS.items()
    }
