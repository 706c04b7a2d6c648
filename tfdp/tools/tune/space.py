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
from tfdp.plan.communication import MIB, Communication
from tfdp.plan.shards import SHARD_STAGES
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.model import ModelProfile

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


# One way to train: what `Communication` and the strategy are given. Pure.


#: What `--allow-lossy` may name -> the argument of `Communication` that it is. What
#: each costs, for the simulator's first guess: `tfdp.tools.simulator.lossy.KNOWN_WAYS`.
LOSSY: dict[str, tuple[str, str]] = {
    "bfloat16": ("wire_dtype", "bfloat16"),
    "float16": ("wire_dtype", "float16"),
    "int8": ("compression", "Int8"),
    "fp8": ("compression", "FP8"),
    "int4": ("compression", "Int4"),
    "sign": ("compression", "SignSGD"),
    "top_k": ("compression", "TopK"),
    "random_k": ("compression", "RandomK"),
    "power_sgd": ("compression", "PowerSGD"),
}


# Fields of a setting that `Communication` has, too.
COMMUNICATION = ("bucket_bytes", "first_bucket_bytes", "engine", "hierarchy")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to train. Without arguments: the defaults.

    Args:
      bucket_bytes, first_bucket_bytes, engine, hierarchy: see `Communication`.
      lossy: a key of LOSSY; None: gradients are sent as they are.
      shard: see `DataParallelStrategy`.
      remat: whether layers compute their forward pass twice (`tfdp.remat`).
      accumulation_steps: into how many steps of fewer rows the batch is cut, with one
        update.
    """

    bucket_bytes: int = Communication.bucket_bytes
    first_bucket_bytes: int = Communication.first_bucket_bytes
    engine: str = "auto"
    hierarchy: str | tuple[int, int] = "auto"
    lossy: str | None = None
    shard: str = "none"
    remat: bool = False
    accumulation_steps: int = 1

    @property
    def changes(self) -> dict[str, Any]:
        """What is not as in the defaults, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @property
    def lossy_argument(self) -> tuple[str, str] | None:
        """The argument of `Communication`, and its value or the class of its value."""
        return None if self.lossy is None else LOSSY[self.lossy]

    @property
    def communication_line(self) -> str:
        """What to paste.

        >>> Setting(bucket_bytes=4 << 20, engine="tensorflow").communication_line
        "tfdp.Communication(bucket_bytes=4 * 2**20, engine='tensorflow')"
        """
        values = {
            name: value for name, value in self.changes.items() if name in COMMUNICATION
        }
        if self.lossy_argument is not None:
            name, value = self.lossy_argument
            is_class = name == "compression"
            values[name] = f"tfdp.compression.{value}()" if is_class else value
        return _call(values)

    @property
    def lines(self) -> list[str]:
        """What to paste, and where.

        >>> print(*Setting(shard="gradients", remat=True).lines, sep="; ")
        communication=tfdp.Communication(), shard='gradients'; tfdp.remat(model)
        """
        strategy = f"communication={self.communication_line}"
        if self.shard != "none":
            strategy += f", shard={self.shard!r}"
        lines = [strategy]
        if self.remat:
            lines.append("tfdp.remat(model)")
        if self.accumulation_steps > 1:
            lines.append(
                f"optimizer: gradient_accumulation_steps={self.accumulation_steps}, "
                f"with batches of 1 / {self.accumulation_steps} of the rows"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """For files and other processes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, said: Any) -> Setting:
        """What `as_json` returned, checked.

        Raises:
          ConfigurationError: it is none.
        """
        try:
            found = cls(**said)
        except TypeError as error:
            raise ConfigurationError(f"no setting: {error}") from None
        if isinstance(found.hierarchy, list):
            found = dataclasses.replace(found, hierarchy=tuple(found.hierarchy))
        if found.lossy is not None and found.lossy not in LOSSY:
            raise ConfigurationError(
                f"lossy must be one of {', '.join(LOSSY)}. Received: {found.lossy!r}."
            )
        return found


#: What a program gets that says nothing.
DEFAULTS = Setting()


def bytes_in_words(size_bytes: int) -> str:
    """A size as people say it.

    >>> bytes_in_words(25 << 20), bytes_in_words(256 << 10), bytes_in_words(1000)
    ('25 MiB', '256 KiB', '1,000 bytes')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit:,} {name}"
    return f"{size_bytes:,} bytes"


def communication_line(communication: Communication) -> str:
    """The call that makes `communication`, without what is as in the defaults.

    >>> communication_line(Communication(bucket_bytes=2**20, wire_dtype="bfloat16"))
    "tfdp.Communication(bucket_bytes=1 * 2**20, wire_dtype='bfloat16')"
    """
    return _call(
        {
            field.name: getattr(communication, field.name)
            for field in dataclasses.fields(communication)
            if getattr(communication, field.name) != field.default
        }
    )


def _call(values: dict[str, Any]) -> str:
    words = []
    for name, value in values.items():
        is_text = isinstance(value, str) and not value.startswith("tfdp.")
        said = _product(value) if name.endswith("_bytes") else str(value)
        words.append(f"{name}={value!r}" if is_text else f"{name}={said}")
    return f"tfdp.Communication({', '.join(words)})"


def _product(size_bytes: int) -> str:
    for unit, name in ((MIB, "2**20"), (KIB, "2**10")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} * {name}"
    return str(size_bytes)
