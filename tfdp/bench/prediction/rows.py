"""How fast a core of this machine adds up rows of a table by their places.

python -m tfdp.bench.prediction.rows REPEATS     prints bytes a second
"""

from __future__ import annotations

import statistics
import sys
import time

from tfdp.bench.python_process import ProcessFailed, run_python
from tfdp.errors import CollectiveError

__all__ = ["measure_rows"]

# Of two replicas, each with a batch of texts: rows of 256 bytes.
PARTS, ROWS, WIDTH, WORDS = 2, 20_480, 64, 200_000
SEED = 1


def measure_rows(repeats: int, quick: bool, timeout_seconds: float) -> float:
    """Bytes of rows a second that one core joins and adds, as a replica does.

    In a process of its own, whose TensorFlow has one thread.

    Args:
      repeats: figures; their median counts.
      quick: one figure, which shows that it runs.
      timeout_seconds: the most that it may take.

    Raises:
      CollectiveError: it failed, or took too long; with its last lines.
    """
    words = ["-m", "tfdp.bench.prediction.rows", str(1 if quick else repeats)]
    try:
        return float(run_python(words, timeout_seconds)[-1])
    except (ProcessFailed, ValueError, IndexError) as error:
        raise CollectiveError(f"{words[1]} failed:\n{error}") from None


def _measure_here(repeats: int) -> float:
    import numpy as np
    import tensorflow as tf

    from tfdp.bench.subjects.images import ZIPF_EXPONENT
    from tfdp.exchange.sparse import join_rows

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
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
    print(_measure_here(int(sys.argv[1])))
