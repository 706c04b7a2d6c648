"""The settings that can act here and that differ from each other. Pure.

A setting that makes the same buckets as another one is the same training: it is not
tried twice. The defaults are always among them, and always the first.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import Bucket
from tfdp.plan.shards import SHARD_STAGES
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.model import ModelProfile
from tfdp.tools.tune.setting import DEFAULTS, LOSSY, Setting

__all__ = ["Place", "Space", "knobs_of"]

KIB = 1 << 10
BUCKET_BYTES = tuple(n * KIB for n in (256, 1024, 4096, 8192, 16384, 65536, 131072))
FIRST_BUCKET_BYTES = tuple(n * KIB for n in (64, 256, 4096, 16384))
ACCUMULATION_STEPS = (1, 2, 4, 8)
# What the engine "auto" is; the others are what else may be tried.
ENGINES_OF_ONE_PROCESS = ("in_process", "tensorflow")
ENGINES_BETWEEN = ("sockets", "tensorflow")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the trials run.

    Args:
      processes: one for each host that is played.
      replicas: of each.
      rows: of the global batch.
      automatic_engine: what `engine="auto"` is here.
    """

    processes: int
    replicas: int
    rows: int
    automatic_engine: str

    @property
    def all_replicas(self) -> int:
        """Of all processes."""
        return self.processes * self.replicas

    @property
    def topology(self) -> Topology:
        """Its levels."""
        return Topology(self.processes, self.replicas)

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{processes} x {self.replicas} replica{'s' * (self.replicas > 1)}"


def knobs_of(
    place: Place, allow_lossy: Sequence[str] = (), for_memory: bool = False
) -> dict[str, tuple[Any, ...]]:
    """What may be turned, and to which values; the defaults' first.

    Args:
      place: where.
      allow_lossy: keys of LOSSY that may be tried.
      for_memory: whether shards, remat and accumulation may be tried, too.

    Raises:
      ConfigurationError: a name is unknown, or cannot act here.
    """
    for name in allow_lossy:
        if name not in LOSSY:
            raise ConfigurationError(
                f"--allow-lossy takes {', '.join(LOSSY)}. Received: {name!r}."
            )
    if allow_lossy and place.processes == 1:
        raise ConfigurationError(
            "--allow-lossy acts between processes, and there is one: within it "
            "nothing is gained by sending less. Give --workers, or leave it out."
        )
    engines = ENGINES_OF_ONE_PROCESS if place.processes == 1 else ENGINES_BETWEEN
    knobs: dict[str, tuple[Any, ...]] = {
        "engine": (
            "auto",
            *(each for each in engines if each != place.automatic_engine),
        ),
        "bucket_bytes": (DEFAULTS.bucket_bytes, *BUCKET_BYTES),
        "first_bucket_bytes": (DEFAULTS.first_bucket_bytes, *FIRST_BUCKET_BYTES),
        "hierarchy": ("auto", *_hierarchies(place)),
        "lossy": (None, *allow_lossy),
    }
    if for_memory:
        many = place.all_replicas > 1
        knobs["shard"] = SHARD_STAGES if many else ("none",)
        knobs["remat"] = (False, True)
        knobs["accumulation_steps"] = tuple(
            steps
            for steps in ACCUMULATION_STEPS
            if place.rows % steps == 0 and place.rows // steps >= place.all_replicas
        )
    return knobs


def _hierarchies(place: Place) -> list[tuple[int, int]]:
    """Pairs with two levels; between processes the processes are the levels."""
    if place.processes > 1:
        return []
    number = place.replicas
    return [(number // each, each) for each in range(2, number) if number % each == 0]


class Space:
    """The settings that differ.

    Args:
      place: where they are tried.
      knobs: what may be turned; see `knobs_of`.
      model: the gradients, which say which buckets are the same; None: nobody knows
        them yet, and there are only the defaults.
      fits: whether a setting fits the memory; None: all do.
    """

    def __init__(
        self,
        place: Place,
        knobs: Mapping[str, Sequence[Any]],
        model: ModelProfile | None,
        fits: Callable[[Setting], bool] | None = None,
    ):
        for name, values in knobs.items():
            if getattr(DEFAULTS, name) not in values:
                raise ConfigurationError(
                    f"{name}: the default {getattr(DEFAULTS, name)!r} is not among "
                    f"the values {tuple(values)!r}. It always is."
                )
        self.place = place
        self.knobs = {name: tuple(values) for name, values in knobs.items()}
        self.model = model
        self._fits = fits
        self._first: dict[Any, Setting] = {}
        found = self._all() if model is not None else [DEFAULTS]
        #: One for each training that differs, the defaults first where they fit.
        self.settings = tuple(
            setting for setting in found if fits is None or fits(setting)
        )

    def same_as(self, setting: Setting) -> Setting:
        """The setting of this space that makes the same training."""
        return self._first.get(self._key(setting), setting)

    def buckets(self, setting: Setting) -> tuple[Bucket, ...]:
        """In which gradients travel; each tensor alone where buckets cannot act."""
        if self.model is None:
            return ()
        if not self.buckets_act(setting):
            return self.model.buckets(bucket_bytes=1, first_bucket_bytes=1)
        return self.model.buckets(
            bucket_bytes=setting.bucket_bytes,
            first_bucket_bytes=setting.first_bucket_bytes,
        )

    def engine(self, setting: Setting) -> str:
        """By its name, which "auto" is none of."""
        is_automatic = setting.engine == "auto"
        return self.place.automatic_engine if is_automatic else setting.engine

    def buckets_act(self, setting: Setting) -> bool:
        """Whether the sizes of buckets change what is sent, and when."""
        if self.place.all_replicas == 1:
            return False
        return self.engine(setting) != "in_process"

    def _all(self) -> list[Setting]:
        names = list(self.knobs)
        for values in itertools.product(*self.knobs.values()):
            setting = Setting(**dict(zip(names, values, strict=True)))
            if self._can_act(setting):
                self._first.setdefault(self._key(setting), setting)
        return list(self._first.values())

    def _can_act(self, setting: Setting) -> bool:
        """Whether the strategies take it; see docs/options.md."""
        if setting.shard != "none":
            argument = setting.lossy_argument
            if argument is not None and argument[0] == "compression":
                return False  # sums whole gradients
            if self.place.processes > 1 and setting.engine == "tensorflow":
                return False
        return setting.hierarchy == "auto" or self.place.processes == 1

    def _key(self, setting: Setting) -> Any:
        plain = dataclasses.replace(
            setting,
            bucket_bytes=DEFAULTS.bucket_bytes,
            first_bucket_bytes=DEFAULTS.first_bucket_bytes,
        )
        if setting.shard in ("gradients", "parameters"):
            # There they also bound what is in flight.
            return plain, self.buckets(setting), setting.bucket_bytes
        return plain, self.buckets(setting)
