"""One way to train: what `Communication` and the strategy are given. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.plan.communication import MIB, Communication

__all__ = ["DEFAULTS", "LOSSY", "Setting", "bytes_in_words", "communication_line"]

KIB = 1 << 10
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
