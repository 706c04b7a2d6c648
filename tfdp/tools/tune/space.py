"""Settings that can run here and that differ from each other.

Settings with equal buckets are the same training and are tried once. The defaults are
always included, and first.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import Bucket
from tfdp.plan.communication import MIB, Communication
from tfdp.plan.compression import Compression
from tfdp.plan.options import SHARD_STAGES, Given, why_not
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.model import ModelProfile

KIB = 1 << 10
BUCKET_BYTES = tuple(n * KIB for n in (256, 1024, 4096, 8192, 16384, 65536, 131072))
FIRST_BUCKET_BYTES = tuple(n * KIB for n in (64, 256, 4096, 16384))
ACCUMULATION_STEPS = (1, 2, 4, 8)
# Beside "auto", the engines that may be tried.
ENGINES_OF_ONE_PROCESS = ("in_process", "tensorflow")
ENGINES_BETWEEN = ("sockets", "tensorflow")
#: Values of `--allow-lossy` -> the argument of `Communication` and its value or class.
#: Their simulated cost: `tfdp.tools.simulator.lossy.KNOWN_WAYS`.
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
# Fields of a setting that are arguments of `Communication`.
COMMUNICATION = ("bucket_bytes", "first_bucket_bytes", "engine", "hierarchy")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to train; see `Communication`, `DataParallelStrategy` and `tfdp.remat`.

    `lossy` is a key of LOSSY or None, `accumulation_steps` micro-batches per update.
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
        return _changes(self)

    @property
    def lossy_argument(self) -> tuple[str, str] | None:
        """The argument of `Communication`, and its value or the class of its value."""
        return None if self.lossy is None else LOSSY[self.lossy]

    @property
    def communication_line(self) -> str:
        """The line of code to paste."""
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
        """The lines to paste, and where.

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
        """Plain data for files and other processes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Any) -> Setting:
        """The inverse of `as_json`."""
        levels = plain["hierarchy"]
        return cls(
            **{**plain, "hierarchy": levels if levels == "auto" else tuple(levels)}
        )


DEFAULTS = Setting()


@dataclasses.dataclass(frozen=True)
class TrialLayout:
    """The simulated hosts and their replicas on which trials run; the global batch."""

    processes: int
    replicas: int
    rows: int
    automatic_engine: str

    @property
    def all_replicas(self) -> int:
        return self.processes * self.replicas

    @property
    def topology(self) -> Topology:
        return Topology(self.processes, self.replicas)

    def engine_of(self, setting: Setting) -> str:
        """The resolved engine, never "auto"."""
        is_automatic = setting.engine == "auto"
        return self.automatic_engine if is_automatic else setting.engine

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{processes} x {self.replicas} replica{'s' * (self.replicas > 1)}"


def knobs_of(
    place: TrialLayout, allow_lossy: Sequence[str] = (), for_memory: bool = False
) -> dict[str, tuple[Any, ...]]:
    """The options to vary -> their values, the default first.

    `allow_lossy`: keys of LOSSY; `for_memory`: also vary shards, remat, accumulation.
    """
    if unknown := [name for name in allow_lossy if name not in LOSSY]:
        raise ConfigurationError(
            f"--allow-lossy takes {', '.join(LOSSY)}. Received: {unknown[0]!r}."
        )
    if allow_lossy and place.processes == 1:
        raise ConfigurationError(
            "--allow-lossy acts between processes, and there is one: within it sending "
            "less gains nothing. Give --workers, or leave it out."
        )
    engines = ENGINES_OF_ONE_PROCESS if place.processes == 1 else ENGINES_BETWEEN
    knobs: dict[str, tuple[Any, ...]] = {
        "engine": ("auto", *(e for e in engines if e != place.automatic_engine)),
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


def _hierarchies(place: TrialLayout) -> list[tuple[int, int]]:
    """Pairs with two levels; between processes the processes are the levels."""
    if place.processes > 1:
        return []
    number = place.replicas
    return [(number // each, each) for each in range(2, number) if number % each == 0]


class Space:
    """The settings that differ.

    `knobs`: values by option, the default among them. `model`: its gradients determine
    which buckets are equal. `fits`: whether a setting fits in memory; None: all do.
    """

    def __init__(
        self,
        place: TrialLayout,
        knobs: Mapping[str, Sequence[Any]],
        model: ModelProfile,
        fits: Callable[[Setting], bool] | None = None,
    ):
        self.place = place
        self.knobs = {name: tuple(values) for name, values in knobs.items()}
        self.model = model
        self._first: dict[Any, Setting] = {}
        #: One per distinct training, the defaults first if they fit.
        self.settings = tuple(
            each for each in self._all() if fits is None or fits(each)
        )

    def same_as(self, setting: Setting) -> Setting:
        """The setting of this space that is the same training."""
        return self._first.get(self._key(setting), setting)

    def buckets(self, setting: Setting) -> tuple[Bucket, ...]:
        """The buckets of gradients; one tensor each where buckets have no effect."""
        if not self.buckets_act(setting):
            return self.model.buckets(bucket_bytes=1, first_bucket_bytes=1)
        return self.model.buckets(
            bucket_bytes=setting.bucket_bytes,
            first_bucket_bytes=setting.first_bucket_bytes,
        )

    def buckets_act(self, setting: Setting) -> bool:
        """Whether bucket sizes change what is sent, and when."""
        if self.place.all_replicas == 1:
            return False
        return self.place.engine_of(setting) != "in_process"

    def _all(self) -> list[Setting]:
        names = list(self.knobs)
        for values in itertools.product(*self.knobs.values()):
            setting = Setting(**dict(zip(names, values, strict=True)))
            if self._can_act(setting):
                self._first.setdefault(self._key(setting), setting)
        return list(self._first.values())

    def _can_act(self, setting: Setting) -> bool:
        """Whether the strategies accept it."""
        values: dict[str, Any] = {
            "shard": setting.shard,
            "Communication.engine": setting.engine,
            "Communication.hierarchy": setting.hierarchy,
        }
        if (setting.lossy_argument or ("",))[0] == "compression":
            # Whichever method it is.
            values["Communication.compression"] = Compression()
        return not why_not(Given(hosts=self.place.processes, values=values))

    def _key(self, setting: Setting) -> Any:
        plain = dataclasses.replace(
            setting,
            bucket_bytes=DEFAULTS.bucket_bytes,
            first_bucket_bytes=DEFAULTS.first_bucket_bytes,
        )
        if setting.shard in ("gradients", "parameters"):
            # There bucket_bytes also bounds what is in flight.
            return plain, self.buckets(setting), setting.bucket_bytes
        return plain, self.buckets(setting)


def size_text(size_bytes: int) -> str:
    """A size in binary units.

    >>> size_text(25 << 20), size_text(256 << 10), size_text(1000)
    ('25 MiB', '256 KiB', '1,000 bytes')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit:,} {name}"
    return f"{size_bytes:,} bytes"


def communication_line(communication: Communication) -> str:
    """The call that makes `communication`, without arguments that are defaults.

    >>> communication_line(Communication(bucket_bytes=2**20, wire_dtype="bfloat16"))
    "tfdp.Communication(bucket_bytes=1 * 2**20, wire_dtype='bfloat16')"
    """
    return _call(_changes(communication))


def _changes(options: Setting | Communication) -> dict[str, Any]:
    """The options that differ from the defaults."""
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    }


def _call(values: dict[str, Any]) -> str:
    parts = []
    for name, value in values.items():
        is_text = isinstance(value, str) and not value.startswith("tfdp.")
        text = _product(value) if name.endswith("_bytes") else str(value)
        parts.append(f"{name}={value!r}" if is_text else f"{name}={text}")
    return f"tfdp.Communication({', '.join(parts)})"


def _product(size_bytes: int) -> str:
    for unit, name in ((MIB, "2**20"), (KIB, "2**10")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} * {name}"
    return str(size_bytes)
