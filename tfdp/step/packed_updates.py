"""One update for many weights of an optimizer that treats each number by itself.

Keras updates weight by weight, with a dozen operations each. Here the optimizer's state
of a pack of weights is stored in flat variables (`tfdp.variables.packed`), and Keras'
own `update_step` runs once for all of them:

    gradients of weights, joined -> update_step of flat state -> change of each weight

The arithmetic of each number is Keras', so the results are the same bits. State is
packed when the first step of an optimizer is traced, since then it is known which
gradients are dense.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private import optimizer_hooks as hooks
from tfdp._private.functions import compiled_by_xla
from tfdp._private.names import current_rank, own_copy
from tfdp._private.variable_hooks import are_copies_in_use, is_checkpointed_as
from tfdp.checks import what_it_is
from tfdp.errors import ConfigurationError
from tfdp.seams.replace import Override, around, note_on
from tfdp.step.find_optimizers import innermost_optimizers
from tfdp.tracing.step import call_before_step
from tfdp.variables.mirrored import ReplicaMirroredVariable
from tfdp.variables.packed import is_packed, pack

#: The size of the largest weight that is packed. The update of a larger one takes
#: longer than to start its operations.
LARGEST_BYTES = 2097152
#: The size of a pack, but for its last weight. Temporary values of its update stay in
#: the caches of a processor.
PACK_BYTES = 4194304
#: The fewest weights that are packed.
FEWEST_WEIGHTS = 4
# Keras' classes whose update of a number is the same bits wherever it is stored.
# The optimizers that divide by a root (RMSprop, Adagrad, Adadelta, Ftrl) are not here:
# TensorFlow makes a product of it, with a reciprocal root whose last bit depends on the
# place in a vector register.
PACKABLE = ("SGD", "Adam", "Adamax", "Nadam", "Lion")
# The same, and those of which only the last bits differ. Ftrl also reads the weight.
COMPILABLE = (*PACKABLE, "RMSprop", "Adagrad", "Adadelta")
PACKS, FUSED = "_tfdp_packs", "_tfdp_fused"


@dataclasses.dataclass
class _Pack:
    """Weights that are updated together, and their state.

    Args:
      weights: mirrored variables of one type.
      state: the flat variables of each list of an optimizer's state, by replica.
    """

    weights: list[Any]
    state: dict[str, list[tf.Variable]]


@dataclasses.dataclass
class Packs:
    """Weights that an optimizer updates together, and those that it does not.

    Args:
      built_with: the list of all of them, another one after each `build`.
      packs: weights that are updated together.
      alone: the paths of the other weights, by the reason.
    """

    built_with: list[Any]
    packs: list[_Pack] = dataclasses.field(default_factory=list)
    alone: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def packs_of(optimizer: Optimizer) -> Packs:
    """The packs of `optimizer`; none before its first step after a `build`."""
    found: Packs | None = vars(optimizer).get(PACKS)
    built_with = hooks.variables_built_with(optimizer)
    is_of_build = found is not None and found.built_with is built_with
    return found if found is not None and is_of_build else Packs(built_with)


def packs_in_words(optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Which weights of `optimizers` are updated together, and why others are not."""
    for optimizer in itertools.chain(*map(innermost_optimizers, optimizers)):
        found = packs_of(optimizer)
        for one in found.packs:
            largest = max(one.weights, key=_bytes_of)
            how = "in a kernel of XLA" if is_fused(optimizer) else "together"
            count = f"{len(one.weights)} weights" if one.weights[1:] else "1 weight"
            yield f"{optimizer.name} updates {count} {how}; largest: {largest.name}"
        for why, paths in found.alone.items():
            more = f" and {len(paths) - 3} more" if paths[3:] else ""
            yield f"one by one, {why}: {', '.join(paths[:3])}{more}"


def packed_overrides(optimizers: Iterable[Optimizer]) -> Iterator[Override]:
    """Overrides that let `optimizers` update the weights of a pack together."""
    for outer in optimizers:
        for optimizer in innermost_optimizers(outer):
            if is_packable(optimizer):
                update = around(_update, optimizer)
                yield Override(optimizer, hooks.UPDATE_OF_STRATEGY, update)


def is_packable(optimizer: Optimizer) -> bool:
    """Whether the update is Keras', and one of single numbers."""
    kind = hooks.elementwise_of_keras(optimizer)
    names = hooks.AFTER_ACCUMULATION
    has_hook = any(hooks.is_own(optimizer, name) for name in names)
    is_set = any(
        hooks.is_set_by_user(optimizer, one) for one in (*names, "update_step")
    )
    is_known = kind in (COMPILABLE if is_fused(optimizer) else PACKABLE)
    return is_known and not has_hook and not is_set


def fuse(optimizer: Any) -> None:
    """Lets XLA compile the updates of `optimizer`; see `tfdp.optimizers.fused`."""
    own = innermost_optimizers(optimizer) if isinstance(optimizer, Optimizer) else []
    for one in own:
        if PACKS in vars(one):
            raise ConfigurationError(
                f"{one.name} has made a step already. Call tfdp.optimizers.fused on "
                "an optimizer before its first step."
            )
    if not own or {hooks.elementwise_of_keras(one) for one in own} - {*COMPILABLE}:
        raise ConfigurationError(
            "tfdp.optimizers.fused compiles the updates of Keras' AdamW, "
            f"{', '.join(COMPILABLE)}, and of a LossScaleOptimizer of one of them. "
            f"Received: {what_it_is(optimizer)}."
        )
    for one in own:
        note_on(one, FUSED, True)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether XLA compiles the updates of `optimizer`."""
    return FUSED in vars(optimizer)


def pack_state(
    optimizers: Sequence[Optimizer], weights: Sequence[Any], gradients: Sequence[Any]
) -> None:
    """Packs the state of weights with dense gradients, once for each optimizer.

    Called in a replica, before it updates; `optimizers` are built.
    """
    is_dense = {
        id(weight)
        for weight, gradient in zip(weights, gradients, strict=True)
        if isinstance(gradient, tf.Tensor)
    }
    for optimizer in optimizers:
        found = packs_of(optimizer)
        if found is not vars(optimizer).get(PACKS):
            note_on(optimizer, PACKS, found)
            if is_packable(optimizer):
                packing = functools.partial(_pack, optimizer, is_dense, found)
                call_before_step(packing)
        if is_fused(optimizer) and not found.packs:
            how = " ".join(packs_in_words([optimizer])) or "by a method of its own"
            raise ConfigurationError(
                "tfdp.optimizers.fused has no effect here, since "
                f"{optimizer.name} updates {how}. Leave fused out "
                "(docs/optimizers.md#fused-updates)."
            )


def _pack(optimizer: Optimizer, is_dense: set[int], found: Packs) -> None:
    weights = found.built_with
    states = hooks.states_of_updates(optimizer, len(weights))
    # Of a type all packs, and the bytes of the last one.
    by_type: dict[Any, list[list[int]]] = {}
    last_bytes: collections.Counter[Any] = collections.Counter()
    for place, weight in enumerate(weights):
        of_weight = [own[place] for own in states.values()]
        why_not = _why_not([weight, *of_weight], optimizer, id(weight) in is_dense)
        if why_not:
            # Of a variable of TensorFlow's that a program gave to the optimizer.
            path = getattr(weight, "path", None) or weight.name
            found.alone.setdefault(why_not, []).append(path)
            continue
        types = tuple(one.value.dtype for one in (weight, *of_weight))
        is_large = _bytes_of(weight.value) > LARGEST_BYTES
        kind = (types, place if is_large else None)
        lists = by_type.setdefault(kind, [[]])
        if last_bytes[kind] > PACK_BYTES:
            lists.append([])
            last_bytes[kind] = 0
        lists[-1].append(place)
        last_bytes[kind] += _bytes_of(weight.value)
    for places in itertools.chain(*by_type.values()):
        own = [weights[i] for i in places]
        if is_fused(optimizer) or len(own) >= FEWEST_WEIGHTS:
            flats = {
                name: pack([of[i].value for i in places], f"{optimizer.name}/{name}")
                for name, of in states.items()
            }
            found.packs.append(_Pack([one.value for one in own], flats))
        else:
            few = found.alone.setdefault("too few for a pack", [])
            few += [one.path for one in own]


def _bytes_of(value: Any) -> int:
    return int(value.dtype.size * math.prod(value.shape))


def _why_not(
    variables: Sequence[Any], optimizer: Optimizer, is_dense: bool
) -> str | None:
    """The reason why a weight and its state are not packed; None: they are."""
    values: list[Any] = [getattr(variable, "value", None) for variable in variables]
    kinds = {type(value) for value in values}
    if len(values) == 1:
        return "without state"
    if kinds != {ReplicaMirroredVariable}:
        return "in shards, or with other state than one value for each number"
    if not is_dense:
        return "no gradient, or one of rows"
    if not is_fused(optimizer) and _bytes_of(values[0]) > LARGEST_BYTES:
        return "large"
    for value, variable in zip(values, variables, strict=True):
        if (
            value.shape != values[0].shape
            or value.has_local
            or value.is_of_group
            or is_packed(value)
            # Created within a step that is traced, and has no value yet.
            or not all(copy.is_initialized() for copy in value.values)
            # Keras stores the gradient, without an update.
            or getattr(variable, "overwrite_with_gradient", False)
            or is_checkpointed_as(value)
        ):
            return "its state is used otherwise"
    if any(are_copies_in_use(state) for state in values[1:]):
        return "something holds its state, such as a function that was traced before"
    return None


def _update(
    original: Callable[..., None],
    optimizer: Optimizer,
    strategy: tf.distribute.Strategy,
    gradients_and_variables: Sequence[tuple[Any, Any]],
    learning_rate: Any,
) -> None:
    """Updates packs of which all weights have a dense gradient, and then the rest."""
    pairs = {id(variable): (own, variable) for own, variable in gradients_and_variables}
    if len(pairs) < len(gradients_and_variables):  # a weight is updated twice
        original(strategy, gradients_and_variables, learning_rate)
        return
    for one in packs_of(optimizer).packs:
        own = [pairs.get(id(weight), (None, None))[0] for weight in one.weights]
        are_dense = all(isinstance(gradient, tf.Tensor) for gradient in own)
        if not are_dense or one.weights[0].has_local:
            continue
        for weight in one.weights:
            del pairs[id(weight)]
        update = functools.partial(_update_pack, optimizer, one)
        args = own, learning_rate
        strategy.extended.update(one.weights[0], update, args=args, group=False)
    rest = list(pairs.values())
    original(strategy, rest, learning_rate)


def _update_pack(
    optimizer: Optimizer,
    packed: _Pack,
    _: Any,
    gradients: Sequence[tf.Tensor],
    learning_rate: Any,
) -> None:
    rank = current_rank()
    target = _Target([own_copy(weight, rank) for weight in packed.weights])
    parts = [
        _shaped(tf.cast(one, weight.dtype), [math.prod(weight.shape)])
        for one, weight in zip(gradients, packed.weights, strict=True)
    ]
    state = {name: [flats[rank]] for name, flats in packed.state.items()}
    on_flat = _OnFlat(optimizer, state)
    gradient = tf.concat(parts, 0) if len(parts) > 1 else parts[0]
    update_step = functools.partial(type(optimizer).update_step, on_flat, gradient)
    if not is_fused(optimizer):
        update_step(target, learning_rate)
    elif len(parts) == 1:
        # A function of its own in each replica: it captures the replica's copies.
        compiled_by_xla(lambda: update_step(target, learning_rate))()
    else:
        change = _Change(target.dtype)
        made = compiled_by_xla(lambda: change.made_by(update_step, learning_rate))
        change.apply(target, made())
    for weight in packed.weights:
        weight.note_update()


def _shaped(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    """A tensor in another shape, without an operation if that is its own."""
    return tensor if tensor.shape == shape else tf.reshape(tensor, shape)


class _OnFlat:
    """An optimizer whose state is that of one weight, for Keras' `update_step`."""

    def __init__(self, optimizer: Optimizer, state: Mapping[str, list[tf.Variable]]):
        self._optimizer, self._state = optimizer, state

    def __getattr__(self, name: str) -> Any:
        known = self._state.get(name)
        return getattr(self._optimizer, name) if known is None else known

    def _get_variable_index(self, variable: Any) -> int:
        return 0


class _Change:
    """Takes the place of a target in a compiled update, which returns the change.

    The parts of the change are added outside: a kernel for each weight would take XLA
    longer to compile, and the device no less time.
    """

    def __init__(self, dtype: tf.DType):
        self.dtype = dtype

    def assign_add(self, change: tf.Tensor) -> None:
        self._method, self._value = _Target.assign_add, change

    def assign_sub(self, change: tf.Tensor) -> None:
        self._method, self._value = _Target.assign_sub, change

    def made_by(self, update_step: Callable[..., None], rate: Any) -> tf.Tensor:
        """The change that `update_step` makes."""
        update_step(self, rate)
        return self._value

    def apply(self, target: _Target, change: tf.Tensor) -> None:
        """Changes `target`, as `update_step` asked."""
        self._method(target, change)


class _Target:
    """The weights of a pack, as one flat variable that `update_step` changes."""

    def __init__(self, copies: Sequence[tf.Variable]):
        self._copies, self.dtype = copies, copies[0].dtype
        self._sizes = [math.prod(copy.shape) for copy in copies]

    def assign_add(self, change: tf.Tensor) -> None:
        for copy, part in self._parts(change):
            copy.assign_add(part, read_value=False)

    def assign_sub(self, change: tf.Tensor) -> None:
        for copy, part in self._parts(change):
            copy.assign_sub(part, read_value=False)

    def _parts(self, change: tf.Tensor) -> list[tuple[tf.Variable, tf.Tensor]]:
        parts = tf.split(change, self._sizes)
        return [
            (copy, _shaped(part, copy.shape))
            for copy, part in zip(self._copies, parts, strict=True)
        ]
