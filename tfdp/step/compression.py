"""Compressed sums of gradients, and the residuals kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import own_copy, replicas_of
from tfdp._private.optimizer_hooks import (
    strategy_of,
    variable_index,
    variables_built_with,
)
from tfdp.compression.method import MomentumCompression
from tfdp.errors import ConfigurationError
from tfdp.exchange.compressed import CompressedSums, Kept, are_finite
from tfdp.exchange.reducer import Reducer
from tfdp.plan.exclusions import variable_path
from tfdp.step.guard_notes import remember
from tfdp.tracing.run import current_run
from tfdp.variables.own_values import OfRanks

STATE = "compression_state"
STEPS, VARIABLE = "steps", "variable_"


#: All-reduces gradients and other values uncompressed; with `at_once` none of the
#: results is available before the others.
PlainSums = Callable[..., tuple[list[Any], list[tf.Tensor]]]


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
            devices = [d for r, d in enumerate(of.devices) if of.group.speaks(r)]
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


def sum_compressed(
    compressed: CompressedSums,
    gradients: Sequence[Any],
    state: Sequence[tf.Tensor],
    rank: int,
    variables: Sequence[Any],
    optimizer: Optimizer,
    plain_sums: PlainSums,
    unit: Any = None,
    is_plain: tf.Tensor | None = None,
) -> tuple[list[Any], list[tf.Tensor]]:
    """Sums compressed gradients, and other small values, over the replicas.

    Args:
      compressed: the method and the group.
      gradients: of `variables`; those that the method does not take, and slices, are
        sent uncompressed, and so is `state`.
      optimizer: it holds the residuals.
      unit: the scale of this step's gradients; None for 1.
      is_plain: whether this step sends everything uncompressed; None: the method
        decides.
    """
    pairs = zip(gradients, variables, strict=True)
    taken = [n for n, pair in enumerate(pairs) if is_taken(compressed, *pair)]
    if not taken:
        return plain_sums(list(gradients), list(state))
    rest = [place for place in range(len(gradients)) if place not in set(taken)]
    unit = None if unit is None else tf.convert_to_tensor(unit, tf.float32)
    kept_by = _state_of(optimizer, compressed)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kept_of = [
        kept_by.of(variables[place], variable_index(inner, variables[place]))
        for place in taken
    ]
    steps = kept_by.steps.copies[rank]
    step = steps.read_value()
    before, sends = [], compressed.group.speaks(rank)
    sender = sum(map(compressed.group.speaks, range(rank)))
    own = [steps]
    if sends:
        before = [kept.read(sender, unit) for kept in kept_of]
        own += [part.copies[sender] for kept in kept_of for part in kept.parts]
    remember(optimizer, variables, own)
    others = []

    def count_bad(mine: tf.Tensor) -> tf.Tensor:
        plain = [gradients[place] for place in rest]
        # After all compressed exchanges, so that no bucket has to be sent early.
        sums, totals = plain_sums(plain, [*state, mine], at_once=True)
        others.extend([sums, totals[:-1]])
        # The sums are equal on all replicas, and so is the result.
        return totals[-1] + tf.where(are_finite(sums), 0.0, 1.0)

    sums, after = compressed.sums(
        [gradients[place] for place in taken], before, step, rank, count_bad, is_plain
    )
    for kept, value in zip(kept_of if sends else [], after, strict=True):
        kept.write(sender, value, unit)
    steps.assign_add(1)
    results = list(gradients)
    for place, value in zip([*taken, *rest], [*sums, *others[0]], strict=True):
        results[place] = value
    return results, others[1]


def is_taken(compressed: CompressedSums, gradient: Any, variable: Any) -> bool:
    """Whether the gradient of a variable is compressed."""
    if isinstance(gradient, tf.IndexedSlices):
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


def compression_entries(optimizer: Optimizer) -> dict[str, OfRanks]:
    """An optimizer's compression state, by name."""
    state = getattr(optimizer, STATE, None)
    if state is None:
        return {}
    entries = {STEPS: state.steps}
    for name, kept in state.of_variables.items():
        if kept.residual is not None:
            entries[f"{name}/residual"] = kept.residual
        entries |= {f"{name}/{slot}": rows for slot, rows in kept.slots.items()}
    return entries


def make_compression_entries(optimizer: Optimizer, names: Sequence[str]) -> None:
    """Creates `compression_entries` with these names before the first step."""
    rounds = getattr(optimizer, "rounds", None)
    strategy = strategy_of(optimizer)
    reducer = getattr(strategy.extended, "reducer", None)
    compressed = getattr(rounds or reducer, "compressed", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    by_momentum = momentum_compression_of(optimizer)
    if by_momentum is not None and reducer is not None:
        compressed = reducer.compressed_by(by_momentum.method, by_momentum.across)
    if compressed is None or not names:
        return
    state = _state_of(optimizer, compressed)
    variables = variables_built_with(inner)
    places = {name.partition("/")[0].removeprefix(VARIABLE) for name in names}
    for place in sorted(int(text) for text in places if text.isdecimal()):
        if place < len(variables):
            state.of(variables[place], place)


def refuse_momentum(compressed: CompressedSums, optimizer: Optimizer) -> None:
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


def refuse_eager_compression(optimizer: Optimizer) -> None:
    """Raises ConfigurationError in eager mode if gradients should be compressed."""
    extended = tf.distribute.get_strategy().extended
    compressed = getattr(getattr(extended, "reducer", None), "compressed", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    by_momentum = momentum_compression_of(optimizer) is not None
    if tf.executing_eagerly() and (compressed is not None or by_momentum):
        option = type(inner).__name__
        if compressed is not None:
            option = f"Communication(compression={compressed.method!r})"
        raise ConfigurationError(
            f"{option} acts in graphs, and this step runs eagerly, replica by replica. "
            "Compile the model with run_eagerly=False, or call strategy.run in a "
            "tf.function."
        )


def _unit_of(slot: OfRanks, unit: tf.Tensor | None) -> tf.Tensor | None:
    """Replicated slots are directions, which have no unit."""
    return None if slot.is_identical else unit


def _times(value: Any, unit: tf.Tensor | None) -> Any:
    return value if unit is None else value * unit


def momentum_compression_of(optimizer: Any) -> MomentumCompression | None:
    """The momentum compression of `optimizer`, or of its inner one; or None."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "momentum_compression", None)


def sum_by_momentum(
    own_method: MomentumCompression,
    reducer: Reducer,
    gradients: Sequence[Any],
    state: Sequence[tf.Tensor],
    rank: int,
    variables: Sequence[Any],
    optimizer: Optimizer,
    plain_sums: PlainSums,
    unit: Any,
) -> tuple[list[Any], list[tf.Tensor]]:
    """`sum_compressed` of momenta, which are smoother than gradients.

    With the momentum m, equal on all R replicas, and gradients g_r with the sum g,
    replica r sends a part of the next momentum,

        m_r = beta_1 m / R + (1 - beta_1) g_r      sum over r: beta_1 m + (1 - beta_1) g

    and the optimizer gets the gradient (M - beta_1 m) / (1 - beta_1) for the
    received sum M.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    strategy = tf.distribute.get_strategy()
    _refuse_here(inner, strategy, reducer)
    found = current_run()
    if found is not None:
        found[0].sent_momentum.add(id(inner))
    compressed = reducer.compressed_by(own_method.method, own_method.across)
    _refuse_place(inner, strategy, own_method, compressed)
    is_plain = tf.convert_to_tensor(inner.iterations) < own_method.warmup_steps
    # Uncompressed and bit-exact in the warm-up: 0 m + 1 g.
    kept = tf.where(is_plain, 0.0, own_method.beta_1)
    scale = tf.constant(1.0) if unit is None else tf.cast(unit, tf.float32)
    sent, momenta = list(gradients), {}
    pairs = zip(gradients, variables, strict=True)
    for place, (gradient, variable) in enumerate(pairs):
        if is_taken(compressed, gradient, variable):
            own = own_copy(inner.momentum_of(variable).value, rank).read_value()
            momenta[place] = kept * scale * tf.cast(own, tf.float32)
            part = momenta[place] / replicas_of(strategy)
            new = (1 - kept) * tf.cast(gradient, tf.float32)
            # The initial momentum may be NaN, and 0 times NaN is not 0.
            sent[place] = tf.where(is_plain, new, part + new)
    given = state, rank, variables, optimizer, plain_sums, unit, is_plain
    sums, totals = sum_compressed(compressed, sent, *given)
    for place, momentum in momenta.items():
        total = (sums[place] - momentum) / (1 - kept)
        sums[place] = tf.cast(total, gradients[place].dtype)
    return sums, totals


def _refuse_here(
    optimizer: Optimizer, strategy: tf.distribute.Strategy, reducer: Reducer
) -> None:
    owner = type(optimizer).__name__
    if reducer.compressed is not None:
        raise ConfigurationError(
            f"Communication(compression={reducer.compressed.method!r}) and {owner} "
            "both decide what is sent. Leave the first out; the optimizer has a "
            "compression of its own."
        )
    if getattr(strategy, "compiles_steps", True):
        raise ConfigurationError(
            f"{owner} cannot send its momentum under {type(strategy).__name__}. Use "
            "tfdp.DataParallelStrategy or tfdp.MultiHostDataParallelStrategy, or "
            "keras.optimizers.Adam."
        )


def _refuse_place(
    optimizer: Optimizer,
    strategy: tf.distribute.Strategy,
    own_method: MomentumCompression,
    compressed: CompressedSums,
) -> None:
    """Refuses an `across` for which everything would be sent uncompressed."""
    owner, replicas = type(optimizer).__name__, replicas_of(strategy)
    is_one_process = len(strategy.extended.worker_devices) == replicas
    if own_method.across == "replicas" and not is_one_process:
        raise ConfigurationError(
            f"{owner}(across='replicas') lets the replicas of one process send "
            "separately, and here are several hosts. Leave across out: each host sends "
            "its own."
        )
    if replicas > 1 and compressed.group.size == 1:
        raise ConfigurationError(
            f"{owner}(across='hosts') compresses what crosses hosts, and here is one. "
            "Set across='replicas' to let each replica send separately, use "
            "Communication(hierarchy=(2, 2)), which simulates hosts, or "
            "keras.optimizers.Adam."
        )
