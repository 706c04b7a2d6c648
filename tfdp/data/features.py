"""What one feature of an example is: its shape, its dtype, how it is stored.

A feature is inferred from the first example and held against every later one.
Nothing here needs TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdp.errors import ConfigurationError, DataError
from tfdp.files.checked_json import is_count

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_SMALL_INTEGERS = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32")
_RAW_ONLY = ("uint64", "float16", "bfloat16", "float64", "complex64", "complex128")
DTYPES = ("string", "int64", "float32", *_SMALL_INTEGERS, *_RAW_ONLY)

# How a feature lies in the `tf.train.Example`: one of its three kinds of list, or
# the array's little-endian bytes as a single string.
ENCODINGS = ("bytes_list", "float_list", "int64_list", "raw_bytes")


def _default_encoding(shape: tuple[int | None, ...], dtype: str) -> str:
    if dtype == "string":
        return "bytes_list"
    if dtype == "float32":
        return "float_list"
    if dtype == "int64" or (dtype in _SMALL_INTEGERS and shape == ()):
        return "int64_list"
    return "raw_bytes"


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and dtype of one feature of an example, and how it is stored.

    Args:
      shape: Its shape without a batch dimension; None is a length that may
        differ from example to example, as in `(None,)` for a list of tokens.
      dtype: Its dtype by name: "string", "bool", "float32", "uint8", "bfloat16"...
      encoding: How it lies in the `tf.train.Example`: "bytes_list", "float_list",
        "int64_list" or "raw_bytes" (the array's little-endian bytes). The
        default follows the dtype: strings, float32, int64 and integer scalars
        take the list that other readers expect, the rest is stored raw.

    Raises:
      ConfigurationError: The shape, dtype or encoding is not one of these.

    >>> FeatureSpec((28, 28), "uint8").encoding
    'raw_bytes'
    """

    shape: tuple[int | None, ...]
    dtype: str
    encoding: str = ""

    def __post_init__(self) -> None:
        try:
            shape = None if isinstance(self.shape, str) else tuple(self.shape)
        except (TypeError, ValueError):  # of a TensorShape of which nothing is known
            shape = None
        if shape is None:
            raise ConfigurationError(
                "The shape of a feature is a tuple of lengths, () for a single value. "
                f"Received: {self.shape!r}."
            )
        object.__setattr__(self, "shape", shape)
        if self.dtype not in DTYPES:
            raise ConfigurationError(
                f"The dtype of a feature must be one of {', '.join(DTYPES)}. "
                f"Received: {self.dtype!r}."
            )
        for length in self.shape:
            if length is not None and not is_count(length):
                raise ConfigurationError(
                    f"a feature has shape {self.shape}; every length is a whole "
                    "number from 0, or None where it varies"
                )
        if self.varies and 0 in self.shape:
            raise ConfigurationError(
                f"a feature has shape {self.shape}; a varying length cannot be "
                "found again beside a length of 0"
            )
        if not self.encoding:
            chosen = _default_encoding(self.shape, self.dtype)
            object.__setattr__(self, "encoding", chosen)
        elif self.encoding not in self._allowed_encodings():
            raise ConfigurationError(
                f"encoding {self.encoding!r} cannot hold {self.dtype} of shape "
                f"{self.shape}; allowed is {' or '.join(self._allowed_encodings())}"
            )

    @property
    def varies(self) -> bool:
        """Whether some length differs from example to example."""
        return None in self.shape

    @property
    def stores_shape(self) -> bool:
        """Whether each record must hold the shape: one unknown length is implied."""
        return self.shape.count(None) > 1

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is one of this feature's."""
        return len(shape) == len(self.shape) and all(
            wanted is None or wanted == got
            for wanted, got in zip(self.shape, shape, strict=True)
        )

    def _allowed_encodings(self) -> tuple[str, ...]:
        if self.dtype == "string":
            return ("bytes_list",)
        if self.dtype == "float32":
            return ("float_list", "raw_bytes")
        if self.dtype == "int64" or self.dtype in _SMALL_INTEGERS:
            return ("int64_list", "raw_bytes")
        return ("raw_bytes",)


def as_array(value: Any) -> np.ndarray:
    """The array that is stored for a value; text becomes UTF-8 bytes.

    A Python float becomes float32, as it does in `tf.constant`, and a Python int
    int64; NumPy values keep their dtype.

    Raises:
      DataError: The value is no rectangular array of numbers, bytes or text.
    """
    if isinstance(value, float) and not isinstance(value, np.floating):
        if np.isfinite(value) and abs(value) > LARGEST_FLOAT32:
            raise DataError(
                f"a number {value!r} is too large for float32, which a Python float "
                "becomes; give np.float64(number), which keeps its own type"
            )
        return np.asarray(value, dtype=np.float32)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"a value of type {type(value).__name__} is no rectangular array "
            f"({error}); store its parts under names of their own"
        ) from error
    if array.dtype.kind == "f" and isinstance(value, (list, tuple)):
        _refuse_rounded(array, np.asarray(value, dtype=object))
    if array.dtype.kind in "SUO":
        # NumPy's fixed-width bytes drop trailing zero bytes, hence objects.
        return _as_bytes(np.asarray(value, dtype=object))
    return array


def _refuse_rounded(array: np.ndarray, given: np.ndarray) -> None:
    """NumPy makes floats of Python ints of which some need a sign, and one 64 bits."""
    for stored, one in zip(array.flat, given.flat, strict=True):
        if isinstance(one, int) and int(stored) != one:
            raise DataError(
                f"the whole number {one} would be stored as the float {stored!r}; give "
                "an array of a dtype that holds it, such as uint64"
            )


def _as_bytes(array: np.ndarray) -> np.ndarray:
    texts = np.empty(array.shape, dtype=object)
    for position, item in np.ndenumerate(array):
        if isinstance(item, str):
            item = item.encode()
        if not isinstance(item, bytes):
            raise DataError(
                f"a value of type {type(item).__name__} cannot be stored; allowed "
                "are numbers, bytes and text, and rectangular arrays of them"
            )
        texts[position] = item
    return texts


def _dtype_name(array: np.ndarray) -> str:
    return "string" if array.dtype == object else array.dtype.name


def infer_features(
    example: Mapping[str, Any], given: Mapping[str, FeatureSpec] | None = None
) -> dict[str, FeatureSpec]:
    """The features of an example, where `given` has no word about them.

    Args:
      example: Name to array, number, bytes or text.
      given: Features that are already known, such as those whose length varies.

    Returns:
      One `FeatureSpec` for each name, in the order of the example.

    Raises:
      DataError: The example is no mapping, is empty, holds what cannot be stored,
        or lacks a feature that was given.
    """
    _require_mapping(example, 0)
    known = dict(given or {})
    missing = sorted(known.keys() - example.keys())
    if missing:
        raise DataError(
            f"example 0 has no feature {missing[0]!r}, which `features` declares; "
            f"it has {sorted(example)}"
        )
    features = {}
    for name, value in example.items():
        if name in known:
            features[name] = known[name]
            continue
        array = _named_array(name, value, 0)
        dtype = _dtype_name(array)
        if dtype not in DTYPES:
            raise DataError(
                f"example 0: feature {name!r} has dtype {dtype}; allowed are "
                f"{', '.join(DTYPES)}"
            )
        features[name] = FeatureSpec(array.shape, dtype)
    return features


def check_example(
    example: Mapping[str, Any], features: Mapping[str, FeatureSpec], number: int
) -> dict[str, np.ndarray]:
    """An example's arrays, once it is seen to be as `features` says.

    Args:
      example: Name to array, number, bytes or text.
      features: What every example of the set holds.
      number: The example's place in the set, from 0, for the error.

    Raises:
      DataError: A feature is missing, unknown, or of another shape or dtype.
    """
    _require_mapping(example, number)
    if example.keys() != features.keys():
        raise DataError(
            f"example {number} has the features {sorted(example)}; every example of "
            f"a set has the same, here {sorted(features)}"
        )
    arrays = {}
    for name, spec in features.items():
        array = _named_array(name, example[name], number)
        dtype = _dtype_name(array)
        if dtype != spec.dtype or not spec.accepts(array.shape):
            raise DataError(
                f"example {number}: feature {name!r} is {dtype} of shape "
                f"{array.shape}; the set holds {spec.dtype} of shape {spec.shape}. "
                "Convert it, or declare a varying length as None in `features`"
            )
        arrays[name] = array
    return arrays


def _require_mapping(example: Any, number: int) -> None:
    if not isinstance(example, Mapping) or not example:
        raise DataError(
            f"example {number} is a {type(example).__name__}; an example is a "
            "non-empty dict of name to array, number, bytes or text"
        )
    for name in example:
        if not isinstance(name, str):
            raise DataError(
                f"example {number} has a feature named {name!r}; names are texts"
            )


def _named_array(name: str, value: Any, number: int) -> np.ndarray:
    try:
        return as_array(value)
    except DataError as error:
        raise DataError(f"example {number}: feature {name!r}: {error}") from error
