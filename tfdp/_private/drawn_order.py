"""The order of data that depends on earlier passes, and what repeats it.

A `tf.data` shuffle that reshuffles draws the seeds of its order from a generator that
all iterators over it share. An iterator draws when it is made; but a shuffle makes the
iterator of its input only when it is read. So behind a shuffle, an iterator that was
never read has drawn nothing. Checked against TensorFlow 2.20 and 2.21.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private.names import (
    captured_datasets,
    graphs_of,
    inputs_of,
    operations_of,
    repeats_of,
    stages_of,
)

IGNORE_STATE = 1  # that is outside of a dataset, when a graph is made of it
SHUFFLE = "Shuffle"
# Stages that draw: the attribute that says whether each pass does, and its default.
DRAWING = {
    SHUFFLE: ("_reshuffle_each_iteration", True),
    "Random": ("_rerandomize", False),
}
# The inputs with the seeds of their ops.
SEEDS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "RandomDatasetV2": (0, 1),
}
# Stages that make one iterator of each input per own iterator, and read of it as soon
# as they are read. Others, such as `repeat`, `concatenate` and `cache`, make as many as
# depends on how far they are read.
ONCE = {
    *("AssertCardinality", "Batch", "DenseToRagged", "Filter", "FlatMap"),
    *("GroupByWindow", "IgnoreErrors", "Interleave", "Map", "Options", "PaddedBatch"),
    *("ParallelBatch", "ParallelInterleave", "ParallelMap", "Prefetch", "Rebatch"),
    *("Scan", "Shard", SHUFFLE, "Skip", "Take", "TakeWhile", "Unbatch", "Unique"),
    *("Window", "Zip"),
}
# Those of them that hand on all that they read.
WHOLE = {
    *("AssertCardinality", "Batch", "FlatMap", "Interleave", "Map", "Options"),
    *("PaddedBatch", "ParallelBatch", "ParallelInterleave", "ParallelMap", "Prefetch"),
    *(SHUFFLE, "Unbatch"),
}


class DrawsOfPass(NamedTuple):
    """How often a pass draws from one stage: when it begins, and when it is read."""

    begun: int
    read: int


class DrawnOrder:
    """How far this process has advanced the data order, stored per keeper object."""

    def __init__(self, keepers: list[Any]):
        self._keepers = keepers

    @property
    def is_kept(self) -> bool:
        """Whether the next `fit` on the same data continues the order."""
        return bool(self._keepers)

    @property
    def drawn(self) -> int:
        """The number of passes over the data in this process."""
        return max((_drawn.get(keeper, 0) for keeper in self._keepers), default=0)

    @property
    def read(self) -> int:
        """The number of these passes of which a batch was read."""
        return max((_read.get(keeper, 0) for keeper in self._keepers), default=0)

    def is_drawn_by(self, other: Any) -> bool:
        """Whether the dataset also reads one of these objects."""
        if not isinstance(other, tf.data.Dataset):
            return False
        return any(stage is k for stage in stages_of(other) for k in self._keepers)

    def note_pass(self) -> None:
        """Counts a pass when it begins, for a PyDataset when it ends."""
        for keeper in self._keepers:
            _drawn[keeper] = _drawn.get(keeper, 0) + 1

    def note_read(self) -> None:
        """Counts a pass when its first batch is read."""
        for keeper in self._keepers:
            _read[keeper] = _read.get(keeper, 0) + 1


# Passes over data in an order that depends on the pass before: a tf.data shuffle, a
# PyDataset with an `on_epoch_end`.
_drawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_read: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def keepers_of(datasets: Iterable[tf.data.Dataset]) -> list[tf.data.Dataset]:
    """The stages whose order depends on earlier passes."""
    return [stage for one in datasets for stage in stages_of(one) if _is_keeper(stage)]


def draws_of_pass(
    datasets: Sequence[tf.data.Dataset],
) -> Mapping[tf.data.Dataset, DrawsOfPass] | None:
    """How often a pass draws from each stage; None: that depends on what it reads."""
    if not datasets:
        return None  # unknown ones
    found: dict[tf.data.Dataset, DrawsOfPass] = {}
    todo = [(dataset, False, True) for dataset in datasets]
    keepers = set(keepers_of(datasets))
    while todo:
        stage, is_late, is_whole = todo.pop()
        kind = kind_of(stage)
        # A shuffle has read a cache to its end in the first pass, which alone has drawn
        # from what is before the cache; and the next one that reads is again the first.
        is_read_once = kind == "Cache" and is_late and is_whole
        if is_read_once or keepers.isdisjoint(stages_of(stage)):
            continue
        is_once = kind in ONCE or (kind == "Repeat" and repeats_of(stage) == 1)
        is_last = kind in DRAWING and not inputs_of(stage)
        if not (is_once or is_last) or _captured_by(stage).draws:
            return None
        if stage in keepers:
            begun, read = found.get(stage, DrawsOfPass(0, 0))
            found[stage] = DrawsOfPass(begun + (not is_late), read + is_late)
        is_late = is_late or kind == SHUFFLE
        is_whole = is_whole and _is_whole(stage)
        todo += [(one, is_late, is_whole) for one in inputs_of(stage)]
    return found


def draw(draws: Mapping[tf.data.Dataset, DrawsOfPass], begun: int, read: int) -> None:
    """Draws from each stage as `begun` passes do, of which some were `read`."""
    for stage, of_pass in draws.items():
        for _ in range(begun * of_pass.begun + read * of_pass.read):
            # Draws of this stage only, and reads nothing.
            iter(stage)


def stages_without_seed(dataset: tf.data.Dataset) -> Iterator[str]:
    """Why the order of `dataset` differs between processes, as texts."""
    if dataset.options().deterministic is False:
        yield "deterministic=False"
    for stage in stages_of(dataset):
        if getattr(stage, "_deterministic", None) == "false":
            yield "deterministic=False"
        if kind_of(stage) in DRAWING:
            seeds = [vars(stage).get(name) for name in ("_seed", "_seed2")]
            if all(seed is not None and not int(seed) for seed in seeds):
                yield "shuffle(...) without a seed"
        has_unseeded = _captured_by(stage).is_unseeded
        if not SEEDS.keys().isdisjoint(operations_of(stage)):
            graphs = (graph.as_graph_def() for graph in graphs_of(stage))
            has_unseeded = has_unseeded or any(map(_has_unseeded, graphs))
        if has_unseeded:
            yield "shuffle(...) without a seed in a function"


def kind_of(stage: tf.data.Dataset) -> str:
    """The kind of a stage, such as "Shuffle"."""
    return type(stage).__name__.lstrip("_").removesuffix("Dataset")


def _is_whole(stage: tf.data.Dataset) -> bool:
    """Whether a stage has read its input to the end when its last element is read."""
    drops = tf.get_static_value(vars(stage).get("_drop_remainder", False))
    # A larger buffer looks for the next element.
    buffer = tf.get_static_value(vars(stage).get("_buffer_size", 2))
    is_small = kind_of(stage) == SHUFFLE and (buffer is None or 0 <= buffer < 2)
    return kind_of(stage) in WHOLE and drops is not None and not (drops or is_small)


def _is_keeper(stage: tf.data.Dataset) -> bool:
    option, default = DRAWING.get(kind_of(stage), ("", False))
    given = vars(stage).get(option)
    return bool(default if given is None else given) or _captured_by(stage).draws


class Captured(NamedTuple):
    """The shuffles outside of a stage that its functions read."""

    draws: bool
    is_unseeded: bool


# Shuffles that a function makes itself begin anew at each call.
_captured: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()


def _captured_by(stage: tf.data.Dataset) -> Captured:
    if stage not in _captured:
        found = [_shuffles_in(variant) for variant in captured_datasets(stage)]
        _captured[stage] = Captured(
            any(one.draws for one in found), any(one.is_unseeded for one in found)
        )
    return _captured[stage]


def _shuffles_in(variant: tf.Tensor) -> Captured:
    if tf.is_symbolic_tensor(variant):
        return Captured(True, False)  # perhaps
    try:
        written = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=IGNORE_STATE
        )
    except (tf.errors.OpError, ValueError):
        return Captured(True, False)  # perhaps
    graph = tf.compat.v1.GraphDef.FromString(written.numpy())
    draws = any(node.op in SEEDS for node in graph.node)
    return Captured(draws, _has_unseeded(graph))


def _has_unseeded(graph: Any) -> bool:
    """Whether a shuffle of a `GraphDef` has no seed."""
    by_name = {node.name: node for node in graph.node}
    for node in graph.node:
        places = SEEDS.get(node.op, ())
        seeds = [by_name.get(node.input[i].removesuffix(":0")) for i in places]
        if seeds and all(map(_is_zero, seeds)):
            return True
    return False


def _is_zero(node: Any) -> bool:
    if node is None or node.op != "Const":
        return False
    return not tf.make_ndarray(node.attr["value"].tensor).any()
