"""`Compression`: what every way to send fewer bytes of a gradient is told alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.exclusions import check_patterns, is_excluded

CAST_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """A way to send fewer bytes of gradients; `tfdp.compression` has them.

    Args:
      error_feedback: whether what a step did not send is added to what the next one
        sends (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", algorithm 2).
        Costs one float32 copy of the compressed gradients on each one that sends.
      min_bytes: gradients below this size are sent as they are; at least 0.
      exclude: regular expressions; gradients of variables in whose Keras path one is
        found are sent as they are.
      one_dimensional: whether gradients of biases and scales are compressed, too.

    Raises:
      ConfigurationError: when a value is not as above.
    """

    error_feedback: bool = True
    min_bytes: int = 4096
    exclude: Sequence[str] = ()
    one_dimensional: bool = False

    def __post_init__(self) -> None:
        for name in ("error_feedback", "one_dimensional"):
            self.require(isinstance(getattr(self, name), bool), name, "True or False")
        self.require(
            is_whole(self.min_bytes, least=0), "min_bytes", "an integer of at least 0"
        )
        patterns = check_patterns(f"{type(self).__name__}.exclude", self.exclude)
        # A list would make the value unhashable; frozen means that it stays as made.
        object.__setattr__(self, "exclude", patterns or ())

    @property
    def wire_dtype(self) -> str | None:
        """The type in which a link itself sends what this method sends, if it can."""
        return None

    @property
    def plain_steps(self) -> int:
        """In how many steps, the first ones, gradients are sent as they are."""
        return 0

    def get_config(self) -> dict[str, Any]:
        """The values, with the name of their class, as JSON can hold them."""
        values = dataclasses.asdict(self)
        return {"method": type(self).__name__, **values, "exclude": [*self.exclude]}

    def refuse_selection(self) -> None:
        """Refuses a choice of gradients where all of them are treated alike.

        Raises:
          ConfigurationError: when one was made.
        """
        for field in dataclasses.fields(Compression):
            value = getattr(self, field.name)
            if field.name != "error_feedback" and value != field.default:
                raise ConfigurationError(
                    f"{type(self).__name__}({field.name}={value!r}) cannot act between "
                    "hosts without error feedback: the link rounds every gradient. "
                    "Leave it out, or pass error_feedback=True."
                )

    def require(self, holds: bool, name: str, allowed: str) -> None:
        """Refuses the argument `name` unless it `holds` that it is what is `allowed`.

        Raises:
          ConfigurationError: with what is allowed, and what came.
        """
        if not holds:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} must be {allowed}. Received: "
                f"{getattr(self, name)!r}."
            )

    def takes(self, path: str, shape: Sequence[int | None], dtype: str) -> bool:
        """Whether the gradient of a variable is compressed; else it is sent as it is.

        Args:
          path: the variable's Keras path.
          shape: of its gradient; one that is not known is not compressed.
          dtype: of its gradient. Of float64 only what is computed in float64 is
            wanted, and integers have no small errors.
        """
        if dtype not in ("float32", "bfloat16", "float16") or None in shape:
            return False
        elements = 1
        for length in shape:
            elements *= length or 0
        if 4 * elements < max(self.min_bytes, 4):
            return False
        if len(shape) < 2 and not self.one_dimensional:
            return False
        return not is_excluded(path, self.exclude)
