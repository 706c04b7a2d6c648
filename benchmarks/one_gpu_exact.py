"""Groups of `one_gpu.py` on what is right or wrong: sums, stages, copies that drift."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.one_gpu_rows import devices, emit, row, run_group

MEMORY_MB = 4_000
STEPS, BATCH, SIDE, CLASSES = 4, 64, 12, 10
STAGES = ("none", "optimizer", "gradients", "parameters")
POLICIES = {
    "float32": "float32",
    "jit": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


def sums(count: int, engine: Any, folder: pathlib.Path) -> None:
    """Sums of whole numbers of five types, on every replica."""
    names, _ = devices(count, MEMORY_MB)
    import tfdp
    from tfdp.tools.selftest.training import check_sums

    def check(**options: Any) -> dict[str, Any]:
        strategy = tfdp.DataParallelStrategy(
            names,
            communication=tfdp.Communication(engine=engine, **options),
            alone=True,
        )
        return {"devices": count, "sums": check_sums(strategy)}

    row(f"engine {engine}", check)
    if count == 4:
        row(f"engine {engine}, two levels", lambda: check(hierarchy=(2, 2)))


def stages(kind: str, folder: pathlib.Path) -> None:
    """Each stage on two logical GPUs beside one device on the whole batch."""
    names, _ = devices(2, MEMORY_MB)
    import keras
    import tensorflow as tf

    import tfdp

    tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(POLICIES[kind])
    jit, x, y = kind == "jit", *_data(kind == "float16")
    build = functools.partial(_network, kind == "float16", jit)
    expected: list[Any] = []

    def one_device() -> dict[str, Any]:
        model = build()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        expected.extend(model.get_weights())
        return _scale(model)

    row(f"{kind}, plain Keras", one_device)
    if not expected:
        return
    halves: list[Any] = []

    def yardstick() -> dict[str, Any]:
        halves.extend(_in_halves(build, jit, x, y))
        return _differences(halves, expected)

    row(f"{kind}, yardstick", yardstick)

    def replicas(stage: str) -> dict[str, Any]:
        strategy = tfdp.DataParallelStrategy(names, shard=stage, alone=True)
        with strategy.scope():
            model = build()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        found = model.get_weights()
        figures = _differences(found, expected) | _scale(model)
        if halves:
            beside = _differences(found, halves)["ULP of the tensor"]
            figures["ULP from the yardstick"] = beside
        return figures

    for stage in STAGES:
        if jit and stage == "parameters":
            emit(f"{kind}, {stage}", "ok", 0.0, {"note": "refused with XLA"})
        else:
            row(f"{kind}, {stage}", replicas, stage)


def _data(with_infinity: bool) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, SIDE, SIDE, 3)).astype("float32")
    if with_infinity:
        # In the second step, in the half of the second replica.
        x[BATCH + BATCH // 2 + 3, 0, 0, 0] = np.inf
    return x, rng.integers(0, CLASSES, size=(STEPS * BATCH,))


def _network(scales_losses: bool, jit: bool) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.LayerNormalization(),
            keras.layers.Flatten(),
            # Large enough that its weights are sharded.
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    # SGD, since Adam makes a whole step of the rounding of a gradient that is zero.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    if scales_losses:
        # So small that only the infinity overflows.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit)
    return model


def _scale(model: Any) -> dict[str, Any]:
    """Half of what it began with where one step was skipped."""
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return {} if scale is None else {"loss scale": float(scale)}


def _in_halves(build: Callable[[], Any], jit: bool, x: Any, y: Any) -> list[Any]:
    """Plain Keras on one device, each gradient the mean of those of two halves."""
    import tensorflow as tf

    model = build()
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    half = BATCH // 2

    @tf.function(jit_compile=jit)
    def step(x: Any, y: Any) -> None:
        parts = []
        for rows in (slice(0, half), slice(half, BATCH)):
            with tf.GradientTape() as tape:
                loss = model.loss(y[rows], model(x[rows], training=True))
                loss = optimizer.scale_loss(loss)
            parts.append(tape.gradient(loss, variables))
        means = [(one + other) / 2 for one, other in zip(*parts, strict=True)]
        optimizer.apply(means, variables)

    for first in range(0, len(x), BATCH):
        rows = slice(first, first + BATCH)
        step(tf.constant(x[rows]), tf.constant(y[rows]))
    return list(model.get_weights())


def _differences(found: Sequence[Any], expected: Sequence[Any]) -> dict[str, Any]:
    """In units in the last place of float32; NaN where a weight is not finite."""
    import numpy as np

    of_tensor, of_number, same = [], [], 0
    for one, other in zip(found, expected, strict=True):
        apart = np.abs(one.astype("f8") - other.astype("f8"))
        largest = np.maximum(np.abs(one), np.abs(other)).astype("f4")
        of_tensor.append(float(apart.max() / np.spacing(largest.max())))
        of_number.append(float((apart / np.spacing(largest)).max()))
        same += bool((one == other).all())
    worst = int(np.argmax(of_tensor))
    return {
        "ULP of the tensor": of_tensor[worst],
        "ULP of the number": float(np.max(of_number)),
        "worst tensor": f"{worst} of {len(expected)}, {list(expected[worst].shape)}",
        "tensors bit for bit": same,
    }


def drift(deterministic: bool, folder: pathlib.Path) -> None:
    """Whether copies of a table drift where many rows have one index."""
    names, real = devices(2, MEMORY_MB)
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp

    keras.utils.set_random_seed(0)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    rng = np.random.default_rng(0)
    rows, words, width = (2048, 50, 64) if real else (512, 50, 8)
    x, y = rng.integers(0, words, (rows, 32)), rng.integers(0, 2, rows)

    def train() -> dict[str, Any]:
        strategy = tfdp.DataParallelStrategy(names, alone=True)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.layers.Embedding(words, width),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(2),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, jit_compile=False)
        check = tfdp.callbacks.ReplicaCheck(every_steps=8, on_drift="warn")
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            history = model.fit(
                x, y, batch_size=rows // 16, epochs=2, verbose=0, callbacks=[check]
            )
        drifted = sorted({found.variable for found in check.drifts})
        return {
            "deterministic ops": deterministic,
            "checks": check.checks,
            "drifted": ", ".join(drifted) or "nothing",
            "loss": history.history["loss"][-1],
        }

    row("embedding", train)
    row("embedding, again", train)


GROUPS = {
    "sums-2": functools.partial(sums, 2, "in_process"),
    "sums-4": functools.partial(sums, 4, "in_process"),
    "sums-tensorflow": functools.partial(sums, 2, "tensorflow"),
    **{f"stages-{kind}": functools.partial(stages, kind) for kind in POLICIES},
    "drift": functools.partial(drift, False),
    "drift-deterministic": functools.partial(drift, True),
}

if __name__ == "__main__":
    run_group(GROUPS)
