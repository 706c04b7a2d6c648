"""`Compression`: the options that all compression methods share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError

CAST_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """The base of `tfdp.compression`'s methods; for the arguments see `Int8`.

    Error feedback: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", alg. 2.
    """

    error_feedback: bool = True
    min_bytes: int = 4096
    exclude: Sequence[str] = ()
    one_dimensional: bool = False

    def __post_init__(self) -> None:
        # Loaded by programs that compress, not by all that could.
        from tfdp.plan.exclusions import check_patterns

        for name in ("error_feedback", "one_dimensional"):
            self.require(isinstance(getattr(self, name), bool), name, "True or False")
        self.require(
            is_whole(self.min_bytes, least=0), "min_bytes", "an integer of at least 0"
        )
        patterns = check_patterns(f"{type(self).__name__}.exclude", self.exclude)
        # Hashable and immutable.
        object.__setattr__(self, "exclude", patterns or ())

    @property
    def wire_dtype(self) -> str | None:
        """The type in which a link itself can send the gradients, if it can."""
        return None

    @property
    def plain_steps(self) -> int:
        """The number of first steps that send gradients uncompressed."""
        return 0

    def get_config(self) -> dict[str, Any]:
        """The fields and the name of the class, ready for JSON."""
        values = dataclasses.asdict(self)
        return {"method": type(self).__name__, **values, "exclude": [*self.exclude]}

    @property
    def selects(self) -> bool:
        """Whether gradients are selected by options that are not the defaults."""
        names = ("min_bytes", "exclude", "one_dimensional")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return any(getattr(self, name) != defaults[name] for name in names)

    def require(self, holds: bool, name: str, allowed: str) -> None:
        """Raises `ConfigurationError` with the `allowed` values unless it `holds`."""
        if not holds:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} must be {allowed}. Received: "
                f"{getattr(self, name)!r}."
            )

    def takes(self, path: str, shape: Sequence[int | None], dtype: str) -> bool:
        """Whether the gradient of the variable at the Keras `path` is compressed.

        One of unknown shape is not. Nor is float64, which is used for precision, nor
        integers, which have no small errors.
        """
        if dtype not in ("float32", "bfloat16", "float16") or None in shape:
            return False
        elements = 1
        for length in shape:
            elements *= length or 0
        is_small = 4 * elements < max(self.min_bytes, 4)
        if is_small or (len(shape) < 2 and not self.one_dimensional):
            return False
        from tfdp.plan.exclusions import is_excluded

        return not is_excluded(path, self.exclude)
