"""The images that training arms train on, the same for every arm."""

from __future__ import annotations

import numpy as np

from tfdp.tools.bench.subjects.models import BenchmarkModel

__all__ = ["BATCHES_IN_MEMORY", "LOCAL_BATCH", "SEED", "make_images", "own_rows"]

LOCAL_BATCH = 64
BATCHES_IN_MEMORY = 8
SEED = 1
# Word n occurs as often as n to the minus this: texts have some 1.0 to 1.2.
ZIPF_EXPONENT = 1.2


def make_images(
    model: BenchmarkModel, global_batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images, or words, and labels of all global batches, the same for every arm."""
    random = np.random.default_rng(SEED)
    count = BATCHES_IN_MEMORY * global_batch
    if model.words:
        # What is beyond the last word is drawn from all of them.
        words = random.zipf(ZIPF_EXPONENT, (count, *model.input_shape)) - 1
        beyond = words >= model.words
        words[beyond] = random.integers(model.words, size=np.count_nonzero(beyond))
        images: np.ndarray = words.astype(np.int32)
    else:
        images = random.standard_normal((count, *model.input_shape), dtype=np.float32)
    labels = random.integers(model.classes, size=count, dtype=np.int32)
    return images, labels


def own_rows(array: np.ndarray, rank: int, workers: int) -> np.ndarray:
    """One worker's rows of every global batch of `workers` local ones."""
    shape = (BATCHES_IN_MEMORY, workers, LOCAL_BATCH, *array.shape[1:])
    return array.reshape(shape)[:, rank].reshape(-1, *array.shape[1:])
