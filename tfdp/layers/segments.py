"""A functional model cut in runs of layers, each of which is a block of `remat`.

Many layers of convolutional networks compute little: as a block by itself each keeps as
much as without. What a run of them keeps are the tensors that later ones read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdp._private.functional_graphs import (
    Node,
    functional_of,
    is_overridden,
    is_run_by_keras,
    nodes_of,
    override_runs,
    run_nodes,
)
from tfdp.errors import ConfigurationError

# (block, its call) -> a call that is computed twice.
Twice = Callable[[keras.layers.Layer, Callable], Callable]
# A dimension that only the batch knows, but for the first.
UNKNOWN_LENGTH = 128
# So many sizes of the largest segment are tried, each a part of the one before.
TRIED, STEP = 24, 0.8


def cut_in_segments(model: keras.Model, twice: Twice) -> None:
    """Has `model` compute twice, segment by segment; changed in place.

    Of a model within the model that is most of it, the inner one is cut.

    Args:
      model: functional, or sequential and built.
      twice: makes a block of a layer and what it calls.

    Raises:
      ConfigurationError: when it is neither, or has a `call` of its own.
    """
    functional = _innermost(model)
    if is_overridden(functional):
        return
    nodes = nodes_of(functional)
    if not nodes:
        return
    segments = _segments(nodes, functional)
    calls = [twice(_Segment(segment), segment.run) for segment in segments]

    def lead(inputs: list[Any], operation_fn: Callable) -> list[Any]:
        values = {id(t): v for t, v in zip(functional.inputs, inputs, strict=True)}
        for segment, call in zip(segments, calls, strict=True):
            given = [values[id(symbol)] for symbol in segment.takes]
            made = call(given, operation_fn)
            for symbol, value in zip(segment.gives, made, strict=True):
                values[id(symbol)] = value
        return [values[id(symbol)] for symbol in functional.outputs]

    override_runs(functional, lead)


def cuts_of(costs: Sequence[float], kept: Sequence[float]) -> list[int]:
    """Behind which calls to cut, so that the least is held at once.

        held = what is kept at all cuts + the cost of the most costly segment

    A segment of one call counts as nothing there: it cannot be cut. (The last layer of
    a language model costs more than all others.)

    Args:
      costs: of each call, the size of what it gives.
      kept: behind each call, the size of what later ones read; 0 behind the last.

    Returns:
      Places of calls, in their order; the last one always.

    >>> cuts_of([4, 4, 4, 4, 50], [5, 1, 5, 3, 0])
    [1, 3, 4]
    """
    limits = [sum(costs) * STEP**power for power in range(TRIED)]
    found = [_cuts_within(costs, kept, limit) for limit in limits]
    return min(found, key=lambda one: one[0])[1]


def _cuts_within(
    costs: Sequence[float], kept: Sequence[float], limit: float
) -> tuple[float, list[int]]:
    """The cuts that keep least, with no segment of several calls above `limit`, and
    what is held then."""
    # By the number of calls in front of a cut: what is kept up to it, and the cut
    # before.
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


class _Segment(keras.layers.Layer):
    """The layers of a segment, for who asks a block for its weights and state."""

    given_variables: list[keras.Variable]

    def __init__(self, run: _Run):
        names = [getattr(node.operation, "name", "") for node in run.nodes]
        super().__init__(name=f"segment_from_{names[0]}_to_{names[-1]}")
        self.parts = run.layers
        self.built = True
        # Past Keras, which would count them: they are other layers' weights.
        given = [v for node in run.nodes for v in node.variables]
        object.__setattr__(self, "given_variables", given)

    @property
    def variables(self) -> list[keras.Variable]:
        """Those of its layers, and those that operations are given by themselves."""
        found = [*super().variables, *self.given_variables]
        return list({id(variable): variable for variable in found}.values())

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """Those of them that are trained."""
        return [variable for variable in self.variables if variable.trainable]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Calls one after the other.

    Args:
      nodes: the calls.
      takes: symbolic tensors of earlier ones that they read.
      gives: those of theirs that later ones read, or that the model returns.
    """

    nodes: tuple[Node, ...]
    takes: tuple[Any, ...]
    gives: tuple[Any, ...]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """Each once."""
        found = (node.operation for node in self.nodes)
        of_ids = {id(o): o for o in found if isinstance(o, keras.layers.Layer)}
        return list(of_ids.values())

    def run(self, given: Sequence[Any], operation_fn: Callable) -> list[Any]:
        """What it gives, from values of what it takes."""
        values = {id(t): v for t, v in zip(self.takes, given, strict=True)}
        run_nodes(self.nodes, values, operation_fn)
        return [values[id(symbol)] for symbol in self.gives]


def _segments(nodes: Sequence[Node], functional: Any) -> list[_Run]:
    last_use = {id(t): place for place, node in enumerate(nodes) for t in node.takes}
    last_use |= {id(t): len(nodes) for t in functional.outputs}
    costs: list[float] = []
    kept: list[float] = []
    live: dict[int, float] = {}
    for place, node in enumerate(nodes):
        costs.append(sum(map(_size_of, node.gives)) + _within(node.operation))
        live |= {id(t): _kept_size_of(t) for t in node.gives}
        live = {t: size for t, size in live.items() if last_use.get(t, -1) > place}
        kept.append(sum(live.values()))
    segments, begin = [], 0
    for cut in cuts_of(costs, kept):
        within = nodes[begin : cut + 1]
        made = {id(t): t for node in within for t in node.gives}
        taken = {id(t): t for node in within for t in node.takes if id(t) not in made}
        gives = [t for key, t in made.items() if last_use.get(key, -1) > cut]
        segments.append(_Run(tuple(within), tuple(taken.values()), tuple(gives)))
        begin = cut + 1
    return segments


def _kept_size_of(symbol: Any) -> float:
    """Endless for what must not go from a segment to the next."""
    is_dense = not any(getattr(symbol, kind, False) for kind in ("sparse", "ragged"))
    return _size_of(symbol) if is_dense else math.inf


def _size_of(symbol: Any) -> float:
    """Of a row, in numbers."""
    lengths = [UNKNOWN_LENGTH if n is None else n for n in symbol.shape[1:]]
    return float(math.prod(lengths))


def _within(operation: Any) -> float:
    """What a model within the model computes besides what it gives."""
    inner = functional_of(operation) if isinstance(operation, keras.Model) else None
    if inner is None:
        return 0.0
    nodes = nodes_of(inner)
    return sum(
        sum(map(_size_of, node.gives)) + _within(node.operation) for node in nodes
    )


def _innermost(model: keras.Model) -> Any:
    functional = functional_of(model)
    if functional is None or not is_run_by_keras(model):
        raise ConfigurationError(
            "policy='segments' cuts the graph of a functional model, or of a "
            f"Sequential that is built. {model.name!r} has none, or a call of its own: "
            "use 'each', or a function that chooses its layers."
        )
    nodes = nodes_of(functional)
    if not nodes:
        return functional
    costs = [sum(map(_size_of, n.gives)) + _within(n.operation) for n in nodes]
    place = max(range(len(nodes)), key=costs.__getitem__)
    inner = nodes[place].operation
    is_most = 2 * costs[place] > sum(costs)
    if is_most and isinstance(inner, keras.Model) and is_run_by_keras(inner):
        return functional if functional_of(inner) is None else _innermost(inner)
    return functional
