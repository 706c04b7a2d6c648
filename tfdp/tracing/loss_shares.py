"""Tracks which numbers are a replica's share of the global loss.

Each scaling of a loss multiplies it by a factor that is recorded here: n_r / n,
D_r / D, or 1 for a sum. A linear function of such products is a share: it must not be
scaled again, its sum over the replicas is the global number, and reports take the
factor back. `tfdp.lint` follows the products.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

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
        return tensor
