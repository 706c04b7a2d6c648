"""Registers what methods of Keras and TensorFlow return in a replica, for `tfdp.lint`.

A gradient: which number it is of. A rank: that it differs by replica. Batch
normalization: each row by itself, although a replica normalizes by statistics of its
own rows, as documented.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.lint.registry import GradientOf, is_of_graph, register
from tfdp.lint.values import FIXED, REPLICATED, Term
from tfdp.seams.replace import replace_for_good
from tfdp.tracing.step import current_step

CUSTOM_GRADIENT = "tensorflow.python.ops.custom_gradient"
CONTEXT = "tensorflow.python.distribute.distribute_lib:ReplicaContextBase"


def register_results() -> None:
    """Replaces the methods, once; outside of replicas they are the same."""
    replace_for_good("tensorflow:GradientTape", "gradient", _with_targets)
    replace_for_good("tensorflow", "shape", _counting)
    replace_for_good("tensorflow", "size", _counting)
    replace_for_good("keras.layers:BatchNormalization", "call", _by_rows)
    replace_for_good("tensorflow:nn", "ctc_loss", _of_each_row)
    replace_for_good(CUSTOM_GRADIENT, "_graph_mode_decorator", _looking_at_gradients)
    replace_for_good(CONTEXT, "replica_id_in_sync_group", _as_rank)


def _counting(count: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.shape` or `tf.size` as an op also of a static shape: of a constant the
    analysis could not tell what it counts. The graph optimizer folds it."""
    is_shape = count.__name__.startswith("shape")
    op = tf.raw_ops.Shape if is_shape else tf.raw_ops.Size

    @functools.wraps(count)
    def counted(
        input: Any,  # noqa: A002  (as TensorFlow names it)
        out_type: Any = None,
        name: Any = None,
    ) -> Any:
        is_plain = is_of_graph(input) and current_step() is not None
        if is_plain and input.shape.is_fully_defined():
            return op(input=input, out_type=out_type or tf.int32, name=name)
        return count(input, out_type, name)

    return counted


def _as_rank(rank: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rank)
    def registered_rank(self: Any) -> Any:
        found, here = rank(self), current_step()
        if here is not None and here[0].here.sees_all_rows:
            return tf.zeros_like(found)  # as on one device
        if here is not None:
            register(found, REPLICATED.but(local=frozenset({"rank"})))
        return found

    return registered_rank


def _by_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def registered_call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(self, inputs, *args, **kwargs)
        if is_of_graph(inputs) and current_step() is not None:
            register(outputs, inputs)
        return outputs

    return registered_call


def _of_each_row(ctc_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of each row, which TensorFlow scatters over times and labels."""

    @functools.wraps(ctc_loss)
    def registered_loss(labels: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        losses, found = ctc_loss(labels, logits, *args, **kwargs), current_step()
        if found is not None and is_of_graph(losses) and is_of_graph(logits):
            value = found[0].analysis(found[1]).value(logits)
            if Term.ROWS in value.terms:
                register(losses, value.but(axes=(0,), each=FIXED, per_row=1))
        return losses

    return registered_loss


def _looking_at_gradients(decorate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decorate)
    def decorate_and_look(f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        found = current_step()
        if found is None or found[0].group_size == 1:
            return decorate(f, args, kwargs)
        from tfdp.tracing.custom_gradients import looked_at  # few programs have such

        return decorate(looked_at(f, *found), args, kwargs)

    return decorate_and_look


def _with_targets(gradient: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gradient)
    def registered_gradient(
        self: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = gradient(self, target, sources, output_gradients, *args, **kwargs)
        if current_step() is not None:
            targets = tf.nest.flatten(target, expand_composites=True)
            targets = tuple(one for one in targets if is_of_graph(one))
            weights = ()
            if output_gradients is not None:
                weights = tuple(tf.nest.flatten(output_gradients))
                if not all(map(is_of_graph, weights)) or len(weights) != len(targets):
                    return result
            by = tf.nest.flatten(sources)
            for one, source in zip(tf.nest.flatten(result), by, strict=False):
                if one is not None and targets:
                    of = source if is_of_graph(source) else None
                    handle = getattr(source, "handle", None)
                    part = getattr(one, "values", one)
                    stated = GradientOf(targets, of, handle, weights)
                    register(part, stated, again=False)
        return result

    return registered_gradient
