"""Feature specs: shape, dtype and encoding, inferred and checked without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdp.checks import check_one_of
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.checked_json import is_count

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_SMALL_INTEGERS = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32")
_RAW_ONLY = ("uint64", "float16", "bfloat16", "float64", "complex64", "complex128")
DTYPES = ("string", "int64", "float32", *_SMALL_INTEGERS, *_RAW_ONLY)


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and dtype of one feature of an example, and how it is stored.

    Args:
      shape: Shape without the batch dimension; None is a length that may differ
        between examples, as in `(None,)` for a list of tokens.
      dtype: Dtype name: "string", "bool", "float32", "uint8", "bfloat16"...
      encoding: "bytes_list", "float_list", "int64_list" or "raw_bytes" (the array's
        little-endian bytes) in the `tf.train.Example`. By default strings, float32,
        int64 and integer scalars take the list other readers expect, the rest is raw.

    Raises:
      ConfigurationError: The shape, dtype or encoding is not allowed.

    >>> FeatureSpec((28, 28), "uint8").encoding
    'raw_bytes'
    """

    shape: tuple[int | None, ...]
    dtype: str
    encoding: str = ""

    def __post_init__(self) -> None:
        try:
            shape = None if isinstance(self.shape, str) else tuple(self.shape)
        except (TypeError, ValueError):  # a TensorShape of unknown rank
            shape = None
        if shape is None:
            raise ConfigurationError(
                "The shape of a feature is a tuple of lengths, () for a single value. "
                f"Received: {self.shape!r}."
            )
        object.__setattr__(self, "shape", shape)
        check_one_of("The dtype of a feature", self.dtype, DTYPES)
        for length in self.shape:
            if length is not None and not is_count(length):
                raise ConfigurationError(
                    f"a feature has shape {self.shape}; every length is a whole "
                    "number from 0, or None where it varies"
                )
        if self.varies and 0 in self.shape:
            raise ConfigurationError(
                f"a feature has shape {self.shape}; a varying length cannot be "
                "recovered next to a length of 0"
            )
        allowed = self._allowed_encodings()
        if not self.encoding:
            is_raw = self.dtype in _SMALL_INTEGERS and self.shape != ()
            object.__setattr__(self, "encoding", "raw_bytes" if is_raw else allowed[0])
        elif self.encoding not in allowed:
            raise ConfigurationError(
                f"encoding {self.encoding!r} cannot hold {self.dtype} of shape "
                f"{self.shape}; allowed is {' or '.join(allowed)}"
            )

    @property
    def varies(self) -> bool:
        """Whether some length differs between examples."""
        return None in self.shape

    @property
    def stores_shape(self) -> bool:
        """Whether each record must hold the shape; one unknown length is implied."""
        return self.shape.count(None) > 1

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape fits this feature."""
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
    """The array stored for a value; text becomes UTF-8 bytes, a Python float float32.

    NumPy values keep their dtype. What is not rectangular raises a `DataError`.
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
        # NumPy turns ints that mix signs with 64 bits into floats, which may round.
        given = np.asarray(value, dtype=object)
        for stored, one in zip(array.flat, given.flat, strict=True):
            if isinstance(one, int) and int(stored) != one:
                raise DataError(
                    f"the whole number {one} would be stored as the float {stored!r}; "
                    "give an array of a dtype that holds it, such as uint64"
                )
    if array.dtype.kind in "SUO":
        # NumPy's fixed-width bytes drop trailing zero bytes, so use objects.
        return _as_bytes(np.asarray(value, dtype=object))
    return array


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
    """One `FeatureSpec` per name, in the example's order; `given` overrides inference.

    A bad example, or one that lacks a given feature, raises a `DataError`.
    """
    _require_mapping(example, 0)
    declared = dict(given or {})
    missing = sorted(declared.keys() - example.keys())
    if missing:
        raise DataError(
            f"example 0 has no feature {missing[0]!r}, which `features` declares; "
            f"it has {sorted(example)}"
        )
    features = {}
    for name, value in example.items():
        if name in declared:
            features[name] = declared[name]
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
    """The arrays of example `number`; a `DataError` if they differ from `features`."""
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
