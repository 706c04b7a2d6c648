"""The batch as one program of all replicas gets it, on a TPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.names import PerReplica
from tfdp.tracing.step import Step


def noting_batch(fn: Callable, given: Any, step: Step) -> Callable:
    """Wraps `fn`, a step that is traced once for all replicas, to note the tensors
    through which it gets the per-replica values of `given`: the analysis cannot look
    through the inputs of its program."""
    args, kwargs = given
    outside = tf.nest.flatten((args, kwargs or {}))

    @library_code
    @functools.wraps(fn)
    def step_of_all(*args: Any, **kwargs: Any) -> Any:
        inside = tf.nest.flatten((args, kwargs))
        step.here.batch = [
            part
            for value, part in zip(outside, inside, strict=True)
            if step.replicas == 1 or isinstance(value, PerReplica)
            if isinstance(part, tf.Tensor)
        ]
        return fn(*args, **kwargs)

    return step_of_all
