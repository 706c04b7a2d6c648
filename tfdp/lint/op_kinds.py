"""Classifies ops by their type."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.step_ops import ADDS, ASSIGNS, CALLS, DRAWS, MAY_CALL, PYTHON
from tfdp.lint.registry import is_of_graph
from tfdp.lint.terms import outermost

CONDITIONALS = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
LOOPS = frozenset({"While", "StatelessWhile"})
EXTREMES = frozenset({"Max", "Maximum", "Min", "Minimum"})
# Ops that return each index once, and the index of that output.
GIVE_EACH_ONCE = {
    **dict.fromkeys(("Unique", "UniqueV2"), 0),
    **{f"SparseSegment{kind}GradV2": 1 for kind in ("Mean", "SqrtN", "Sum")},
}
SAME_OR_FEWER = frozenset({"Cast", "Identity", "Reshape", "StridedSlice"})


def is_call(op: tf.Operation) -> bool:
    """Whether it calls a function, as a `tf.function` in a step."""
    return op.type in CALLS


def may_call(op: tf.Operation) -> bool:
    """Whether it has functions: a call, a conditional or a loop."""
    return op.type in MAY_CALL


def is_control_flow(op: tf.Operation) -> bool:
    """Whether it is a conditional or a loop."""
    return op.type in MAY_CALL and op.type not in CALLS


def is_conditional(op: tf.Operation) -> bool:
    """Whether it runs one of several branches."""
    return op.type in CONDITIONALS


def is_loop(op: tf.Operation) -> bool:
    """Whether it runs a function again and again."""
    return op.type in LOOPS


def calls_python(op: tf.Operation) -> bool:
    """Whether it calls a Python function."""
    return op.type in PYTHON


def assigns(op: tf.Operation) -> bool:
    """Whether it changes a variable."""
    return op.type in ASSIGNS


def adds_to_variable(op: tf.Operation) -> bool:
    """Whether it changes a variable by a value."""
    return op.type in ADDS


def draws(op: tf.Operation) -> bool:
    """Whether it draws new random numbers in each run."""
    return op.type in DRAWS


def is_extreme(op: tf.Operation) -> bool:
    """Whether it takes a maximum or a minimum."""
    return op.type in EXTREMES


def writes_summary(op: tf.Operation) -> bool:
    """Whether it writes a `tf.summary`."""
    return op.type == "WriteSummary"


def is_constant(op: tf.Operation) -> bool:
    """Whether its value stands in the graph."""
    return op.type == "Const"


def gives_each_once(indices: tf.Tensor) -> bool:
    """Whether no index occurs twice, as in gradients of sparse products."""
    tensor: Any = outermost(indices)
    while is_of_graph(tensor) and tensor.op.type in SAME_OR_FEWER:
        tensor = outermost(tensor.op.inputs[0])
    if not is_of_graph(tensor):
        return False
    place = GIVE_EACH_ONCE.get(tensor.op.type)
    return place is not None and tensor.value_index == place
