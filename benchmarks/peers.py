"""Measures `fit` beside plain Keras, the stock strategy, and Keras on JAX.

"keras" is Keras on TensorFlow without a strategy, "tfdp" and "stock" are
`DataParallelStrategy` and `MirroredStrategy`, "jax" is Keras on JAX with its
`DataParallel` (on one device without it), which needs `pip install jax`. All arms train
one model with equally many rows in a step, each in a process of its own, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from benchmarks.shared import (
    add_devices,
    ask_in_turn,
    least_to_most,
    make_parser,
    run_script,
    write_report,
)
from tfdp.tools.processes.children import ask_child

if TYPE_CHECKING:
    import keras

ARMS = ("keras", "tfdp", "stock", "jax")
MODELS = ("tiny", "mlp", "cnn", "transformer")
#: Rows of a step, and steps of a round.
SIZES = {"tiny": (64, 320), "mlp": (64, 32), "cnn": (64, 16), "transformer": (16, 3)}
WORDS, LENGTH, CLASSES = 8000, 128, 10


@dataclasses.dataclass(frozen=True)
class PeerRequest:
    """A training by `fit`.

    Args:
      arm: one of `ARMS`.
      model: one of `MODELS`.
      devices: replicas, each on a logical CPU; "keras" has one.
      steps_per_execution: of `compile`.
      rounds: calls of `fit` that are timed, after a first one.
    """

    arm: str
    model: str
    devices: int
    steps_per_execution: int = 1
    rounds: int = 5


def _model(name: str) -> keras.Model:
    from keras import Input, Model, Sequential, layers

    if name in ("tiny", "mlp"):
        width, depth = (64, 1) if name == "tiny" else (1024, 3)
        hidden = [layers.Dense(width, "relu") for _ in range(depth)]
        return Sequential([Input((64,)), *hidden, layers.Dense(CLASSES)])
    if name == "cnn":
        blocks: list[Any] = []
        for filters in (32, 64, 128):
            blocks += [
                layers.Conv2D(filters, 3, padding="same"),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.MaxPooling2D(),
            ]
        top = [layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)]
        return Sequential([Input((32, 32, 3)), *blocks, *top])
    words = Input((LENGTH,), dtype="int32")
    x: Any = layers.Embedding(WORDS, 256)(words)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, 64)(y, y, use_causal_mask=True)
        x = layers.add([x, y])
        y = layers.Dense(1024, "gelu")(layers.LayerNormalization()(x))
        x = layers.add([x, layers.Dense(256)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return Model(words, layers.Dense(CLASSES)(x))


def _scope(request: PeerRequest) -> Any:
    """The scope in which the model of an arm is made."""
    import keras

    if request.arm == "jax":
        devices = keras.distribution.list_devices()
        if len(devices) != request.devices:
            raise ValueError(f"JAX has {devices}, not {request.devices} devices.")
        if request.devices > 1:
            keras.distribution.set_distribution(
                keras.distribution.DataParallel(
                    devices=devices, auto_shard_dataset=True
                )
            )
        return contextlib.nullcontext()
    import tensorflow as tf

    import tfdp

    devices = tfdp.use_virtual_devices(request.devices)
    if request.arm == "keras":
        return contextlib.nullcontext()
    if request.arm == "stock":
        return tf.distribute.MirroredStrategy(devices).scope()
    return tfdp.DataParallelStrategy(devices, alone=True).scope()


def measure(request: PeerRequest) -> dict[str, Any]:
    """Seconds of the first call of `fit`, which makes one step (or
    `steps_per_execution`), and of a step in each later call."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    with _scope(request):
        model = _model(request.model)
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=request.steps_per_execution,
        )
    rows, steps = SIZES[request.model]
    drawn = np.random.default_rng(1)
    shape = (rows * max(steps, request.steps_per_execution), *model.input_shape[1:])
    inputs: Any = drawn.normal(size=shape).astype("float32")
    if request.model == "transformer":
        inputs = drawn.integers(0, WORDS, shape)
    labels = drawn.integers(0, CLASSES, len(inputs))

    def seconds_of(count: int) -> float:
        own = slice(None, count * rows)
        start = time.perf_counter()
        history = model.fit(inputs[own], labels[own], rows, shuffle=False, verbose=0)
        seconds = time.perf_counter() - start
        if not np.isfinite(history.history["loss"][0]):
            raise ValueError("The loss is not finite: the figures would mean nothing.")
        return seconds / count

    first = request.steps_per_execution * seconds_of(request.steps_per_execution)
    return {"first": first, "each": [seconds_of(steps) for _ in range(request.rounds)]}


def requests_of(options: argparse.Namespace) -> list[PeerRequest]:
    """All trainings, those that are compared one after the other."""
    models = MODELS[:1] if options.quick else options.models
    return [
        PeerRequest(arm, model, devices, executed, 1 if options.quick else 5)
        for model in models
        for executed in ((1, 32) if model == "tiny" else (1,))
        for devices in options.devices
        for arm in options.arms
        if arm != "keras" or devices == options.devices[0]
    ]


def run(options: argparse.Namespace) -> int:
    """Measures all arms, and prints them model by model."""

    def ask(request: PeerRequest) -> Any:
        more = {}
        if request.arm == "jax":
            flag = f"--xla_force_host_platform_device_count={request.devices}"
            more = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
        asked, deadline = dataclasses.asdict(request), options.timeout_seconds
        return ask_child("benchmarks.peers", asked, deadline, **more)

    found, load, failed = ask_in_turn(requests_of(options), options.repeats, ask)
    for request, results in found.items():
        if not results:
            continue
        firsts = [one["first"] for one in results]
        times = [1000 * seconds for one in results for seconds in one["each"]]
        executed = f" x {request.steps_per_execution}"
        print(
            f"{request.model}{executed if request.steps_per_execution > 1 else ''}, "
            f"{request.arm}, N = {request.devices if request.arm != 'keras' else 1}: "
            f"first {least_to_most(firsts, '.2f', ' s')}, a step "
            f"{least_to_most(times, '.2f', ' ms')}"
        )
    print(f"\n{load}", flush=True)
    rows = [{**dataclasses.asdict(r), "found": of} for r, of in found.items()]
    write_report(options.json, "peers", loads=load.figures, rows=rows)
    return failed


def find(asked: dict[str, Any]) -> dict[str, Any]:
    """The figures that a worker process measures."""
    return measure(PeerRequest(**asked))


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=2)
    add_devices(parser, (1, 2, 4))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    run_script(parser, run, find)
