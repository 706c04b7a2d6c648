"""Gradients that are sent in fewer bytes: which ones, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdp._private.names import own_copy
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


class PlainSums(Protocol):
    """The sums of gradients and of other values that are sent as they are."""

    def __call__(
        self, gradients: list[Any], state: list[tf.Tensor], *, at_once: bool = False
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """With `at_once` none of them is there before the others."""


class CompressionState(tf.Module):
    """What an optimizer's gradients leave from step to step, on each replica.

    Args:
      compressed: how its gradients are exchanged.
    """

    def __init__(self, compressed: CompressedSums):
        super().__init__()
        self._compressed = compressed
        self.steps = OfRanks([], compressed.devices, tf.int64, is_alike=True)
        # By their places: names change with what a process has made before.
        self.of_variables: dict[str, OfVariable] = {}

    def of(self, variable: Any, place: int) -> OfVariable:
        """What is kept of a variable, made when it is asked for first.

        Args:
          variable: that is trained.
          place: among all that the optimizer was built with.
        """
        name = f"{VARIABLE}{place}"
        if name not in self.of_variables:
            of = self._compressed
            devices = [d for r, d in enumerate(of.devices) if of.group.speaks(r)]
            self.of_variables[name] = OfVariable(of.method, variable.shape, devices)
        return self.of_variables[name]

    @property
    def copies(self) -> list[tf.Variable]:
        """Every variable of this process that holds some of it."""
        kept = [self.steps]
        for of in self.of_variables.values():
            kept += of.parts
        return [copy for of_ranks in kept for copy in of_ranks.copies]


class OfVariable(tf.Module):
    """The residual and the method's slots of one variable, on those who speak."""

    def __init__(self, method: Any, shape: Sequence[int], devices: Sequence[str]):
        super().__init__()
        self.residual = OfRanks(shape, devices) if method.error_feedback else None
        self.slots = {
            name: OfRanks(slot, devices, is_alike=name in method.alike_slots)
            for name, slot in method.slots(shape).items()
        }

    @property
    def parts(self) -> list[OfRanks]:
        """The residual, where there is one, and the slots."""
        residual = [] if self.residual is None else [self.residual]
        return [*residual, *self.slots.values()]

    def read(self, place: int, unit: tf.Tensor | None) -> Kept:
        """What is kept, in units of the gradients of this step."""
        residual = None
        if self.residual is not None:
            residual = _times(self.residual.copies[place].read_value(), unit)
        slots = {
            name: _times(slot.copies[place].read_value(), _unit_of(slot, unit))
            for name, slot in self.slots.items()
        }
        return Kept(residual, slots)

    def write(self, place: int, kept: Kept, unit: tf.Tensor | None) -> None:
        """Keeps it for the next step."""
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
    optimizer: keras.optimizers.Optimizer,
    plain_sums: PlainSums,
    unit: Any = None,
    is_plain: tf.Tensor | None = None,
) -> tuple[list[Any], list[tf.Tensor]]:
    """The sums over the replicas of gradients, compressed, and of other small values.

    Args:
      compressed: by which method, and among whom.
      gradients: of `variables`; those that the method does not take are sent as they
        are.
      state: sent as it is.
      rank: the calling replica.
      variables: what the gradients are of.
      optimizer: whose they are; it holds what is kept from step to step.
      plain_sums: the sums of what is sent as it is.
      unit: what the gradients of this step are multiplied by; None for nothing.
      is_plain: whether all are sent as they are in this step; None: the method says.
    """
    taken = [
        place
        for place, (gradient, variable) in enumerate(
            zip(gradients, variables, strict=True)
        )
        if is_taken(compressed, gradient, variable)
    ]
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
    before, speaks = [], compressed.group.speaks(rank)
    speaker = sum(map(compressed.group.speaks, range(rank)))
    own = [steps]
    if speaks:
        before = [kept.read(speaker, unit) for kept in kept_of]
        own += [part.copies[speaker] for kept in kept_of for part in kept.parts]
    remember(optimizer, variables, own)
    others = []

    def count_bad(mine: tf.Tensor) -> tf.Tensor:
        plain = [gradients[place] for place in rest]
        # Behind all that is compressed, so that no bucket has to leave early.
        sums, totals = plain_sums(plain, [*state, mine], at_once=True)
        others.extend([sums, totals[:-1]])
        # The sums are alike on all replicas, and so is the answer.
        return totals[-1] + tf.where(are_finite(sums), 0.0, 1.0)

    sums, after = compressed.sums(
        [gradients[place] for place in taken], before, step, rank, count_bad, is_plain
    )
    for kept, value in zip(kept_of if speaks else [], after, strict=True):
        kept.write(speaker, value, unit)
    steps.assign_add(1)
    results = list(gradients)
    for place, value in zip([*taken, *rest], [*sums, *others[0]], strict=True):
        results[place] = value
    return results, others[1]


def is_taken(compressed: CompressedSums, gradient: Any, variable: Any) -> bool:
    """Whether the gradient of a variable is compressed; else it is sent as it is."""
    if isinstance(gradient, tf.IndexedSlices):
        return False
    path, shape = variable_path(variable), gradient.shape
    if shape.rank is None:
        return False
    return compressed.method.takes(path, shape.as_list(), gradient.dtype.name)


def _state_of(
    optimizer: keras.optimizers.Optimizer, compressed: CompressedSums
) -> CompressionState:
    state = getattr(optimizer, STATE, None)
    if state is None:
        # As an attribute, so that checkpoints have it; what a checkpoint that was read
        # before had of it is then taken over.
        state = CompressionState(compressed)
        setattr(optimizer, STATE, state)
    return state


def compression_entries(optimizer: keras.optimizers.Optimizer) -> dict[str, OfRanks]:
    """What an optimizer's compressed gradients have left so far, by name."""
    state = getattr(optimizer, STATE, None)
    if state is None:
        return {}
    entries = {STEPS: state.steps}
    for name, kept in state.of_variables.items():
        if kept.residual is not None:
            entries[f"{name}/residual"] = kept.residual
        entries |= {f"{name}/{slot}": rows for slot, rows in kept.slots.items()}
    return entries


def make_compression_entries(
    optimizer: keras.optimizers.Optimizer, names: Sequence[str]
) -> None:
    """Makes what a checkpoint has of `compression_entries`, before the first step.

    Args:
      optimizer: built.
      names: in the checkpoint. Nothing happens where gradients are not compressed.
    """
    rounds = getattr(optimizer, "rounds", None)
    strategy = strategy_of(optimizer)
    reducer = getattr(strategy.extended, "reducer", None)
    compressed = getattr(rounds or reducer, "compressed", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    asked = getattr(inner, "momentum_compression", None)
    if asked is not None and reducer is not None:
        compressed = reducer.compressed_by(asked.method, asked.across)
    if compressed is None or not names:
        return
    state = _state_of(optimizer, compressed)
    variables = variables_built_with(inner)
    places = {name.partition("/")[0].removeprefix(VARIABLE) for name in names}
    for place in sorted(int(text) for text in places if text.isdecimal()):
        if place < len(variables):
            state.of(variables[place], place)


def refuse_momentum(
    compressed: CompressedSums, optimizer: keras.optimizers.Optimizer
) -> None:
    """Refuses an optimizer that gives its gradients momentum, where they have some.

    Raises:
      ConfigurationError: then.
    """
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


def refuse_eager_compression(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an exchange of eager replicas where gradients should be compressed.

    Raises:
      ConfigurationError: always then.
    """
    extended = tf.distribute.get_strategy().extended
    compressed = getattr(getattr(extended, "reducer", None), "compressed", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    by_momentum = getattr(inner, "momentum_compression", None) is not None
    if tf.executing_eagerly() and (compressed is not None or by_momentum):
        asked = (
            type(inner).__name__
            if compressed is None
            else f"Communication(compression={compressed.method!r})"
        )
        raise ConfigurationError(
            f"{asked} acts in graphs, and this step runs eagerly, replica by replica. "
            "Compile the model with run_eagerly=False, or put strategy.run into a "
            "tf.function."
        )


def _unit_of(slot: OfRanks, unit: tf.Tensor | None) -> tf.Tensor | None:
    """What all have alike are directions, which have no unit."""
    return None if slot.is_alike else unit


def _times(value: Any, unit: tf.Tensor | None) -> Any:
    return value if unit is None else value * unit


# Sums of gradients by way of the momentum: what is made small is smoother than they.
#
# With the momentum m, which all R replicas have alike, and the gradient g_r of each,
# whose sum is g, replica r sends a part of the next momentum,
#
#     m_r = beta_1 m / R + (1 - beta_1) g_r       sum over r = beta_1 m + (1 - beta_1) g
#
# and the optimizer is given the gradient by which it comes to the sum M that arrived:
#
#     (M - beta_1 m) / (1 - beta_1)


def momentum_compression_of(optimizer: Any) -> MomentumCompression | None:
    """How `optimizer`, or the one within it, sends its momentum; None: it does not."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "momentum_compression", None)


def sum_by_momentum(
    asked: MomentumCompression,
    reducer: Reducer,
    gradients: Sequence[Any],
    state: Sequence[tf.Tensor],
    rank: int,
    variables: Sequence[Any],
    optimizer: keras.optimizers.Optimizer,
    plain_sums: PlainSums,
    unit: Any,
) -> tuple[list[Any], list[tf.Tensor]]:
    """As `sum_compressed`, of momenta; see the top.

    Args:
      asked: what the optimizer says.
      reducer: the strategy's.
      gradients, state, rank, variables, optimizer, plain_sums, unit: see there.

    Raises:
      ConfigurationError: where momenta cannot be sent so.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    strategy = tf.distribute.get_strategy()
    _refuse_here(inner, strategy, reducer)
    found = current_run()
    if found is not None:
        found[0].sent_momentum.add(id(inner))
    compressed = reducer.compressed_by(asked.method, asked.across)
    _refuse_place(inner, strategy, asked, compressed)
    is_plain = tf.convert_to_tensor(inner.iterations) < asked.warmup_steps
    # As they are in the warm-up, to the last bit: 0 m + 1 g.
    kept = tf.where(is_plain, 0.0, asked.beta_1)
    scale = tf.constant(1.0) if unit is None else tf.cast(unit, tf.float32)
    sent, momenta = list(gradients), {}
    for place, (gradient, variable) in enumerate(
        zip(gradients, variables, strict=True)
    ):
        if is_taken(compressed, gradient, variable):
            own = own_copy(inner.momentum_of(variable).value, rank).read_value()
            momenta[place] = kept * scale * tf.cast(own, tf.float32)
            part = momenta[place] / strategy.num_replicas_in_sync
            new = (1 - kept) * tf.cast(gradient, tf.float32)
            # Where there is none it may not be a number, and 0 times that is not 0.
            sent[place] = tf.where(is_plain, new, part + new)
    sums, totals = sum_compressed(
        compressed,
        sent,
        state,
        rank,
        variables,
        optimizer,
        plain_sums,
        unit,
        is_plain=is_plain,
    )
    for place, momentum in momenta.items():
        total = (sums[place] - momentum) / (1 - kept)
        sums[place] = tf.cast(total, gradients[place].dtype)
    return sums, totals


def _refuse_here(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    reducer: Reducer,
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
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    asked: MomentumCompression,
    compressed: CompressedSums,
) -> None:
    """Refuses an `across` that would let everything be sent as it is."""
    owner, replicas = type(optimizer).__name__, strategy.num_replicas_in_sync
    is_one_process = len(strategy.extended.worker_devices) == replicas
    if asked.across == "replicas" and not is_one_process:
        raise ConfigurationError(
            f"{owner}(across='replicas') lets the replicas of one process send apart, "
            "and here are several hosts. Leave across out: each host sends its own."
        )
    if replicas > 1 and compressed.group.size == 1:
        raise ConfigurationError(
            f"{owner}(across='hosts') makes small what crosses hosts, and here is one. "
            "Say across='replicas' to let each replica send apart, use "
            "Communication(hierarchy=(2, 2)), which simulates hosts, or "
            "keras.optimizers.Adam."
        )
