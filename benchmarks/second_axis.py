"""Measures training on a mesh of 1 x 2 and of 2 x 1 logical CPUs, beside Keras on JAX.

One script trains a transformer by the same layouts in both: on JAX under Keras'
`ModelParallel` (1 x 2) and `DataParallel` (2 x 1) with as many host devices, compiled
by XLA. One device (1 x 1), plain Keras in both, shows what the backends themselves
differ by. Each figure comes from a process of its own; they take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import time
from typing import Any

from benchmarks.shared import (
    ask_in_turn,
    least_to_most,
    make_parser,
    run_script,
    write_report,
)
from tfdp.errors import DeviceError
from tfdp.tools.processes.children import ask_child

MESHES = ((1, 1), (1, 2), (2, 1))
# The first steps of an epoch, which also wait for its input.
FIRST = 2
RULES: dict[str, tuple[str | None, ...]] = {
    "words/embeddings": ("model", None),
    "attention_./(query|key|value)/kernel": (None, "model", None),
    "attention_./(query|key|value)/bias": ("model", None),
    "attention_./attention_output/kernel": ("model", None, None),
    "up_./kernel": (None, "model"),
    "up_./bias": ("model",),
    "down_./kernel": ("model", None),
    "head/kernel": (None, "model"),
}


@dataclasses.dataclass(frozen=True)
class AxisRequest:
    """A training by `fit`.

    Args:
      backend: of Keras, "tensorflow" or "jax".
      mesh: devices along the axis of data, and along that of weights.
      layers: blocks of the transformer.
      width: its features; the hidden layer has four times as many.
      words: of a sample, and of the vocabulary.
      rows: samples of a global batch.
      steps: that are timed, after as many others.
    """

    backend: str
    mesh: tuple[int, int]
    layers: int = 4
    width: int = 128
    words: tuple[int, int] = (64, 1000)
    rows: int = 16
    steps: int = 30


def transformer(request: AxisRequest) -> Any:
    """The model, with norms after each sum, as in Vaswani et al. 2017."""
    import keras
    from keras.layers import Dense, LayerNormalization, MultiHeadAttention

    keras.utils.set_random_seed(0)
    (length, vocabulary), width = request.words, request.width
    words = keras.Input((length,), dtype="int32")
    x: Any = keras.layers.Embedding(vocabulary, width, name="words")(words)
    for n in range(request.layers):
        attention = MultiHeadAttention(4, width // 4, name=f"attention_{n}")
        x = LayerNormalization()(x + attention(x, x, use_causal_mask=True))
        hidden = Dense(4 * width, "gelu", name=f"up_{n}")(x)
        x = LayerNormalization()(x + Dense(width, name=f"down_{n}")(hidden))
    return keras.Model(words, Dense(vocabulary, name="head")(x))


def measure(request: AxisRequest) -> float:
    """Seconds of a step: the mean over the second epoch, without its first ones."""
    if request.backend == "jax":
        import jax  # noqa: F401 (before Keras, as a script of JAX does)
    import keras
    import numpy as np

    scope: Any = contextlib.nullcontext()
    if request.backend == "tensorflow":
        import tfdp

        tfdp.use_virtual_devices(math.prod(request.mesh))
    mesh = keras.distribution.DeviceMesh(
        request.mesh, ["data", "model"], keras.distribution.list_devices("cpu")
    )
    layout = keras.distribution.LayoutMap(mesh)
    for rule, axes in RULES.items():
        layout[rule] = axes
    if request.mesh == (1, 1):
        pass  # plain Keras
    elif request.backend == "tensorflow":
        scope = tfdp.DataParallelStrategy(layout=layout, alone=True).scope()
    elif request.mesh[1] > 1:
        model_parallel = keras.distribution.ModelParallel(layout_map=layout)
        keras.distribution.set_distribution(model_parallel)
    else:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    with scope:
        model = transformer(request)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        jit = request.backend == "jax"
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=jit)
    shape = (request.rows * request.steps, request.words[0])
    drawn = np.random.default_rng(0).integers(0, request.words[1], shape)
    x = drawn.astype("int32")
    marks: list[float] = []

    class Marks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == FIRST - 1:
                marks.append(time.perf_counter())

    options = {"batch_size": request.rows, "shuffle": False, "verbose": 0}
    fitted = model.fit(x, x, epochs=2, callbacks=[Marks()], **options)
    end = time.perf_counter()
    if not np.isfinite(fitted.history["loss"][-1]):
        raise ValueError("The loss is not finite: the figures would mean nothing.")
    return (end - marks[-1]) / (request.steps - FIRST)


def run(options: argparse.Namespace) -> int:
    """Measures all arms in turn, and prints them side by side."""
    if importlib.util.find_spec("jax") is None:
        raise DeviceError("This compares with Keras on JAX: pip install jax.")
    size = {"layers": 1, "width": 16, "words": (8, 32), "steps": 3}
    small = size if options.quick else {}
    requests = [
        AxisRequest(backend, mesh, **small)  # type: ignore[arg-type]
        for mesh in MESHES
        for backend in ("tensorflow", "jax")
    ]

    def ask(request: AxisRequest) -> float:
        more = {"KERAS_BACKEND": request.backend}
        count = math.prod(request.mesh)
        more["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
        asked, deadline = dataclasses.asdict(request), options.timeout_seconds
        found: float = ask_child("benchmarks.second_axis", asked, deadline, **more)
        return found

    seconds, load, failed = ask_in_turn(requests, options.repeats, ask)
    print("seconds of a step, and steps per second of tfdp over those of JAX\n")
    for mesh in MESHES:
        ours, theirs = (seconds[one] for one in requests if one.mesh == mesh)
        if not ours or not theirs:
            continue
        ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
        print(
            f"{mesh[0]} x {mesh[1]}: tfdp {least_to_most(ours, '.3f', ' s')}, JAX "
            f"{least_to_most(theirs, '.3f', ' s')}, ratio "
            f"{least_to_most(ratios, '.2f')}"
        )
    print(f"\n{load}", flush=True)
    rows = [{**dataclasses.asdict(r), "seconds": of} for r, of in seconds.items()]
    write_report(options.json, "second-axis", loads=load.figures, rows=rows)
    return failed


def find(asked: dict[str, Any]) -> float:
    """The seconds that a worker process measures."""
    mesh, words = tuple(asked.pop("mesh")), tuple(asked.pop("words"))
    return measure(AxisRequest(mesh=mesh, words=words, **asked))


if __name__ == "__main__":
    run_script(make_parser(__doc__, repeats=5), run, find)
