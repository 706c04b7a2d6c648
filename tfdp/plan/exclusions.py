"""Excludes variables from weight decay, layer adaptation or compression, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tfdp.errors import ConfigurationError

# The default: Keras names every bias `bias`, the scale of batch, layer and group
# normalisation `gamma` and their offset `beta`, and that of RMSNormalization `scale`.
# Only the last part of the path counts: a layer called "scale" keeps its kernel.
BIASES_AND_NORM_SCALES = (r"(^|/)(bias|beta|gamma|scale)$",)


def check_patterns(
    argument: str, patterns: Sequence[str] | None
) -> tuple[str, ...] | None:
    """`patterns` as a tuple of valid regular expressions; None stays None.

    Raises `ConfigurationError` otherwise, also for a single string, because its letters
    would be used as patterns.
    """
    if patterns is None:
        return None
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise ConfigurationError(
            f"{argument} must be None or a list of regular expressions, such as "
            f"['bias', 'gamma$']. Received: {patterns!r}."
        )
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigurationError(
                f"{argument} must hold non-empty strings only. Received: {pattern!r}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"{argument} must hold valid regular expressions: {error}. "
                f"Received: {pattern!r}."
            ) from error
    return tuple(patterns)


def variable_path(variable: Any) -> str:
    """The Keras path of a variable (`dense/kernel`), or its TensorFlow name."""
    path = getattr(variable, "path", None)
    return path if path else variable.name.split(":")[0]


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern matches anywhere in `path`.

    >>> is_excluded("encoder/dense/bias", BIASES_AND_NORM_SCALES)
    True
    >>> is_excluded("scale/kernel", BIASES_AND_NORM_SCALES)
    False
    """
    return any(re.search(pattern, path) for pattern in patterns)
