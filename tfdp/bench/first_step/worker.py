"""Measures the first step of one training: `python -m tfdp.bench.first_step.worker`.

A process of its own: what TensorFlow has traced once, it keeps. The request comes as
JSON in the first argument; the figures go as JSON into the file named by the second.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdp.bench.first_step.models import CLASSES, MODELS, WORDS, that_stops
from tfdp.cluster.process_memory import forget_peak, resident_and_peak_bytes
from tfdp.files.json_file import write_json

if TYPE_CHECKING:
    import keras

__all__ = ["FirstStepFigures", "FirstStepRequest", "main"]

SEED = 1
STEPS = 3


@dataclasses.dataclass(frozen=True)
class FirstStepRequest:
    """A training by `fit`.

    Args:
      devices: replicas, each on a logical CPU; 1: no strategy.
      model: a key of `MODELS`.
      local_batch: samples of a replica.
      stops: whether the first step fails when its graph is ready.
    """

    devices: int
    model: str
    local_batch: int = 2
    stops: bool = False


@dataclasses.dataclass(frozen=True)
class FirstStepFigures:
    """What was found.

    Args:
      first_seconds: from the call of `fit` to the end of its first step.
      first_processor_seconds: of all threads, likewise.
      next_seconds: of a later step, which has its graph: the median.
      next_processor_seconds: likewise.
      stored_bytes: of TensorFlow itself, and of all copies of weights and of what the
        optimizer keeps of them.
      graph_bytes: what is resident after the steps beyond that: Keras' layers and the
        graph.
      first_peak_bytes: the most that was resident until the first step was done.
      next_peak_bytes: the most in the steps after it.
      ready_peak_bytes: the most that was resident in another process, in which the
        first step failed before it computed anything: TensorFlow, the copies of weights
        and the graph, with all that it takes to build it.
    """

    first_seconds: float
    first_processor_seconds: float
    next_seconds: float
    next_processor_seconds: float
    stored_bytes: int
    graph_bytes: int
    first_peak_bytes: int
    next_peak_bytes: int
    ready_peak_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class _Mark:
    seconds: float
    processor_seconds: float
    resident_bytes: int
    peak_bytes: int


def _mark() -> _Mark:
    """Now; the peak is that since the last mark."""
    seconds, processor = time.perf_counter(), time.process_time()
    gc.collect()
    # What is free goes back to the system, where the C library can do that.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    resident, peak = resident_and_peak_bytes()
    forget_peak()
    return _Mark(seconds, processor, resident, peak)


def measure(request: FirstStepRequest) -> FirstStepFigures:
    """Trains a few steps and looks at the process."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp

    devices = tfdp.use_virtual_devices(request.devices)
    empty = _mark().resident_bytes
    model, inputs, labels = _prepared(request, devices)
    marks: list[_Mark] = []

    class Marks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            marks.append(_mark())

    marks.append(_mark())
    history = _fit(request, model, inputs, labels, Marks())
    if not np.isfinite(history.history["loss"][0]):
        raise ValueError("The loss is not finite: the figures would mean nothing.")
    before, first, *following = marks
    # By shape: what nobody has written yet is not resident.
    variables = [*model.variables, *model.optimizer.variables]
    copy_bytes = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    stored = empty + request.devices * copy_bytes
    pairs = list(zip([first, *following], following, strict=False))
    return FirstStepFigures(
        first_seconds=first.seconds - before.seconds,
        first_processor_seconds=first.processor_seconds - before.processor_seconds,
        next_seconds=float(np.median([b.seconds - a.seconds for a, b in pairs])),
        next_processor_seconds=float(
            np.median([b.processor_seconds - a.processor_seconds for a, b in pairs])
        ),
        stored_bytes=stored,
        graph_bytes=following[-1].resident_bytes - stored,
        first_peak_bytes=first.peak_bytes,
        next_peak_bytes=max(mark.peak_bytes for mark in following),
    )


def measure_ready(request: FirstStepRequest) -> int:
    """The most that is resident before the first step computes anything, bytes."""
    import tensorflow as tf

    import tfdp

    devices = tfdp.use_virtual_devices(request.devices)
    model, inputs, labels = _prepared(request, devices)
    forget_peak()
    try:
        _fit(request, model, inputs, labels)
    except (tf.errors.InvalidArgumentError, tf.errors.CancelledError):
        # Of several replicas that of another one may be told: what it has waited for.
        return resident_and_peak_bytes()[1]
    raise ValueError("The step did not fail: the figure would mean nothing.")


def _prepared(
    request: FirstStepRequest, devices: Sequence[str]
) -> tuple[keras.Model, Any, Any]:
    """The compiled model, and what it is trained on."""
    import keras
    import numpy as np

    import tfdp

    keras.utils.set_random_seed(SEED)
    scope: Any = contextlib.nullcontext()
    if request.devices > 1:
        scope = tfdp.DataParallelStrategy(devices, alone=True).scope()
    with scope:
        model = MODELS[request.model]()
        if request.stops:
            model = that_stops(model)
        loss = keras.losses.SparseCategoricalCrossentropy()
        model.compile(
            keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"], jit_compile=False
        )
        model.optimizer.build(model.trainable_variables)
    rows = STEPS * request.local_batch * request.devices
    generator = np.random.default_rng(SEED)
    shape = (rows, *model.input_shape[1:])
    inputs: Any = generator.integers(0, WORDS, shape)
    if len(shape) > 2:
        inputs = generator.normal(size=shape).astype("float32")
    return model, inputs, generator.integers(0, CLASSES, rows)


def _fit(
    request: FirstStepRequest,
    model: keras.Model,
    inputs: Any,
    labels: Any,
    *callbacks: Any,
) -> keras.callbacks.History:
    return model.fit(
        inputs,
        labels,
        batch_size=request.local_batch * request.devices,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def main(arguments: list[str]) -> None:
    """Entry point of the worker process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    request_json, result_path = arguments
    request = FirstStepRequest(**json.loads(request_json))
    if request.stops:
        write_json(result_path, {"ready_peak_bytes": measure_ready(request)})
    else:
        write_json(result_path, dataclasses.asdict(measure(request)))


if __name__ == "__main__":
    main(sys.argv[1:])
