"""Describes what a step computes and sends: gradients, their FLOPs, compute times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import Bucket, TensorInfo, plan_buckets
from tfdp.tools.simulator.machine import at_least_zero, positive, whole

# Backward has two matrix products where forward has one: for weights and for inputs.
FORWARD_SHARE = 1 / 3
MOST_GRADIENTS = 1_000_000


@dataclasses.dataclass(frozen=True)
class GradientSize:
    """The gradient of one variable.

    Args:
      size_bytes: as it is sent.
      work: backward compute of its layer, in any unit shared by the model's gradients.
        A layer's work counts once, at its first variable.
      row_bytes: of a table whose rows are sent instead, the rows of a replica with
        their indices; 0: all of it is sent.
      adds_rows: whether rows of one index are summed before they cross hosts.
      unadded_bytes: of a replica's rows before equal indices are summed; 0: row_bytes.
    """

    size_bytes: int
    work: float
    dtype: str = "float32"
    row_bytes: int = 0
    adds_rows: bool = False
    unadded_bytes: int = 0

    def __post_init__(self) -> None:
        whole("Gradient", "size_bytes", self.size_bytes, least=0)
        whole("Gradient", "row_bytes", self.row_bytes, least=0)
        least = self.row_bytes if self.unadded_bytes else 0
        whole("Gradient", "unadded_bytes", self.unadded_bytes, least=least)
        at_least_zero("Gradient", "work", self.work)
        for name, kind in (("dtype", str), ("adds_rows", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(
                    f"Gradient: {name} must be a {kind.__name__}. Received: "
                    f"{getattr(self, name)!r:.80}."
                )


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """A model as the simulator sees it.

    `gradients`: in the order of the variables, the first layer's first.
    `forward_flops_per_sample`: additions and multiplications; 0 if only measured times
    are used.
    """

    name: str
    gradients: tuple[GradientSize, ...]
    forward_flops_per_sample: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero(
            "ModelProfile", "forward_flops_per_sample", self.forward_flops_per_sample
        )
        if not self.gradients:
            raise ConfigurationError(
                f"The model {self.name!r} has no trainable weight, so there is nothing "
                "to exchange. Unfreeze what is to be trained."
            )
        whole("ModelProfile", "gradients", len(self.gradients), 1, MOST_GRADIENTS)

    @classmethod
    def from_plain(cls, name: str, plain: Mapping[str, Any]) -> ModelProfile:
        """Makes a profile of a result of `planning.keras_profile.profile_of`."""
        gradients = tuple(GradientSize(*each) for each in plain["gradients"])
        return cls(name, gradients, plain["forward_flops_per_sample"])

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.size_bytes for gradient in self.gradients)

    @property
    def whole(self) -> ModelProfile:
        """The same model, sending whole tables instead of rows."""
        gradients = tuple(
            dataclasses.replace(each, row_bytes=0) for each in self.gradients
        )
        return dataclasses.replace(self, gradients=gradients)

    def buckets(
        self, *, bucket_bytes: int, first_bucket_bytes: int
    ) -> tuple[Bucket, ...]:
        """The bucket plan of a training. Row exchanges of tables are in no bucket."""
        places = [n for n, each in enumerate(self.gradients) if not each.row_bytes]
        tensors = [
            TensorInfo(self.gradients[n].size_bytes, self.gradients[n].dtype)
            for n in places
        ]
        planned = plan_buckets(
            tensors, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes
        )
        return tuple(
            dataclasses.replace(each, indices=tuple(places[n] for n in each.indices))
            for each in planned
        )


@dataclasses.dataclass(frozen=True)
class Compute:
    """Compute times of one replica in one step, without interference.

    `samples` is its local batch; forward and backward take more than 0 s.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        positive("Compute", "forward_seconds", self.forward_seconds)
        positive("Compute", "backward_seconds", self.backward_seconds)
        at_least_zero("Compute", "update_seconds", self.update_seconds)
        whole("Compute", "samples", self.samples)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @classmethod
    def from_seconds(cls, seconds: float, samples: int) -> Compute:
        """Takes a measured step without exchange; a third of it is forward."""
        positive("Compute", "seconds", seconds)
        forward = FORWARD_SHARE * seconds
        return cls(forward, seconds - forward, 0.0, samples)

    @classmethod
    def from_flops(
        cls, model: ModelProfile, samples: int, flops_per_second: float
    ) -> Compute:
        """Derives the times from FLOPs: backward takes twice those of forward.

        `flops_per_second`: achieved by the device, not its peak.
        """
        if not model.forward_flops_per_sample:
            raise ConfigurationError(
                f"The model {model.name!r} has no FLOPs: give the seconds of a step, "
                "or the samples per second of one device, instead."
            )
        positive("Compute", "flops_per_second", flops_per_second)
        whole("Compute", "samples", samples)
        forward = samples * model.forward_flops_per_sample / flops_per_second
        return cls(forward, 2 * forward, 0.0, samples)


def ready_seconds(model: ModelProfile, compute: Compute) -> list[float]:
    """Seconds until each gradient is ready, in a step without interference.

    Backward runs from the last layer to the first, each in proportion to its work.

    >>> gradients = GradientSize(4, work=3.0), GradientSize(4, work=1.0)
    >>> ready_seconds(ModelProfile("m", gradients), Compute(1.0, 2.0))
    [3.0, 1.5]
    """
    total_work = sum(gradient.work for gradient in model.gradients)
    # Without any work given they come evenly.
    works = [each.work if total_work else 1.0 for each in model.gradients]
    total_work = total_work or float(len(works))
    ready, done = [0.0] * len(works), 0.0
    for place in reversed(range(len(works))):
        done += works[place]
        ready[place] = (
            compute.forward_seconds + compute.backward_seconds * done / total_work
        )
    return ready
