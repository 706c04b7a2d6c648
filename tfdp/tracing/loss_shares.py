"""Tracks which numbers are a replica's share of the global loss.

Each scaling of a loss multiplies it by a factor that is recorded here: n_r / n,
D_r / D, or 1 for a sum. A linear function of such products is a share: it must not be
scaled again, its sum over the replicas is the global number, and reports take the
factor back. In graphs `tfdp.lint` follows the products; in eager mode a tape does.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.lint.registry import is_of_graph, key_of, register
from tfdp.lint.values import FACTORS, SHARES, Term, Value


class Standing(enum.Enum):
    """How a number relates to the global loss.

    LOCAL: depends on this replica's rows, or on none. SHARE: its part of a sum over
    replicas. REPORTED: a share without its factor. MIXED: both, or not linear in the
    shares, or unknown.
    """

    LOCAL = "local"
    SHARE = "share"
    REPORTED = "reported"
    MIXED = "mixed"


def standing_of(value: Value) -> Standing:
    """The standing of a number with this value."""
    terms = value.terms - {Term.CONSTANT}
    is_of_loss = terms & (SHARES | FACTORS) or (
        value.of_share and Term.UNKNOWN in terms
    )
    if not is_of_loss:
        return Standing.LOCAL
    if terms == {Term.SHARE}:
        return Standing.SHARE
    return Standing.REPORTED if terms == {Term.REPORTED} else Standing.MIXED


class LossShares:
    """The factors that one replica's trace multiplied losses by.

    `value_of` returns the value of a tensor of a graph.
    """

    def __init__(self, value_of: Callable[[tf.Tensor], Value]) -> None:
        self._value_of = value_of
        self._factors: dict[Any, tf.Tensor] = {}
        self._reports: dict[Any, tf.Tensor] = {}
        # Eager mode: records what depends on the factors.
        self._tape: tf.GradientTape | None = None
        self._is_recording = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records what depends on the factors within the context, in eager mode."""
        tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self._tape, self._is_recording = tape, True
        try:
            with tape:
                yield
        finally:
            self._is_recording = False

    def factor(self, value: Any, dtype: tf.DType, power: int = 0) -> tf.Tensor:
        """`value` as a factor that scales a loss to its share; with `power`, it is also
        proportional to the number of the replica's rows to this power."""
        return self._note(self._factors, value, dtype, Term.FACTOR, power)

    def report_factor(self, value: Any, dtype: tf.DType) -> tf.Tensor:
        """`value` as a factor that takes a share back for a report."""
        return self._note(self._reports, value, dtype, Term.REPORT_FACTOR)

    def __bool__(self) -> bool:
        return bool(self._factors)

    def standing_of(self, value: Any) -> Standing:
        if not tf.is_tensor(value) or not (self._factors or self._reports):
            return Standing.LOCAL
        if isinstance(value, tf.__internal__.EagerTensor):
            return self._standing_in_eager_mode(value)
        return standing_of(self._value_of(value))

    def has_constant(self, value: tf.Tensor) -> bool:
        """Whether a term of `value`, a share in a graph, is a nonzero constant."""
        return is_of_graph(value) and Term.CONSTANT in self._value_of(value).terms

    def _note(
        self,
        noted: dict[Any, tf.Tensor],
        value: Any,
        dtype: tf.DType,
        kind: Term,
        power: int = 0,
    ) -> tf.Tensor:
        # A new tensor, so that products with it can be identified.
        tensor = tf.identity(tf.cast(value, dtype))
        noted[key_of(tensor)] = tensor
        register(tensor, Value(terms=frozenset({kind}), of_share=True, power=power))
        if self._is_recording and isinstance(tensor, tf.__internal__.EagerTensor):
            self._tape.watch(tensor)  # type: ignore[union-attr]
        return tensor

    def _standing_in_eager_mode(self, value: tf.Tensor) -> Standing:
        if self._tape is None:
            return Standing.LOCAL
        total = tf.reduce_sum(value)
        paused = self._tape.stop_recording if self._is_recording else None
        with paused() if paused else contextlib.nullcontext():
            reports = self._slopes(value, self._reports)
            if reports:
                return Standing.REPORTED
            slopes = self._slopes(value, self._factors)
        if not slopes:
            return Standing.LOCAL
        shares = sum(float(f) * float(slope) for f, slope in slopes)
        # If it is linear in the factors without other terms, it equals the slopes' sum.
        size = sum(abs(float(f) * float(slope)) for f, slope in slopes)
        is_share = not np.isfinite(shares) or abs(shares - float(total)) <= 1e-5 * size
        return Standing.SHARE if is_share else Standing.MIXED

    def _slopes(
        self, value: tf.Tensor, noted: dict[Any, tf.Tensor]
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        factors = list(noted.values())
        slopes = self._tape.gradient(value, factors)  # type: ignore[union-attr]
        pairs = zip(factors, slopes, strict=True)
        return [(factor, slope) for factor, slope in pairs if slope is not None]
