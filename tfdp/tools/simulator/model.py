"""What a step computes and sends: gradients, the work behind each, FLOPs."""

from __future__ import annotations

import dataclasses

from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import Bucket, TensorInfo, plan_buckets
from tfdp.tools.simulator.machine import at_least_zero, positive, share, whole

# Backward has two products where forward has one: by the weights, and by the inputs.
FORWARD_SHARE = 1 / 3
MOST_GRADIENTS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of one variable.

    Args:
      size_bytes: as it is sent, at least 0.
      work: what backprop computes for its layer, in any unit that all gradients of a
        model share; at least 0. A layer's work counts once, at its first variable.
      dtype: the name of its element type.
      row_bytes: of the rows of a table, with their places, that a replica has in a step
        where it sends these in the place of the whole; 0: it sends all of it.
      adds_rows: whether rows of one place are added before they cross between hosts.
      unadded_bytes: of the rows of a replica before those of one place are added; 0: as
        many as row_bytes.
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
        if not isinstance(self.adds_rows, bool):
            raise ConfigurationError(
                f"Gradient: adds_rows must be True or False. Received: "
                f"{self.adds_rows!r}."
            )


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """A model as the simulator sees it.

    Args:
      name: for people.
      gradients: in the order of the variables, the first layer's first.
      forward_flops_per_sample: additions and multiplications of one forward pass, 0
        where only measured times are used.

    Raises:
      ConfigurationError: a number means nothing, or there is no gradient.
    """

    name: str
    gradients: tuple[Gradient, ...]
    forward_flops_per_sample: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero(
            "ModelProfile", "forward_flops_per_sample", self.forward_flops_per_sample
        )
        if not self.gradients:
            raise ConfigurationError(
                f"The model {self.name!r} has no weight that training moves, so there "
                "is nothing to exchange. Unfreeze what is to be trained."
            )
        whole("ModelProfile", "gradients", len(self.gradients), 1, MOST_GRADIENTS)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients."""
        return sum(gradient.size_bytes for gradient in self.gradients)

    @property
    def whole(self) -> ModelProfile:
        """The same, of which all is sent as it is, rows of tables too."""
        gradients = tuple(
            dataclasses.replace(each, row_bytes=0) for each in self.gradients
        )
        return dataclasses.replace(self, gradients=gradients)

    def buckets(
        self, *, bucket_bytes: int, first_bucket_bytes: int
    ) -> tuple[Bucket, ...]:
        """What travels together: the plan that a training would make.

        Rows of tables are in no bucket: each table has an exchange of its own.
        """
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
    """How long a replica computes in one step while nobody disturbs it.

    Args:
      forward_seconds, backward_seconds: of its whole local batch, above 0.
      update_seconds: of the optimizer, at least 0.
      samples: its local batch, at least 1.
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
        """Of the whole step."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @classmethod
    def from_seconds(
        cls, seconds: float, samples: int, update_share: float = 0.0
    ) -> Compute:
        """From a measured step; a third of it, without the update, is forward.

        Args:
          seconds: of a step of one replica that exchanges nothing, above 0.
          samples: its local batch.
          update_share: what of it the optimizer takes, from 0 to 1, not all.

        >>> Compute.from_seconds(3.0, samples=64)
        Compute(forward_seconds=1.0, backward_seconds=2.0, update_seconds=0.0, \
samples=64)
        """
        positive("Compute", "seconds", seconds)
        share("Compute", "update_share", update_share)
        if update_share == 1:
            raise ConfigurationError(
                "Compute: update_share must be below 1. Received: 1."
            )
        update = update_share * seconds
        forward = FORWARD_SHARE * (seconds - update)
        return cls(forward, seconds - update - forward, update, samples)

    @classmethod
    def from_flops(
        cls, model: ModelProfile, samples: int, flops_per_second: float
    ) -> Compute:
        """From FLOPs: backward takes twice those of forward.

        Args:
          model: with its `forward_flops_per_sample`.
          samples: the local batch.
          flops_per_second: that the device reaches, not its peak; above 0.

        Raises:
          ConfigurationError: the model has no FLOPs, or a number means nothing.
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
    """When each gradient is there, from the start of an undisturbed step.

    Backprop goes through the layers from the last to the first; each takes the part of
    `compute.backward_seconds` that its work is of all work.

    >>> model = ModelProfile("m", (Gradient(4, work=3.0), Gradient(4, work=1.0)))
    >>> ready_seconds(model, Compute(1.0, 2.0))
    [3.0, 1.5]
    """
    total_work = sum(gradient.work for gradient in model.gradients)
    # Without any work known they come evenly.
    works = [each.work if total_work else 1.0 for each in model.gradients]
    total_work = total_work or float(len(works))
    ready, done = [0.0] * len(works), 0.0
    for place in reversed(range(len(works))):
        done += works[place]
        ready[place] = (
            compute.forward_seconds + compute.backward_seconds * done / total_work
        )
    return ready
