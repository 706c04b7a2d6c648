"""Tracks which numbers are a replica's share of the global loss.

Each scaling of a loss multiplies it by a factor that is recorded here: n_r / n,
D_r / D, or 1 for a sum. A linear function of such products is a share: it must not be
scaled again, its sum over the replicas is the global number, and reports take the
factor back. `tfdp.lint` follows the products.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
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


@dataclasses.dataclass
class GivenLosses:
    """Losses and gradients of a step, for the checks at its end."""

    #: Gradients that the program gives optimizers: rank, gradients, optimizer's name.
    gradients: list[tuple[Any, list[Any], str]] = dataclasses.field(
        default_factory=list
    )
    #: Whether a loss was scaled to its share of the global one.
    are_scaled: bool = False
    #: Whether losses of layers (penalties, `add_loss`) were added to the model's.
    are_added: bool = False
    #: Whether the program reads the number of replicas in a replica, to scale by it.
    scales_by_hand: bool = False


def note_gradients(step: Any, rank: Any, gradients: Iterable[Any], name: str) -> None:
    """Records gradients that a program gives the optimizer `name`."""
    is_first = step.trace(rank) is step.traces[0]
    # One replica is enough: all do the same.
    if step.group_size > 1 and is_first:
        step.of(GivenLosses).gradients.append((rank, list(gradients), name))
