"""Measures how long `fit` takes until its first step is done, and what memory it takes.

Over numbers of replicas. Each figure comes from two processes of its own, since
TensorFlow keeps what it has traced once: one trains, and in the other the first step
fails when its graph is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.shared import (
    add_devices,
    ask_in_turn,
    make_parser,
    needs_proc,
    run_script,
    write_report,
)
from tfdp.cluster.machine import forget_peak, resident_and_peak_bytes
from tfdp.tools.processes.children import ask_child

if TYPE_CHECKING:
    import keras

SUBJECTS, QUICK_SUBJECTS = ("resnet50", "transformer-12"), ("transformer-tiny",)
# TensorFlow's oneDNN build keeps a pool of what it once took.
ENVIRONMENT = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
CLASSES, WORDS = 10, 1000
SEED, STEPS = 1, 3
COLUMNS = "{:>16} {:>2} {:>22} {:>24} {:>12} {:>13} {:>10} {:>11} {:>12} {:>11}"
TITLES = (
    *("model", "N", "first step, s", "processor, s", "next step, s"),
    *("processor, s", "ready, MB", "graph, MB", "at rest, MB", "peaks, MB"),
)


def _resnet50() -> keras.Model:
    from keras import applications

    return applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=CLASSES)


def _transformer(layers: int, width: int, heads: int) -> Callable[[], keras.Model]:
    """Vaswani et al. 2017, section 3.1, with the norms before, as most train it now."""

    def build() -> keras.Model:
        import keras
        from keras.layers import Dense, LayerNormalization, MultiHeadAttention

        words = keras.Input((16,), dtype="int32")
        x: Any = keras.layers.Embedding(WORDS, width)(words)
        for _ in range(layers):
            y = LayerNormalization()(x)
            x = keras.layers.add([x, MultiHeadAttention(heads, width // heads)(y, y)])
            y = Dense(4 * width, "gelu")(LayerNormalization()(x))
            x = keras.layers.add([x, Dense(width)(y)])
        x = keras.layers.GlobalAveragePooling1D()(x)
        return keras.Model(words, Dense(CLASSES, activation="softmax")(x))

    return build


#: What makes a model, not yet compiled: of images, or of words.
MODELS: dict[str, Callable[[], keras.Model]] = {
    "resnet50": _resnet50,  # for images of 32 x 32
    "transformer-12": _transformer(12, 256, 8),
    "transformer-tiny": _transformer(2, 16, 2),
}


def that_stops(model: keras.Model) -> keras.Model:
    """`model`, of which a step fails before anything of it is computed."""
    import keras
    import tensorflow as tf

    class StopsHere(keras.layers.Layer):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            # Not known while the graph is built; never so.
            is_odd = tf.reduce_any(tf.not_equal(inputs, inputs))
            with tf.control_dependencies([tf.debugging.Assert(is_odd, ["stops"])]):
                return tf.identity(inputs)

    first = model.inputs[0]
    inputs = keras.Input(first.shape[1:], dtype=first.dtype)
    return keras.Model(inputs, model(StopsHere()(inputs)))


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


def run(options: argparse.Namespace) -> int:
    """Measures every model on every number of replicas, in turn; 1 replica trains
    without a strategy."""
    needs_proc()
    requests = [
        FirstStepRequest(number, model)
        for model in (QUICK_SUBJECTS if options.quick else SUBJECTS)
        for number in options.devices
    ]
    found, load, failed = ask_in_turn(
        requests,
        options.repeats,
        lambda request: _measure(request, options.timeout_seconds),
    )
    print(
        f"fit to the end of its first step, Adam, {requests[0].local_batch} samples a "
        f"replica; medians (least to most) of {options.repeats}; next: a step that has "
        "its graph; ready: the peak before the first step computes anything, with "
        "weights and TensorFlow; at rest: weights, slots, TensorFlow; peaks: of the "
        "first step, of the next\n\n" + COLUMNS.format(*TITLES)
    )
    for request, figures in found.items():
        if figures:
            print(_line(request, figures))
    print(f"\n{load}", flush=True)
    rows = [
        {**dataclasses.asdict(r), "figures": [dataclasses.asdict(f) for f in of]}
        for r, of in found.items()
    ]
    write_report(options.json, "first-step", loads=load.figures, rows=rows)
    return failed


def _line(request: FirstStepRequest, figures: Sequence[FirstStepFigures]) -> str:
    def all_of(key: str) -> list[float]:
        return [getattr(figure, key) for figure in figures]

    def middle(key: str, factor: float = 1.0, form: str = ".0f") -> str:
        return format(statistics.median(all_of(key)) * factor, form)

    def spread(key: str) -> str:
        values = all_of(key)
        return f"{middle(key, form='.1f')} ({min(values):.1f} .. {max(values):.1f})"

    peaks = [middle(f"{of}_peak_bytes", 1e-6) for of in ("first", "next")]
    return COLUMNS.format(
        request.model,
        request.devices,
        spread("first_seconds"),
        spread("first_processor_seconds"),
        middle("next_seconds", form=".2f"),
        middle("next_processor_seconds", form=".2f"),
        middle("ready_peak_bytes", 1e-6),
        middle("graph_bytes", 1e-6),
        middle("stored_bytes", 1e-6),
        ", ".join(peaks),
    )


def _measure(request: FirstStepRequest, timeout_seconds: float) -> FirstStepFigures:
    found: dict[str, Any] = {}
    for stops in (False, True):
        asked = dataclasses.asdict(dataclasses.replace(request, stops=stops))
        found |= ask_child(
            "benchmarks.first_step", asked, timeout_seconds, **ENVIRONMENT
        )
    return FirstStepFigures(**found)


def find(asked: dict[str, Any]) -> dict[str, Any]:
    """What a worker process measures."""
    request = FirstStepRequest(**asked)
    if request.stops:
        return {"ready_peak_bytes": measure_ready(request)}
    return dataclasses.asdict(measure(request))


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=3)
    add_devices(parser, [1, 2])
    run_script(parser, run, find)
