"""Groups of `one_gpu.py` that are timed: steps, sums, packing."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import one_gpu_rows as subjects
from benchmarks.one_gpu_rows import devices, row, run_group, wait_for_turn

Arms = dict[str, Callable[[], Any]]
HALF_MB = 24_000
PLAIN = "plain Keras"
# Figures of one round of turns, and rounds at most.
REPEATS, MOST_ROUNDS = 3, 4
WARM_UP = 3


class Timed:
    """Arms that are timed in turn, one row each.

    Args:
      label: of the rows.
      calls: of an arm in one turn.
      items: of one call, for a rate; named by `of`.
      of: such as "images/s"; "" leaves the rate out.
      seconds: the most for one measurement; there is one round at least.
    """

    def __init__(
        self, label: str, calls: int, items: float, of: str, seconds: float = 15.0
    ):
        self.label, self.calls, self.items, self.of = label, calls, items, of
        self.seconds = seconds
        self.arms: Arms = {}
        self.first: dict[str, float] = {}

    def add(self, name: str, make: Callable[[], Callable[[], Any]]) -> bool:
        """Makes an arm and warms it up; a row only where that fails."""
        import tensorflow as tf

        try:
            start = time.perf_counter()
            call = make()
            made = time.perf_counter()
            call()
            tf.test.experimental.sync_devices()
            self.first[name] = time.perf_counter() - made
            for _ in range(WARM_UP):
                call()
            tf.test.experimental.sync_devices()
        except Exception as error:
            seconds = time.perf_counter() - start
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            subjects.emit(f"{self.label}, {name}", "RAISED", seconds, {}, said)
            return False
        self.arms[name] = call
        return True

    def measure(self, beside: str) -> None:
        """Times all arms in turn, and writes a row for each.

        Args:
          beside: the arm that the others are held against.
        """
        import tensorflow as tf

        from tfdp.tools.measuring.in_turn import time_in_turn

        if not self.arms:
            return
        start = time.perf_counter()
        figures: dict[str, list[float]] = {name: [] for name in self.arms}
        for _ in range(MOST_ROUNDS):
            turn = time_in_turn(
                self.arms,
                repeats=REPEATS,
                calls=self.calls,
                finish=tf.test.experimental.sync_devices,
            )
            for name, seconds in turn.items():
                figures[name] += seconds
            if time.perf_counter() - start > self.seconds:
                break
        taken = (time.perf_counter() - start) / len(self.arms)
        for name, seconds in figures.items():
            middle = statistics.median(seconds)
            told = {"ms": 1e3 * middle, "figures": len(seconds)}
            if self.of:
                told[self.of] = self.items / middle
            told["first s"] = self.first[name]
            if beside in figures:
                pairs = zip(seconds, figures[beside], strict=True)
                ratios = [mine / theirs for mine, theirs in pairs]
                told["ratio"] = statistics.median(ratios)
                told["lowest"], told["highest"] = min(ratios), max(ratios)
            subjects.emit(f"{self.label}, {name}", "ok", taken, told)


def _step_of(make: Callable[[], Any], build: Callable[[], Any], x: Any, y: Any) -> Any:
    """One call trains one batch: Keras' own train function, as `fit` calls it."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    strategy = make()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = build()
        model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    data = tf.data.Dataset.from_tensors((x, y)).cache().repeat().prefetch(2)
    if strategy is not None:
        data = strategy.experimental_distribute_dataset(data)
    batches = iter(data)
    return lambda: model.train_function(batches)


def _fit_of(
    make: Callable[[], Any], build: Callable[[], Any], x: Any, y: Any, steps: int
) -> Any:
    """One call is a `fit` of so many steps."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    strategy = make()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = build()
    data = tf.data.Dataset.from_tensors((x, y)).cache().repeat().prefetch(2)
    return lambda: model.fit(data, steps_per_epoch=steps, verbose=0)


def _sum_of(arm: Callable[[Any], Any], names: list[str], gradients: Any) -> Any:
    """One call adds the gradients of all replicas."""
    from tfdp.tools.measuring.sums import make_reduction

    return make_reduction(arm(names), gradients, read=True)


def _images(real: bool, batch: int) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    side, classes = (224, 1000) if real else (16, 10)
    images = rng.integers(0, 256, (batch, side, side, 3), dtype="uint8")
    return images, rng.integers(0, classes, (batch,)).astype("int32")


def _tokens(real: bool, batch: int) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    words, length = (30522, 128) if real else (100, 16)
    tokens = rng.integers(0, words, (batch, length)).astype("int32")
    return tokens, rng.integers(0, 2, (batch,)).astype("int32")


def _strategies(name: str) -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    import tfdp

    return {
        PLAIN: lambda: None,
        "tfdp": lambda: tfdp.DataParallelStrategy([name], alone=True),
        "MirroredStrategy": lambda: tf.distribute.MirroredStrategy([name]),
    }


def overhead(kind: str, folder: pathlib.Path) -> None:
    """One replica, large models in bfloat16: plain Keras, tfdp, MirroredStrategy."""
    [name], real = devices(1)
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")
    jit = kind.endswith("jit")
    if kind == "resnet50":
        batch, build, data, of = 128, subjects.resnet50, _images, "images/s"
    else:
        batch, build, data, of = 64, subjects.bert, _tokens, "sequences/s"
    batch = batch if real else 8
    x, y = data(real, batch)
    timed = Timed(f"{kind}, bfloat16", 8, batch, of, 6.0 if real else 2.0)
    for arm, make in _strategies(name).items():
        if jit and arm == "MirroredStrategy":
            continue
        timed.add(
            arm,
            functools.partial(
                _step_of, make, functools.partial(build, real, jit), x, y
            ),
        )
    wait_for_turn()
    timed.measure(PLAIN)


def overhead_small(folder: pathlib.Path) -> None:
    """One replica, a tiny network, whose step is all launches."""
    [name], real = devices(1)
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 64)).astype("float32")
    y = rng.integers(0, 10, (32,)).astype("int32")
    seconds = 6.0 if real else 2.0
    measured = []
    for jit in (False, True):
        build = functools.partial(subjects.small_network, real, jit)
        steps = Timed(f"tiny network{', XLA' * jit}", 200, 32, "rows/s", seconds)
        fits = Timed(
            f"tiny network, a fit of 200 steps{', XLA' * jit}",
            1,
            6400,
            "rows/s",
            seconds,
        )
        for arm, make in _strategies(name).items():
            if jit and arm == "MirroredStrategy":
                continue
            steps.add(arm, functools.partial(_step_of, make, build, x, y))
            fits.add(arm, functools.partial(_fit_of, make, build, x, y, 200))
        measured += [steps, fits]
    wait_for_turn()
    for timed in measured:
        timed.measure(PLAIN)


def halves_sums(folder: pathlib.Path) -> None:
    """Two logical GPUs: sums of ResNet-50's gradients beside the stock ways."""
    names, real = devices(2, HALF_MB)
    from benchmarks.bench.one_process.arms import ARMS
    from tfdp.tools.measuring.sums import make_gradients

    shapes = subjects.resnet50_shapes() if real else [(64, 64), (64,)] * 8
    gradients = [make_gradients(shapes, rank, d) for rank, d in enumerate(names)]
    timed = Timed("sum of ResNet-50's gradients", 10, 1, "", 6.0)
    for arm in ("tfdp", "stock-hierarchical-copy", "stock-one-device"):
        timed.add(
            arm,
            functools.partial(_sum_of, ARMS[arm], names, gradients),
        )
    wait_for_turn()
    timed.measure("stock-hierarchical-copy")


def halves_steps(folder: pathlib.Path) -> None:
    """Two logical GPUs: steps of ResNet-50 in bfloat16, 64 images each."""
    names, real = devices(2, HALF_MB)
    import keras

    from benchmarks.bench.one_process.arms import ARMS

    keras.config.set_dtype_policy("mixed_bfloat16")
    batch = 128 if real else 8
    x, y = _images(real, batch)
    timed = Timed("step of ResNet-50", 8, batch, "images/s", 10.0 if real else 2.0)
    for arm in ("tfdp", "stock-hierarchical-copy"):
        timed.add(
            arm,
            functools.partial(
                _step_of,
                functools.partial(ARMS[arm], names),
                functools.partial(subjects.resnet50, real),
                x,
                y,
            ),
        )
    wait_for_turn()
    timed.measure("stock-hierarchical-copy")


def packing(folder: pathlib.Path) -> None:
    """GB/s of packing, unpacking and adding, beside a copy; in a loop of the graph."""
    [name], real = devices(1)
    import tensorflow as tf

    from tfdp.exchange.packing import pack, unpack

    wait_for_turn()
    shapes = subjects.resnet50_shapes() if real else [(64, 64), (64,)] * 8
    turns = 20 if real else 3
    with tf.device(name):
        values = [
            tf.Variable(tf.random.stateless_normal(shape, [0, index]))
            for index, shape in enumerate(shapes)
        ]
        flat = tf.Variable(pack([value.read_value() for value in values]))
    size = 4 * sum(value.shape.num_elements() for value in values)

    def looped(body: Callable[[Any], Any]) -> Callable[[], Any]:
        @tf.function(autograph=False)
        def run() -> Any:
            with tf.device(name):
                found = tf.while_loop(
                    lambda turn, last: turn < turns,
                    lambda turn, last: (turn + 1, body(last)),
                    (tf.constant(0), flat.read_value()),
                    parallel_iterations=1,
                )
                return found[1][:1]

        return run.get_concrete_function()

    def measure(body: Callable[[Any], Any], moved: float) -> dict[str, Any]:
        call, figures = looped(body), []
        for _ in range(WARM_UP):
            call()
        for _ in range(7):
            tf.test.experimental.sync_devices()
            start = time.perf_counter()
            call()
            tf.test.experimental.sync_devices()
            figures.append((time.perf_counter() - start) / turns)
        taken = statistics.median(figures)
        return {"ms": 1e3 * taken, "GB/s": moved / taken / 1e9}

    def packed(last: Any) -> Any:
        # Waits for the turn before, and reads each tensor anew.
        with tf.control_dependencies([last]):
            return pack([value.read_value() for value in values])

    def there_and_back(last: Any) -> Any:
        return pack(unpack(last, values))

    ways = {
        "copy": (lambda last: tf.raw_ops.DeepCopy(x=last), 2 * size),
        "add 1": (lambda last: last + 1.0, 2 * size),
        "add two buffers": (lambda last: last + flat.read_value(), 3 * size),
        "pack": (packed, 2 * size),
        "unpack and pack": (there_and_back, 4 * size),
    }
    for way, (body, moved) in ways.items():
        row(f"tfdp, {way}", measure, body, moved)


GROUPS: dict[str, Callable[[pathlib.Path], None]] = {
    "overhead-resnet50": functools.partial(overhead, "resnet50"),
    "overhead-bert": functools.partial(overhead, "bert"),
    "overhead-bert-jit": functools.partial(overhead, "bert, jit"),
    "overhead-small": overhead_small,
    "halves-sums": halves_sums,
    "halves-steps": halves_steps,
    "packing": packing,
}

if __name__ == "__main__":
    run_group(GROUPS)
