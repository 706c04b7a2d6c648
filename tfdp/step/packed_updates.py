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
from tfdp._private.names import current_rank, own_copy
from tfdp._private.variable_hooks import is_checkpointed_as
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
PACKS = "_tfdp_packs"


@dataclasses.dataclass
class _Pack:
    """Weights that are updated together, and their state.

    Args:
      weights: mirrored variables of one type.
      state: the flat variables of each list of an optimizer's state, by replica.
    """

    weights: list[Any]
    state: dict[str, list[tf.Variable]]


def packs_of(optimizer: Optimizer) -> list[_Pack]:
    """The weights of `optimizer` that are updated together."""
    found: list[_Pack] = vars(optimizer).get(PACKS, [])
    return found


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
    has_hook = any(hooks.is_own(optimizer, name) for name in hooks.AFTER_ACCUMULATION)
    return kind in PACKABLE and not has_hook


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
        if PACKS in vars(optimizer):
            continue
        note_on(optimizer, PACKS, [])
        if is_packable(optimizer):
            call_before_step(functools.partial(_pack, optimizer, is_dense))


def _pack(optimizer: Optimizer, is_dense: set[int]) -> None:
    weights = hooks.variables_built_with(optimizer)
    states = hooks.states_of_updates(optimizer, len(weights))
    # Of a type all packs, and the bytes of the last one.
    by_type: dict[Any, list[list[int]]] = {}
    last_bytes: collections.Counter[Any] = collections.Counter()
    for place, weight in enumerate(weights):
        of_weight = [own[place] for own in states.values()]
        if id(weight) in is_dense and _can_be_packed([weight, *of_weight]):
            kind = tuple(one.value.dtype for one in (weight, *of_weight))
            lists = by_type.setdefault(kind, [[]])
            if last_bytes[kind] > PACK_BYTES:
                lists.append([])
                last_bytes[kind] = 0
            lists[-1].append(place)
            last_bytes[kind] += _bytes_of(weight.value)
    for places in itertools.chain(*by_type.values()):
        if states and len(places) >= FEWEST_WEIGHTS:
            flats = {
                name: pack([own[i].value for i in places], f"{optimizer.name}/{name}")
                for name, own in states.items()
            }
            own = [weights[i].value for i in places]
            packs_of(optimizer).append(_Pack(own, flats))


def _bytes_of(value: Any) -> int:
    return int(value.dtype.size * math.prod(value.shape))


def _can_be_packed(variables: Sequence[Any]) -> bool:
    """Whether a weight and its state can be packed."""
    for variable in variables:
        value = getattr(variable, "value", None)
        if (
            type(value) is not ReplicaMirroredVariable
            or value.shape != variables[0].shape
            or value.has_local
            or value.is_of_group
            or is_packed(value)
            # Keras stores the gradient, without an update.
            or getattr(variable, "overwrite_with_gradient", False)
            or is_checkpointed_as(value)
            or _bytes_of(value) > LARGEST_BYTES
        ):
            return False
    return True


def _update(
    original: Callable[..., None],
    optimizer: Optimizer,
    strategy: tf.distribute.Strategy,
    gradients_and_variables: Sequence[tuple[Any, Any]],
    learning_rate: Any,
) -> None:
    """Updates packs of which all weights have a dense gradient, and then the rest."""
    pairs = {id(variable): (own, variable) for own, variable in gradients_and_variables}
    for one in packs_of(optimizer):
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
    type(optimizer).update_step(on_flat, tf.concat(parts, 0), target, learning_rate)
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
