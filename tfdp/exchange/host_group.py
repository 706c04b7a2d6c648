"""`HostGroup`: the hosts that train together, as a strategy uses them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.exchange.levels import Levels
from tfdp.exchange.over_link import OverLink
from tfdp.hosts.buffers import unaligned_copy
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.messages import read_as


class HostGroup:
    """Sums and gathers over hosts: in graphs by `Levels.outer`, else by the link."""

    def __init__(self, link: HostLink):
        self.link = link
        self._levels: Levels | None = None

    def use(self, levels: Levels) -> None:
        """Sets the transport for exchanges in graphs; `close` closes it."""
        self._levels = levels

    def close(self) -> None:
        """Announces the departure to the other hosts."""
        if self._levels is not None:
            self._levels.close()
        self.link.close()

    def barrier(self, label: str) -> None:
        """Waits until every host has called it."""
        self.link.gather(b"", label, most_bytes=0)

    def from_chief(self, value: np.ndarray, label: str) -> np.ndarray:
        """Host 0's array, on every host. Cost: its bytes, to each host."""
        mine = value.tobytes() if self.link.rank == 0 else b""
        # Equal byte counts do not imply equal types.
        described = f"{label}: {value.dtype.name} {list(value.shape)}"
        first = self.link.gather(mine, described, most_bytes=value.nbytes)[0]
        received = read_as(
            lambda blob: np.frombuffer(blob, value.dtype).reshape(value.shape),
            first,
            0,
            f"array of {described}",
        )
        return unaligned_copy(received)

    def sum_arrays(self, arrays: Sequence[np.ndarray], label: str) -> list[np.ndarray]:
        """The sums over the hosts, one exchange each; outside graphs."""
        return [self.link.sum([array], label, "host")[0] for array in arrays]

    def sum(self, value: tf.Tensor, label: str = "reduce") -> tf.Tensor:
        """The sum of each host's `value`, in cross-replica context."""
        if tf.executing_eagerly():
            (total,) = self.sum_arrays([value.numpy()], label)
            return tf.convert_to_tensor(unaligned_copy(total))
        return self._in_graphs().all_reduce([value], 0, label)[0]

    def gather(self, tensor: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """The hosts' tensors concatenated in host order; lengths may differ."""
        swapped = tf.experimental.numpy.swapaxes(tensor, 0, axis) if axis else tensor
        rows = self._in_graphs().gather(swapped, 0)
        return tf.experimental.numpy.swapaxes(rows, 0, axis) if axis else rows

    def _in_graphs(self) -> OverLink:
        if self._levels is None:
            raise RuntimeError("HostGroup.use was not called")
        return self._levels.outer
