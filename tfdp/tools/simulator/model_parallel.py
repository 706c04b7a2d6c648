"""What splitting a model over devices costs, for runs that tfdp does not do itself.

tfdp is data-parallel. Published runs of very large models are not only that, so these
formulas stand between a device's FLOPs and their figures:

    bubble of a pipeline   (P - 1) / (V m)        of the time of m micro-batches
    split of a layer       8 gathers or scatters of its activations, of T devices

for P stages, each of V parts, and m micro-batches a step.

Sources: Narayanan et al. 2021 (interleaved schedule, section 2.2); Korthikanti et al.
2022 (sequence parallelism: a gather and a scatter around attention and around the
feed-forward layer, in forward and again in backward).
"""

from __future__ import annotations

import dataclasses

from tfdp.tools.simulator.checked import whole
from tfdp.tools.simulator.machine import Link

__all__ = ["Pipeline", "split_layer_seconds"]

COLLECTIVES_OF_A_LAYER = 8


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages one behind the other.

    Args:
      stages: P, at least 1.
      parts: V, in which each stage is interleaved; at least 1.
      micro_batches: m, of a step; at least 1.
    """

    stages: int
    parts: int
    micro_batches: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            whole("Pipeline", field.name, getattr(self, field.name))

    @property
    def bubble(self) -> float:
        """Idle time, as a share of the time in which a device computes.

        >>> Pipeline(stages=16, parts=8, micro_batches=16).bubble
        0.1171875
        """
        return (self.stages - 1) / (self.parts * self.micro_batches)


def split_layer_seconds(
    activation_bytes: float, devices: int, within_host: Link, launch_seconds: float
) -> float:
    """What a layer of a micro-batch, forward and backward, exchanges within a host.

    Args:
      activation_bytes: tokens of the micro-batch, times width, times bytes of a number.
      devices: that share the layer.
      within_host: what joins them.
      launch_seconds: before each exchange.
    """
    whole("split_layer_seconds", "devices", devices)
    if devices == 1:
        return 0.0
    sent = activation_bytes * (devices - 1) / devices / within_host.rate
    hops = (devices - 1) * within_host.latency_seconds
    return COLLECTIVES_OF_A_LAYER * (sent + hops + launch_seconds)
