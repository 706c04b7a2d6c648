"""Whether an iterator that nobody read may stand for the next one.

Behind a finite dataset Keras makes an iterator when an epoch ends, and another one when
the next begins: the first is dropped unread. Making one costs as much as some steps of
a small model. Where nothing happens when an iterator is made, the first may be used in
the place of the second. A shuffle with `reshuffle_each_iteration` takes its next seeds
when an iterator is made, so that dropped ones count; Python code and services might.
"""

from __future__ import annotations

import re

import tensorflow as tf

from tfdp._private import names
from tfdp._private.step_ops import PYTHON

__all__ = ["makes_nothing_happen"]

# By the names of their classes, which are those of their operations: what happens in
# these happens when somebody reads.
QUIET = {
    "Batch",
    "Cache",
    "Concatenate",
    "Filter",
    "FlatMap",
    "Interleave",
    "Lasting",
    "Map",
    "Options",
    "PaddedBatch",
    "ParallelBatch",
    "ParallelInterleave",
    "ParallelMap",
    "Prefetch",
    "Range",
    "Repeat",
    "Shard",
    "Skip",
    "TFRecord",
    "Take",
    "Tensor",
    "TensorSlice",
    "Zip",
}
KIND = re.compile(r"_?(\w*?)Dataset(V\d)?")


def makes_nothing_happen(dataset: tf.data.Dataset) -> bool:
    """Whether an iterator of `dataset` that nobody reads leaves no trace.

    False also where that is not known.
    """
    for stage in names.stages_of(dataset):
        if not _is_quiet(type(stage).__name__):
            return False
        for operation in names.operations_of(stage):
            if operation in PYTHON:
                return False
            if "Dataset" in operation and not _is_quiet(operation):
                return False
    return True


def _is_quiet(name: str) -> bool:
    found = KIND.fullmatch(name)
    return found is not None and found[1] in QUIET
