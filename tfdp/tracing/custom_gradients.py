"""Looks at the gradients that a program's own `tf.custom_gradient` functions return.

The analysis takes what a tape returns for the gradient of its target. A function with a
gradient of its own may return another one, which divides by the rows of its replica, or
in which rows depend on other rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.lint.analysis import Analysis
from tfdp.lint.findings import COUNTED
from tfdp.lint.registry import is_of_graph, key_of
from tfdp.lint.values import REPLICATED, Term, Value
from tfdp.tracing.loss_checks import note_crossing
from tfdp.tracing.step import Step

# Their functions return the gradients of what they compute.
LIBRARIES = ("keras", "tensorflow", "tfdp")


def looked_at(f: Callable[..., Any], step: Step, rank: Any) -> Callable[..., Any]:
    """Wraps `f`, which has a gradient of its own, to warn of what that returns."""
    if (getattr(f, "__module__", None) or "").partition(".")[0] in LIBRARIES:
        return f

    @functools.wraps(f)
    def f_and_gradient(*given: Any) -> tuple[Any, Callable[..., Any]]:
        result, gradient = f(*given)
        return result, _looked_at(gradient, f, result, step, rank)

    return f_and_gradient


def _looked_at(
    gradient: Callable[..., Any],
    f: Callable[..., Any],
    result: Any,
    step: Step,
    rank: Any,
) -> Callable[..., Any]:
    @functools.wraps(gradient)
    def returned(*upstream: Any, **options: Any) -> Any:
        gradients = gradient(*upstream, **options)
        known = step.analysis(rank)
        # One of its own: what `known` has computed stays, and a tape has yet to state
        # which number these are gradients of.
        own = Analysis(dict(known.sources), known.rows, known.replicas)
        results = [own.value(one) for one in _tensors(result)]
        if any(value.cross or value.is_scaled_by_count for value in results):
            return gradients  # told where the loss depends on it
        for up, value in zip(_tensors(upstream), results, strict=False):
            own.sources[key_of(up)] = value if Term.ROWS in value.terms else REPLICATED
        is_mean = any(Term.MEAN in value.terms for value in results)
        for one in _tensors(gradients):
            _tell(step, f, own.value(one), is_mean)
        return gradients

    # TensorFlow looks for a parameter `variables`, not behind a wrapper.
    returned.__signature__ = inspect.signature(gradient)  # type: ignore[attr-defined]
    return returned


def _tensors(nested: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(nested, expand_composites=True)
    return list(filter(is_of_graph, flat))


def _tell(step: Step, f: Callable[..., Any], value: Value, is_mean: bool) -> None:
    """Warns of a returned gradient; that of a mean may be divided by its rows."""
    note_crossing(step, value)
    if value.is_scaled_by_count and not is_mean:
        step.suspicions.add(
            f"the function {getattr(f, '__name__', f)!r} with a tf.custom_gradient "
            f"returned a gradient {COUNTED}",
            "counted",
        )
