"""Times the arithmetic of each method, and says on which links it pays.

One core encodes what it sends, decodes what two peers have sent, adds it up and finds
what is left: all that a host does in a step but for the sending, which is left out (the
other peer sends the same). On a link of w bytes per second n bytes of gradients then
take n / w as they are, and m / w + t compressed to m bytes in t seconds, so a method
pays below w = (n - m) / t.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.bench.results import least_to_most
from tfdp.bench.subjects.gradient_sets import FLOAT32_BYTES, GRADIENT_SETS
from tfdp.compression import FP8, Cast, Int4, Int8, PowerSGD, RandomK, SignSGD, TopK
from tfdp.compression.method import Method
from tfdp.files.asked_for import write_json_for

__all__ = ["run_compression"]

METHODS: dict[str, Method] = {
    "Cast('bfloat16')": Cast("bfloat16"),
    "Int8()": Int8(),
    "Int4()": Int4(),
    "FP8('e4m3')": FP8("e4m3"),
    "SignSGD()": SignSGD(),
    "TopK(0.01)": TopK(0.01),
    "RandomK(0.01)": RandomK(0.01),
    "PowerSGD(1)": PowerSGD(1, start_step=0),
    "PowerSGD(4)": PowerSGD(4, start_step=0),
}
BITS_PER_GBIT = 1e9
PEERS = 2


class _Echo:
    """Two peers of which one says what the other does."""

    size = PEERS
    place = 0

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [tensor + tensor for tensor in tensors]

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        return tf.stack([words] * PEERS)

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.gather(words), words

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        return rows


@dataclasses.dataclass(frozen=True)
class _Figures:
    """What one method did.

    Args:
      dense_bytes: of the gradients that it takes.
      sent_bytes: in their place, by each of two peers.
      seconds: per repeat.
    """

    dense_bytes: int
    sent_bytes: float
    seconds: tuple[float, ...]

    @property
    def pays_below_gbit(self) -> float:
        """The rate of the slowest link on which it does not pay, in Gbit/s."""
        saved = self.dense_bytes - self.sent_bytes
        return 8 * saved / statistics.median(self.seconds) / BITS_PER_GBIT


def run_compression(*, repeats: int, quick: bool, json_path: str | None) -> int:
    """Runs `tfdp bench compression`; returns the exit code."""
    # As in the other cases one core stands for a host.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    subject = "tiny" if quick else "resnet50"
    shapes = GRADIENT_SETS[subject]()
    calls = {name: _prepare(method, shapes) for name, method in METHODS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    # In turn, so that all methods meet the same moments of the machine.
    for _ in range(repeats):
        for name, (call, _, _) in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    figures = {
        name: _Figures(dense, sent, tuple(seconds[name]))
        for name, (_, dense, sent) in calls.items()
    }
    print(_table(subject, repeats, figures))
    if json_path:
        write_json_for(
            "--json",
            json_path,
            {name: dataclasses.asdict(found) for name, found in figures.items()},
        )
        print(f"written to {json_path}")
    return 0


def _prepare(
    method: Method, shapes: Sequence[tuple[int, ...]]
) -> tuple[Callable[[], object], int, float]:
    """One exchange, warmed up; the bytes of its gradients, and those that are sent."""
    taken = [shape for shape in shapes if method.takes("", shape, "float32")]
    values = [
        tf.random.stateless_normal(shape, [0, index])
        for index, shape in enumerate(taken)
    ]
    slots = [
        {name: tf.ones(size) for name, size in method.slots(shape).items()}
        for shape in taken
    ]

    # Variables: what hangs on constants alone TensorFlow computes once.
    steps = tf.Variable(0, dtype=tf.int64)
    held = [tf.Variable(value) for value in values]

    @tf.function(autograph=False)
    def exchange() -> list[tf.Tensor]:
        now = [value.read_value() for value in held]
        found = method.exchange(now, slots, _Echo(), steps.assign_add(1))
        # One number of each, so that all are made and few are handed out.
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


def _table(subject: str, repeats: int, figures: dict[str, _Figures]) -> str:
    lines = [
        f"Gradients of {subject}, two peers, one core; {repeats} repeats in turn, "
        "median (least to most)",
        f"{'method':18s} {'GB/s':>22s} {'of the bytes':>13s} "
        f"{'pays below Gbit/s':>18s}",
    ]
    for name, found in figures.items():
        rates = [found.dense_bytes / seconds / 1e9 for seconds in found.seconds]
        share = found.sent_bytes / found.dense_bytes
        lines.append(
            f"{name:18s} {least_to_most(rates, '.2f'):>22s} "
            f"{f'1/{1 / share:.1f}':>13s} {found.pays_below_gbit:18.1f}"
        )
    return "\n".join(lines)
