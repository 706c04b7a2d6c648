"""Gradient compression between hosts: bytes sent, and time for coding.

With n bytes of float32 gradients on M hosts, of which a message has m = `part` n bytes:

    ring     2 m (M - 1) / M     summed in flight
    parts    m (M - 1), and from 3 hosts on 2 m (M - 1) / M: each host sums a part
    gather   m (M - 1)           each host receives every message

plus n / `bytes_per_second` of one core for encoding, decoding and adding, and with
error feedback `KEEPING` n, half of each before a bucket is sent and half after. The sum
within a host is not compressed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from tfdp.tools.simulator.machine import positive, share

MOST_THAT_GATHER = 2
# Tensors of at least this are `large`: the rates are those of ResNet-50's gradients, at
# most 9.4 MB each.
LARGE_BYTES = 2**24
# Seconds of one core per byte of gradients to add and store the residual and check for
# non-finite values. Fitted to three steps of benchmarks/figures.md (Int8, SignSGD and
# PowerSGD over 1 Gbit/s: 0.7, 0.6 and 0.8 ns).
KEEPING = 0.7e-9


@dataclasses.dataclass(frozen=True)
class Lossy:
    """A way to send fewer bytes of gradients between hosts.

    Args:
      name: for messages.
      part: message bytes over float32 bytes, above 0 and at most 1.
      how: "ring", "parts" or "gather"; see above.
      bytes_per_second: of float32 gradients that a host encodes, decodes and adds.
      compute_share: share of the replicas' compute that coding takes, from 0 to 1: one
        core of those that compute.
      keeps: whether what is not sent is kept (error feedback).
      large_share: factor on `bytes_per_second` for tensors of 16 MiB and more, which do
        not stay in a cache.

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
        for name in ("part", "large_share"):
            positive("Lossy", name, getattr(self, name))
            share("Lossy", name, getattr(self, name))
        positive("Lossy", "bytes_per_second", self.bytes_per_second)
        share("Lossy", "compute_share", self.compute_share)

    def sent_bytes(self, size_bytes: float, hosts: int) -> float:
        """Bytes that a host sends for `size_bytes` of gradients."""
        message = self.part * size_bytes
        if self._is_gathered(hosts):
            return message * (hosts - 1)
        return 2 * message * (hosts - 1) / hosts

    def rounds(self, hosts: int) -> int:
        """The number of latencies in an exchange."""
        return (1 if self._is_gathered(hosts) else 2) * (hosts - 1)

    def coding_seconds(self, size_bytes: float, tensors: int = 1) -> float:
        """Seconds of one core to code `tensors` gradients of `size_bytes` together."""
        rate = self.bytes_per_second
        if size_bytes >= LARGE_BYTES * tensors:
            rate *= self.large_share
        return size_bytes * (1 / rate + self.keeps * KEEPING)

    def _is_gathered(self, hosts: int) -> bool:
        is_small = self.how == "parts" and hosts <= MOST_THAT_GATHER
        return self.how == "gather" or is_small


#: By the names of `tfdp tune --allow-lossy`, each with default arguments. Rates:
#: benchmarks/compression.py, ResNet-50's gradients on one core of a virtual x86
#: machine, 2026-11-23; float16's is taken from bfloat16.
KNOWN_WAYS: dict[str, Lossy] = {
    way.name: way
    for way in (
        Lossy("bfloat16", 1 / 2, "ring", 1.13e9, keeps=False),
        Lossy("float16", 1 / 2, "ring", 1.13e9, keeps=False),
        Lossy("int8", 1 / 3.9, "parts", 1.35e9),
        Lossy("fp8", 1 / 4, "parts", 0.83e9),
        Lossy("int4", 1 / 7.1, "parts", 0.62e9),
        Lossy("sign", 1 / 31, "parts", 1.49e9),
        # A tensor of 67 MB: 0.33 GB/s where ResNet-50's have 0.53.
        Lossy("top_k", 1 / 50, "gather", 0.55e9, large_share=0.63),
        Lossy("random_k", 1 / 100, "ring", 0.89e9),
        Lossy("power_sgd", 1 / 309, "ring", 1.86e9),
    )
}
