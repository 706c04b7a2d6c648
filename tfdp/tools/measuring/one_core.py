"""Measures what one core achieves: gradient compression, and sums of table rows.

It runs in a process with single-threaded TensorFlow: `python -m
tfdp.tools.measuring.one_core`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdp.errors import CollectiveError
from tfdp.tools.measuring.gradient_sets import FLOAT32_BYTES, GRADIENT_SETS
from tfdp.tools.measuring.in_turn import turns
from tfdp.tools.processes.children import ProcessFailed, answer, ask_child

if TYPE_CHECKING:
    import tensorflow as tf


#: Name in `KNOWN_WAYS` of the simulator -> method of `tfdp.compression`, arguments.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("Cast", {"dtype": "bfloat16"}),
    "int8": ("Int8", {}),
    "fp8": ("FP8", {"format": "e4m3"}),
    "int4": ("Int4", {}),
    "sign": ("SignSGD", {}),
    "top_k": ("TopK", {"ratio": 0.01}),
    "random_k": ("RandomK", {"ratio": 0.01}),
    "power_sgd": ("PowerSGD", {"rank": 1, "start_step": 0}),
}
PEERS = 2
# Two replicas, each with a batch of texts; rows of 256 bytes.
PARTS, ROWS, WIDTH, WORDS = 2, 20_480, 64, 200_000
SEED = 1


def measure_coding(
    repeats: int, quick: bool, timeout_seconds: float
) -> dict[str, float]:
    """Bytes of gradients a second of one core, by the names of `KNOWN_WAYS`.

    `quick`: few and small gradients, as a smoke test. Raises CollectiveError if it
    fails or takes too long.
    """
    return _run("coding", repeats, quick, timeout_seconds)


def measure_rows(repeats: int, quick: bool, timeout_seconds: float) -> float:
    """Bytes of rows a second that a core joins and sums; raises as `measure_coding`."""
    return _run("rows", 1 if quick else repeats, quick, timeout_seconds)


def _run(what: str, repeats: int, quick: bool, timeout_seconds: float) -> Any:
    request = {"what": what, "repeats": repeats, "quick": quick}
    try:
        return ask_child("tfdp.tools.measuring.one_core", request, timeout_seconds)
    except ProcessFailed as error:
        raise CollectiveError(f"measuring {what} on one core failed: {error}") from None


def _find(request: dict[str, Any]) -> Any:
    take_one_thread()
    if request["what"] == "rows":
        return _rows_bytes_per_second(request["repeats"])
    from tfdp import compression

    methods = {
        way: getattr(compression, name)(**arguments)
        for way, (name, arguments) in WAYS.items()
    }
    shapes = GRADIENT_SETS["tiny" if request["quick"] else "resnet50"]()
    found = time_coding(methods, shapes, request["repeats"])
    return {way: dense / statistics.median(s) for way, (dense, _, s) in found.items()}


def take_one_thread() -> None:
    """Limits TensorFlow to one thread: a core stands for a host."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def time_coding(
    methods: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], repeats: int
) -> dict[str, tuple[int, float, list[float]]]:
    """Times a host's step without sending: encode, decode of two peers, add.

    The methods take turns; each codes the gradients that it supports. Returns by name
    the bytes of the gradients, the bytes that each of two peers sends instead, and the
    seconds of each repeat.
    """
    prepared = {name: _prepare(method, shapes) for name, method in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for name in turns(list(methods), repeats):
        began = time.perf_counter()
        prepared[name][0]()
        seconds[name].append(time.perf_counter() - began)
    return {
        name: (dense, sent, seconds[name])
        for name, (_, dense, sent) in prepared.items()
    }


class _Echo:
    """A group of two peers; the other one echoes this one."""

    size = PEERS
    place = 0

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [tensor + tensor for tensor in tensors]

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        return tf.stack([words] * PEERS)

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.gather(words), words

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        return rows


def _prepare(
    method: Any, shapes: Sequence[tuple[int, ...]]
) -> tuple[Callable[[], object], int, float]:
    """One exchange, warmed up; the bytes of its gradients, and those sent."""
    import tensorflow as tf

    taken = [shape for shape in shapes if method.takes("", shape, "float32")]
    values = [
        tf.random.stateless_normal(shape, [0, index])
        for index, shape in enumerate(taken)
    ]
    slots = [
        {name: tf.ones(size) for name, size in method.slots(shape).items()}
        for shape in taken
    ]
    # Variables, since TensorFlow computes functions of constants only once.
    steps = tf.Variable(0, dtype=tf.int64)
    held = [tf.Variable(value) for value in values]

    @tf.function(autograph=False)
    def exchange() -> list[tf.Tensor]:
        now = [value.read_value() for value in held]
        found = method.exchange(now, slots, _Echo(), steps.assign_add(1))
        # One number of each: all are computed, little is returned.
        made = [*found.sums, *found.left]
        return [tf.reduce_sum(tf.reshape(value, [-1])[:1]) for value in made]

    for _ in range(2):
        exchange()
    dense = FLOAT32_BYTES * sum(value.shape.num_elements() for value in values)
    return (
        lambda: [number.numpy() for number in exchange()],
        dense,
        method.sent_bytes(taken, PEERS),
    )


def _rows_bytes_per_second(repeats: int) -> float:
    import numpy as np
    import tensorflow as tf

    from tfdp.exchange.sparse import join_rows
    from tfdp.tools.measuring.models import ZIPF_EXPONENT

    random = np.random.default_rng(SEED)
    values = random.normal(size=(PARTS, ROWS, WIDTH)).astype(np.float32)
    places = (random.zipf(ZIPF_EXPONENT, (PARTS, ROWS)) - 1) % WORDS
    parts = [
        tf.IndexedSlices(tf.constant(v), tf.constant(p.astype(np.int32)))
        for v, p in zip(values, places, strict=True)
    ]

    @tf.function
    def join() -> tf.Tensor:
        return join_rows(parts, summed=True).values

    join()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        join()
        seconds.append(time.perf_counter() - began)
    return float(values.nbytes / statistics.median(seconds))


if __name__ == "__main__":
    answer(sys.argv[1:], _find)
