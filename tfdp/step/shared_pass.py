"""The forward and backward pass, which is the same on every replica: one graph for all.

Without it each replica's is traced, optimized and kept by itself, and the first step
takes as many times longer as there are replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.autograph import library_code
from tfdp._private.keras_models import metrics_as_compiled
from tfdp._private.known_code import runs_known_code
from tfdp._private.names import current_rank
from tfdp.step.keras_pass import PassResults, finish_train_step, forward_and_backward
from tfdp.step.repeated_rows import has_rows_once
from tfdp.step.shared_functions import SharedFunctions
from tfdp.step.shared_update import LEAST_VARIABLES, may_share_graphs
from tfdp.tracing.keras_steps import is_stock_train_step
from tfdp.tracing.run import ReplicaRun, trace_of
from tfdp.variables.mirrored import seed_offsets

__all__ = ["by_one_graph", "can_share_pass"]

# Two may be traced anyway, to look whether they are alike.
LEAST_REPLICAS = 3
# What a model holds besides, and does not use in the pass.
NOT_IN_PASS = {
    *("train_function", "test_function", "predict_function", "history"),
    *("metrics", "_compile_metrics", "_compile_config", "_eval_epoch_iterator"),
    *("_distribute_strategy", "_distributed_dataset"),
}


def can_share_pass(step: Callable, run: ReplicaRun, extended: Any) -> bool:
    """Whether replicas may share the forward and backward pass of `step`.

    Only of a step that Keras wrote, and whose parts are in the order in which Keras
    wrote them. On CPUs of one process: it was not run on a GPU, and between hosts
    gradients travel while backprop still makes others, which a function does not
    hand out one by one.

    Args:
      step: what runs on every replica.
      run: which is about to be traced.
      extended: of the strategy.
    """
    if tf.executing_eagerly() or run.replicas < LEAST_REPLICAS:
        return False
    if run.spans_hosts or run.is_local:
        return False
    if not is_stock_train_step(step) or not may_share_graphs(extended):
        return False
    model: Any = step.__self__  # type: ignore[attr-defined]
    optimizer = model.optimizer
    if not model.built or optimizer is None or not optimizer.built:
        return False
    if len(model.trainable_weights) < LEAST_VARIABLES:
        return False
    if extended.shards is not None and extended.shards.stage > 1:
        return False  # gradients are made bucket by bucket, or weights gathered
    if run.counts is not None and len({_if_known(n) for n in run.counts}) > 1:
        return False
    return not _may_ask_layers(model)


def _may_ask_layers(model: Any) -> bool:
    """Whether what comes behind the pass may ask for what that has left in layers.

    Such tensors are of the function's graph, where nobody else can have them.
    """
    for name in ("compute_metrics", "get_metrics_result"):
        own = getattr(model, name)
        if getattr(own, "__func__", own) is not getattr(keras.Model, name):
            return True
    behind = [metrics_as_compiled(model), model.optimizer]
    return not runs_known_code(
        behind, (ReplicaRun,), besides=model, works_on_given=True
    )


def _runs_known_code(model: keras.Model) -> bool:
    """Whether no person's code runs in a forward and backward pass of `model`."""
    held = [value for name, value in vars(model).items() if name not in NOT_IN_PASS]
    return runs_known_code([type(model), *held], (ReplicaRun,), besides=model)


def _if_known(count: Any) -> int | None:
    return count if isinstance(count, int) else None


def by_one_graph(model: keras.Model, run: ReplicaRun) -> Callable:
    """`keras.Model.train_step` of `model`, for all replicas of `run`.

    What the first replica's trace has noted is noted for those that are not traced.
    """
    stored: dict[str, list[Any]] = {}
    SharedFunctions.of(run).looked_into = False
    is_known = _runs_known_code(model)

    def whole_pass(*batch: Any) -> PassResults:
        results = forward_and_backward(model, *batch)
        for weight, gradient in zip(
            model.trainable_weights, results.gradients, strict=True
        ):
            if has_rows_once(gradient):
                run.rows_once.add(id(weight))
        return results

    @library_code
    @functools.wraps(model.train_step)
    def train_step(data: Any) -> Any:
        rank = current_rank()
        batch, before = keras.utils.unpack_x_y_sample_weight(data), run.notes()
        results = SharedFunctions.of(run).results_of(
            "pass",
            rank,
            functools.partial(whole_pass, *batch),
            _own_of(data, run, rank),
            str(tf.distribute.get_strategy().extended.worker_devices[rank]),
            common=run.common_tensors,
            is_known=lambda: is_known,
        )
        if results is None:
            run.put_back(before)
            return keras.Model.train_step(model, data)
        run.gradients_at_once = True
        # The factors of its losses are in the function: nothing here is made of them.
        run.shares.pop(trace_of(rank), None)
        noted = run.local_state.get(trace_of(rank), {})
        for variable in stored.setdefault("by all", list(noted.values())):
            run.note_local_state(rank, variable)
        return finish_train_step(model, data, PassResults(*results))

    return train_step


def _own_of(data: Any, run: ReplicaRun, rank: int) -> list[tf.Tensor]:
    """What is of this replica in the graph, and what its pass may use."""
    first = tf.distribute.get_strategy().extended.first_draw
    run.seed_offsets[rank] = seed_offsets(first + rank)
    parts = tf.nest.flatten(data, expand_composites=True)
    owns_rows = [] if run.owns_rows is None else [run.owns_rows[rank]]
    known = [*parts, run.count_of(rank), *owns_rows, *run.seed_offsets[rank].values()]
    return [part for part in known if isinstance(part, tf.Tensor)]
