"""Variables that are stored together, as parts of one flat variable.

    flat variable of a replica   [ momentum of a bias | of a scale | of another bias ]

An optimizer's update of them all is one update of the flat variable. Each variable
keeps its name, its shape and its copies: `PackedCopy` reads and assigns the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdp._private.names import UninitializedVariable, in_save_context
from tfdp._private.variable_hooks import facts_of, plain_variable, replace_copies

if TYPE_CHECKING:
    from tfdp.variables.mirrored import ReplicaMirroredVariable


def _of_value(operator: str) -> Callable[..., Any]:
    """A method of tensors, for the value of a copy."""

    def method(copy: Any, *args: Any) -> Any:
        return getattr(copy.read_value(), operator)(*args)

    return method


# Not equality: TensorFlow compares the copies of a variable to find one of them.
_OPERATORS = set(tf.Tensor.OVERLOADABLE_OPERATORS) - {"__eq__", "__ne__"}
_Arithmetic: Any = type("_Arithmetic", (), {one: _of_value(one) for one in _OPERATORS})


class PackedCopy(_Arithmetic):
    """A replica's copy of a variable: elements of a flat one, from `start` on.

    Args:
      flat: the replica's flat variable.
      start: the first element.
      stored: the component of a mirrored variable that it takes the place of.
    """

    def __init__(self, flat: tf.Variable, start: int, stored: tf.Variable):
        self.flat, self.shape, self.dtype = flat, stored.shape, stored.dtype
        self._start, self._stop = start, start + math.prod(stored.shape)
        self._facts = facts_of(stored)

    def __getattr__(self, name: str) -> Any:
        facts = {} if name == "_facts" else self._facts
        if name not in facts:
            raise AttributeError(f"A packed variable has no attribute {name!r}.")
        return facts[name]

    @property
    def device(self) -> str:
        return str(self.flat.device)

    @property
    def handle(self) -> Any:
        # A SavedModel maps handles to its variables. The flat one is none of them: a
        # function that reads it is refused, since it would get one part as the whole.
        return self if in_save_context() else self.flat.handle

    @property
    def initializer(self) -> Any:
        return self.flat.initializer

    def is_initialized(self, name: str | None = None) -> Any:
        return self.flat.is_initialized()

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    def read_value(self) -> tf.Tensor:
        part = self.flat.read_value()[self._start : self._stop]
        return tf.reshape(part, self.shape)

    value = read_value

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.read_value(), indices)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.read_value(), indices)

    def __iter__(self) -> Iterator[tf.Tensor]:
        return iter(self.read_value())

    def numpy(self) -> Any:
        return self.read_value().numpy()

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        value = self.read_value()
        return value if dtype is None else tf.cast(value, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = tf.convert_to_tensor(value, self.dtype)
        if not value.shape.is_compatible_with(self.shape):
            raise ValueError(
                f"Cannot assign a value of shape {value.shape} to the variable "
                f"{self.name!r} of shape {self.shape}."
            )
        part = self.flat[self._start : self._stop]
        with tf.control_dependencies([part.assign(tf.reshape(value, [-1]))]):
            return tf.identity(value)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self.assign(self.read_value() + tf.convert_to_tensor(delta, self.dtype))

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self.assign(self.read_value() - tf.convert_to_tensor(delta, self.dtype))

    # Of a weight whose gradient is one of rows.
    def scatter_add(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        return self._scattered(tf.tensor_scatter_nd_add, rows)

    def scatter_sub(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        return self._scattered(tf.tensor_scatter_nd_sub, rows)

    def scatter_update(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        return self._scattered(tf.tensor_scatter_nd_update, rows)

    def scatter_max(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        return self._scattered(tf.tensor_scatter_nd_max, rows)

    def scatter_min(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        return self._scattered(tf.tensor_scatter_nd_min, rows)

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any
    ) -> list[Any]:
        """Puts a variable of its own for the copy into a SavedModel's graph."""
        exported = UninitializedVariable(
            trainable=self.trainable,
            shape=self.shape,
            dtype=self.dtype,
            name=self.name.split(":")[0],
        )
        object_map[self], tensor_map[self] = exported, exported.handle
        return [self]

    def _scattered(self, scatter: Any, rows: Any) -> Any:
        value, places = self.read_value(), rows.indices[:, None]
        return self.assign(scatter(value, places, tf.cast(rows.values, self.dtype)))


def pack(variables: Sequence[ReplicaMirroredVariable], name: str) -> list[tf.Variable]:
    """Stores `variables` in one flat variable on each replica; call it eagerly.

    Returns the flat variables, by replica of this process.
    """
    flats = []
    for own in zip(*(variable.values for variable in variables), strict=True):
        with tf.device(own[0].device):
            parts = [tf.reshape(copy.read_value(), [-1]) for copy in own]
            flats.append(plain_variable(tf.concat(parts, 0), name))
    start = 0
    for variable in variables:
        copies = zip(flats, variable.values, strict=True)
        packed = [PackedCopy(flat, start, stored) for flat, stored in copies]
        replace_copies(variable, packed)
        start += math.prod(variable.shape)
    return flats


def is_packed(variable: Any) -> bool:
    """Whether a mirrored variable is a part of flat ones."""
    return isinstance(variable.values[0], PackedCopy)
