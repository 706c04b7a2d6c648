"""Compressed gradients, and the residuals kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.optimizer_hooks import (
    momentum_compression_of,
    strategy_of,
    variable_index,
    variables_built_with,
)
from tfdp.chain.reduction import Reduction, Stage, scale_when_summed
from tfdp.errors import ConfigurationError
from tfdp.exchange.compressed import CompressedSums, Kept, are_finite
from tfdp.plan.exclusions import variable_path
from tfdp.variables.own_values import OfRanks

STATE = "compression_state"
STEPS, VARIABLE = "steps", "variable_"


class CompressionState(tf.Module):
    """An optimizer's compression residuals, on each replica."""

    def __init__(self, compressed: CompressedSums):
        super().__init__()
        self._compressed = compressed
        self.steps = OfRanks([], compressed.devices, tf.int64, is_identical=True)
        # By index: names depend on what a process has created before.
        self.of_variables: dict[str, OfVariable] = {}

    def of(self, variable: Any, place: int) -> OfVariable:
        """The state of a variable, the optimizer's number `place`."""
        name = f"{VARIABLE}{place}"
        if name not in self.of_variables:
            of = self._compressed
            devices = [d for r, d in enumerate(of.devices) if of.is_peer(r)]
            self.of_variables[name] = OfVariable(of.method, variable.shape, devices)
        return self.of_variables[name]

    @property
    def copies(self) -> list[tf.Variable]:
        kept = [self.steps]
        for of in self.of_variables.values():
            kept += of.parts
        return [copy for of_ranks in kept for copy in of_ranks.copies]


class OfVariable(tf.Module):
    """The residual and the method's slots of one variable, on ranks that send."""

    def __init__(self, method: Any, shape: Sequence[int], devices: Sequence[str]):
        super().__init__()
        self.residual = OfRanks(shape, devices) if method.error_feedback else None
        self.slots = {
            name: OfRanks(slot, devices, is_identical=name in method.replicated_slots)
            for name, slot in method.slots(shape).items()
        }

    @property
    def parts(self) -> list[OfRanks]:
        residual = [] if self.residual is None else [self.residual]
        return [*residual, *self.slots.values()]

    def read(self, place: int, unit: tf.Tensor | None) -> Kept:
        """The state, in units of this step's gradients."""
        residual = None
        if self.residual is not None:
            residual = _times(self.residual.copies[place].read_value(), unit)
        slots = {
            name: _times(slot.copies[place].read_value(), _unit_of(slot, unit))
            for name, slot in self.slots.items()
        }
        return Kept(residual, slots)

    def write(self, place: int, kept: Kept, unit: tf.Tensor | None) -> None:
        inverse = None if unit is None else 1.0 / unit
        if self.residual is not None:
            self.residual.copies[place].assign(_times(kept.residual, inverse))
        for name, slot in self.slots.items():
            value = _times(kept.slots[name], _unit_of(slot, inverse))
            slot.copies[place].assign(value)


class CompressedExchange(Stage):
    """Exchanges compressed gradients apart from the others, and one flag with these.

    The flag counts replicas with non-finite numbers. Where it is not 0 every replica
    gets non-finite sums, as without compression, and keeps its state: a loss scaler
    skips the step, and what was sent in it is lost.

    Args:
      compressed: the method and the group.
      places: of the gradients that the method takes; others, and slices, are sent
        uncompressed.
      unit: the scale of this step's gradients; None for 1.
      is_plain: whether this step sends everything uncompressed; None: the method
        decides.
    """

    def __init__(
        self,
        compressed: CompressedSums,
        places: Sequence[int],
        unit: Any = None,
        is_plain: tf.Tensor | None = None,
    ):
        self._compressed, self._places, self._is_plain = compressed, places, is_plain
        self._unit = None if unit is None else tf.convert_to_tensor(unit, tf.float32)

    def before(self, reduction: Reduction) -> None:
        rank, optimizer = reduction.rank, reduction.optimizer
        state = _state_of(optimizer, self._compressed)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        variables = [reduction.variables[place] for place in self._places]
        self._state = [
            state.of(variable, variable_index(inner, variable))
            for variable in variables
        ]
        self._steps = state.steps.copies[rank]
        step = self._steps.read_value()
        self._sender = sum(map(self._compressed.is_peer, range(rank)))
        stored, self._kept = [self._steps], []
        if self._compressed.is_peer(rank):
            self._kept = [one.read(self._sender, self._unit) for one in self._state]
            parts = [part for one in self._state for part in one.parts]
            stored += [part.copies[self._sender] for part in parts]
        reduction.will_store(stored)
        self._gradients = [reduction.take(place) for place in self._places]
        self._sums, self._after, mine = self._compressed.exchange(
            self._gradients, self._kept, step, rank, self._is_plain
        )
        # After all compressed exchanges, so that no bucket has to be sent early.
        reduction.riders.append(mine)
        reduction.at_once = True

    def after(self, reduction: Reduction) -> None:
        # Sums are the same on all replicas, so that only those that exchange have to
        # check them.
        [total] = reduction.take_riders(1)
        others = [one for one in reduction.gradients if one is not None]
        # The sums are equal on all replicas, and so is the result.
        total += tf.where(are_finite(others), 0.0, 1.0)
        sums, after = self._compressed.chosen(
            tf.equal(total, 0.0), self._gradients, self._sums, self._kept, self._after
        )
        if self._kept:
            for one, kept in zip(self._state, after, strict=True):
                one.write(self._sender, kept, self._unit)
        self._steps.assign_add(1)
        for place, value in zip(self._places, sums, strict=True):
            reduction.gradients[place] = value


def compression_stages(reduction: Reduction, compressed: CompressedSums) -> list[Stage]:
    """The stage of `Communication(compression=...)`, if that takes any gradient."""
    optimizer = reduction.optimizer
    _refuse_momentum(compressed, optimizer)
    places = places_taken(compressed, reduction)
    unit = scale_when_summed(optimizer)
    return [CompressedExchange(compressed, places, unit)] if places else []


def places_taken(compressed: CompressedSums, reduction: Reduction) -> list[int]:
    """The gradients that the method takes."""
    pairs = zip(reduction.gradients, reduction.variables, strict=True)
    return [place for place, pair in enumerate(pairs) if _is_taken(compressed, *pair)]


def _is_taken(compressed: CompressedSums, gradient: Any, variable: Any) -> bool:
    """Whether the gradient of a variable is compressed."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return False
    path, shape = variable_path(variable), gradient.shape
    if shape.rank is None:
        return False
    return compressed.method.takes(path, shape.as_list(), gradient.dtype.name)


def _state_of(optimizer: Optimizer, compressed: CompressedSums) -> CompressionState:
    state = getattr(optimizer, STATE, None)
    if state is None:
        # An attribute, so that checkpoints include it, and restore it when it is made
        # after reading a checkpoint.
        state = CompressionState(compressed)
        optimizer.compression_state = state
    return state


def compression_entries(
    optimizer: Optimizer, to_make: Sequence[str] = ()
) -> dict[str, OfRanks]:
    """An optimizer's compression state, by name; first creates entries named `to_make`,
    which exist after the first step only."""
    if to_make:
        _make_entries(optimizer, to_make)
    state = getattr(optimizer, STATE, None)
    if state is None:
        return {}
    entries = {STEPS: state.steps}
    for name, kept in state.of_variables.items():
        if kept.residual is not None:
            entries[f"{name}/residual"] = kept.residual
        entries |= {f"{name}/{slot}": rows for slot, rows in kept.slots.items()}
    return entries


def _make_entries(optimizer: Optimizer, names: Sequence[str]) -> None:
    rounds = getattr(optimizer, "rounds", None)
    strategy = strategy_of(optimizer)
    reducer = getattr(strategy.extended, "reducer", None)
    compressed = getattr(rounds or reducer, "compressed", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    by_momentum = momentum_compression_of(optimizer)
    if by_momentum is not None and reducer is not None:
        compressed = reducer.compressed_by(by_momentum.method, by_momentum.across)
    if compressed is None:
        return
    state = _state_of(optimizer, compressed)
    variables = variables_built_with(inner)
    places = {name.partition("/")[0].removeprefix(VARIABLE) for name in names}
    for place in sorted(int(text) for text in places if text.isdecimal()):
        if place < len(variables):
            state.of(variables[place], place)


def _refuse_momentum(compressed: CompressedSums, optimizer: Optimizer) -> None:
    """Raises ConfigurationError if method and optimizer both add momentum."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = getattr(compressed.method, "momentum_correction", None)
    if not momentum or not (getattr(inner, "momentum", 0) or hasattr(inner, "beta_1")):
        return
    raise ConfigurationError(
        f"TopK(momentum_correction={momentum}) gives the gradients their momentum "
        f"before they are sent, and {inner.name!r} ({type(inner).__name__}) would give "
        "them another. Use keras.optimizers.SGD(learning_rate) without momentum, or "
        "leave momentum_correction out."
    )


def _unit_of(slot: OfRanks, unit: tf.Tensor | None) -> tf.Tensor | None:
    """Replicated slots are directions, which have no unit."""
    return None if slot.is_identical else unit


def _times(value: Any, unit: tf.Tensor | None) -> Any:
    return value if unit is None else value * unit
