"""Converts examples to `tf.train.Example` records and back; keeps dtypes and shapes.

Parsing a batch of records is several times faster than one record at a time: each
feature then takes one operation per batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.data.features import FeatureSpec

# `tf.io.decode_raw` lacks these types: read the type of the same width and bitcast.
_BITCAST_FROM = {"uint32": tf.int32, "uint64": tf.int64}
_STORED = {"bytes_list": tf.string, "float_list": tf.float32, "int64_list": tf.int64}


def _shape_name(name: str) -> str:
    return f"{name}/shape"


def encode_example(
    arrays: Mapping[str, np.ndarray], features: Mapping[str, FeatureSpec]
) -> bytes:
    """The record of one example, of arrays as `check_example` returns them."""
    fields = {}
    for name, spec in features.items():
        fields[name] = _encode_feature(arrays[name], spec)
        if spec.stores_shape:
            shape = tf.train.Int64List(value=arrays[name].shape)
            fields[_shape_name(name)] = tf.train.Feature(int64_list=shape)
    example = tf.train.Example(features=tf.train.Features(feature=fields))
    # Equal examples must give equal bytes, whatever the order of the map's fields.
    return example.SerializeToString(deterministic=True)


def _encode_feature(array: np.ndarray, spec: FeatureSpec) -> tf.train.Feature:
    flat = array.reshape(-1)
    if spec.encoding == "float_list":
        return tf.train.Feature(float_list=tf.train.FloatList(value=flat))
    if spec.encoding == "int64_list":
        # Int64List rejects Python's True.
        integers = tf.train.Int64List(value=flat.astype(np.int64).tolist())
        return tf.train.Feature(int64_list=integers)
    if spec.encoding == "bytes_list":
        texts = flat.tolist()
    else:
        little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
        texts = [little_endian.tobytes()]
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))


def decode_examples(
    records: tf.Tensor, features: Mapping[str, FeatureSpec]
) -> dict[str, tf.Tensor]:
    """Name to tensor of one record, or (string [B], no varying lengths) of a batch."""
    schema: dict[str, Any] = {}
    for name, spec in features.items():
        schema[name] = _schema_of(spec)
        if spec.stores_shape:
            rank = len(spec.shape)
            schema[_shape_name(name)] = tf.io.FixedLenFeature((rank,), tf.int64)
    parsed = tf.io.parse_example(records, schema)
    batch = tuple(records.shape)
    return {
        name: _restore(parsed[name], spec, batch, parsed.get(_shape_name(name)))
        for name, spec in features.items()
    }


def _schema_of(spec: FeatureSpec) -> Any:
    if spec.encoding == "raw_bytes":
        return tf.io.FixedLenFeature((), tf.string)
    stored = _STORED[spec.encoding]
    if spec.varies:
        return tf.io.FixedLenSequenceFeature((), stored, allow_missing=True)
    return tf.io.FixedLenFeature(spec.shape, stored)


def _restore(
    stored: tf.Tensor,
    spec: FeatureSpec,
    batch_shape: tuple[int | None, ...],
    example_shape: tf.Tensor | None,
) -> tf.Tensor:
    dtype = tf.as_dtype(spec.dtype)
    if spec.encoding == "raw_bytes":
        stored = tf.io.decode_raw(stored, _BITCAST_FROM.get(spec.dtype, dtype))
        if spec.dtype in _BITCAST_FROM:
            stored = tf.bitcast(stored, dtype)
    elif stored.dtype != dtype:
        stored = tf.cast(stored, dtype)
    if example_shape is None:
        lengths = (*batch_shape, *spec.shape)
        wanted: list[Any] = [-1 if length is None else length for length in lengths]
        if -1 in wanted and 0 in wanted:
            # -1 is ambiguous for an empty feature in a batch of unknown size.
            wanted[0] = tf.shape(stored)[0]
        stored = tf.reshape(stored, wanted)
    else:
        stored = tf.reshape(stored, example_shape)
    return tf.ensure_shape(stored, (*batch_shape, *spec.shape))
