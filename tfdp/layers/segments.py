"""Cuts a functional model into runs of layers, each of which is a block of `remat`.

Many layers of convolutional networks compute little: as single blocks they save no
memory. A run keeps only the tensors that later runs read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdp._private import functional_graphs as graphs
from tfdp.errors import ConfigurationError

# (block, its call) -> a call that is computed twice.
Twice = Callable[[keras.layers.Layer, Callable], Callable]
# Assumed for dimensions, other than the first, that depend on the batch.
UNKNOWN_LENGTH = 128
SEGMENTS = "tfdp.remat(policy='segments')"
# Tries this many limits of the segment size, each STEP times the one before.
TRIED, STEP = 24, 0.8


def cut_in_segments(model: keras.Model, twice: Twice) -> None:
    """Makes `model` compute twice, segment by segment; changes it in place.

    If a model within `model` is most of it, cuts the inner one. `twice`: makes a block
    of a layer and its call.
    """
    functional = _innermost(model)
    of = graphs.overridden_for(functional)
    if of not in ("", SEGMENTS):
        raise ConfigurationError(
            f"The graph of {model.name!r} is cut already, by {of}. Use another policy "
            "of tfdp.remat, such as 'each'."
        )
    if of:
        return
    nodes = graphs.nodes_of(functional)
    if not nodes:
        return
    segments = _segments(nodes, functional)
    calls = [twice(Segment(segment), segment.run) for segment in segments]

    def run(inputs: list[Any], operation_fn: Callable) -> list[Any]:
        values = graphs.values_of(functional, inputs)
        for segment, call in zip(segments, calls, strict=True):
            given = [values[id(symbol)] for symbol in segment.takes]
            made = call(given, operation_fn)
            for symbol, value in zip(segment.gives, made, strict=True):
                values[id(symbol)] = value
        return graphs.outputs_in(functional, values)

    graphs.override_runs(functional, run, SEGMENTS)


def cuts_of(costs: Sequence[float], kept: Sequence[float]) -> list[int]:
    """The indices of calls after which to cut for least memory, the last included.

        memory = what is kept at all cuts + the cost of the largest segment

    A segment of one call costs nothing, since it cannot be cut. `costs`: the size of
    each call's outputs. `kept`: after each call, the size of what later ones read.

    >>> cuts_of([4, 4, 4, 4, 50], [5, 1, 5, 3, 0])
    [1, 3, 4]
    """
    limits = [sum(costs) * STEP**power for power in range(TRIED)]
    found = [_cuts_within(costs, kept, limit) for limit in limits]
    return min(found, key=lambda one: one[0])[1]


def _cuts_within(
    costs: Sequence[float], kept: Sequence[float], limit: float
) -> tuple[float, list[int]]:
    """The memory, and the cuts that keep least, with segments of at most `limit`.

    By dynamic programming over the number of calls before a cut: `least` is what is
    kept up to it, `before` the previous cut.
    """
    least, before = [0.0] + [math.inf] * len(costs), [0] * (len(costs) + 1)
    for end in range(1, len(costs) + 1):
        cost = 0.0
        for begin in range(end - 1, -1, -1):
            cost += costs[begin]
            if cost > limit and begin < end - 1:
                break
            if least[begin] + kept[end - 1] < least[end]:
                least[end], before[end] = least[begin] + kept[end - 1], begin
    cuts, end = [], len(costs)
    most = 0.0
    while end:
        cuts.append(end - 1)
        if end - before[end] > 1:
            most = max(most, sum(costs[before[end] : end]))
        end = before[end]
    return least[-1] + most, cuts[::-1]


class Segment(keras.layers.Layer):
    """A segment as a layer, which gives a block its weights and state."""

    given_variables: list[keras.Variable]

    def __init__(self, run: LayerRun):
        names = [getattr(node.operation, "name", "") for node in run.nodes]
        super().__init__(name=f"segment_from_{names[0]}_to_{names[-1]}")
        self.parts = run.layers
        self.built = True
        # Not by setattr: Keras would count them, but other layers own them.
        given = [v for node in run.nodes for v in node.variables]
        object.__setattr__(self, "given_variables", given)

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of its layers, and those passed to operations directly."""
        found = [*super().variables, *self.given_variables]
        return list({id(variable): variable for variable in found}.values())

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        return [variable for variable in self.variables if variable.trainable]


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """A run of consecutive layer calls; inputs and outputs are symbolic tensors."""

    nodes: tuple[graphs.OperationCall, ...]
    takes: tuple[Any, ...]
    gives: tuple[Any, ...]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        found = (node.operation for node in self.nodes)
        of_ids = {id(o): o for o in found if isinstance(o, keras.layers.Layer)}
        return list(of_ids.values())

    def run(self, given: Sequence[Any], operation_fn: Callable) -> list[Any]:
        values = {id(t): v for t, v in zip(self.takes, given, strict=True)}
        graphs.run_nodes(self.nodes, values, operation_fn)
        return [values[id(symbol)] for symbol in self.gives]


def _segments(nodes: Sequence[graphs.OperationCall], functional: Any) -> list[LayerRun]:
    costs, kept = sizes_of(nodes, functional)
    return runs_between(nodes, cuts_of(costs, kept), functional)


def _last_uses(
    nodes: Sequence[graphs.OperationCall], functional: Any
) -> dict[int, int]:
    """The place of the last call that reads each tensor, by the tensor's id."""
    uses = {id(t): place for place, node in enumerate(nodes) for t in node.takes}
    return uses | {id(t): len(nodes) for t in functional.outputs}


def sizes_of(
    nodes: Sequence[graphs.OperationCall], functional: Any
) -> tuple[list[float], list[float]]:
    """Sizes for each call: of what it computes, and of what later ones read."""
    last_use = _last_uses(nodes, functional)
    costs: list[float] = []
    kept: list[float] = []
    live: dict[int, float] = {}
    for place, node in enumerate(nodes):
        costs.append(sum(map(size_of, node.gives)) + _within(node.operation))
        live |= {id(t): _kept_size_of(t) for t in node.gives}
        live = {t: size for t, size in live.items() if last_use.get(t, -1) > place}
        kept.append(sum(live.values()))
    return costs, kept


def runs_between(
    nodes: Sequence[graphs.OperationCall], cuts: Sequence[int], functional: Any
) -> list[LayerRun]:
    """The runs that end after the calls at `cuts`, of which the last is the last."""
    last_use = _last_uses(nodes, functional)
    segments, begin = [], 0
    for cut in cuts:
        within = nodes[begin : cut + 1]
        made = {id(t): t for node in within for t in node.gives}
        taken = {id(t): t for node in within for t in node.takes if id(t) not in made}
        gives = [t for key, t in made.items() if last_use.get(key, -1) > cut]
        segments.append(LayerRun(tuple(within), tuple(taken.values()), tuple(gives)))
        begin = cut + 1
    return segments


def _kept_size_of(symbol: Any) -> float:
    """Infinite for a tensor that must not cross a cut."""
    is_dense = not any(getattr(symbol, kind, False) for kind in ("sparse", "ragged"))
    return size_of(symbol) if is_dense else math.inf


def size_of(symbol: Any) -> float:
    """The size of one row, in numbers."""
    lengths = [UNKNOWN_LENGTH if n is None else n for n in symbol.shape[1:]]
    return float(math.prod(lengths))


def _within(operation: Any) -> float:
    """The size of what a nested model computes in addition to its outputs."""
    inner = (
        graphs.functional_of(operation) if isinstance(operation, keras.Model) else None
    )
    if inner is None:
        return 0.0
    nodes = graphs.nodes_of(inner)
    return sum(sum(map(size_of, n.gives)) + _within(n.operation) for n in nodes)


def _innermost(model: keras.Model) -> Any:
    functional = graphs.functional_of(model)
    if functional is None or not graphs.is_run_by_keras(model):
        raise ConfigurationError(
            "policy='segments' cuts the graph of a functional model, or of a built "
            f"Sequential. {model.name!r} has none, or overrides call: use 'each', or a "
            "function that selects layers."
        )
    nodes = graphs.nodes_of(functional)
    if not nodes:
        return functional
    costs = [sum(map(size_of, n.gives)) + _within(n.operation) for n in nodes]
    place = max(range(len(nodes)), key=costs.__getitem__)
    inner = nodes[place].operation
    is_most = 2 * costs[place] > sum(costs)
    if is_most and isinstance(inner, keras.Model) and graphs.is_run_by_keras(inner):
        return functional if graphs.functional_of(inner) is None else _innermost(inner)
    return functional
