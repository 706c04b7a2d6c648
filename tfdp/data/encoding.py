"""Examples to the bytes of one record and back: `tf.train.Example` protocol buffers.

The round trip keeps every dtype and shape. Reading works on one record or on a whole
batch of them at once; the second is several times faster, because each feature is
then parsed by one operation per batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.data.features import FeatureSpec

# What `tf.io.decode_raw` cannot name is read as the type of the same width.
_BITCAST_FROM = {"uint32": tf.int32, "uint64": tf.int64}


def _shape_name(name: str) -> str:
    return f"{name}/shape"


def encode_example(
    arrays: Mapping[str, np.ndarray], features: Mapping[str, FeatureSpec]
) -> bytes:
    """The record of one example.

    Args:
      arrays: Name to array, as `check_example` returns them.
      features: What every example of the set holds.
    """
    fields = {}
    for name, spec in features.items():
        fields[name] = _encode_feature(arrays[name], spec)
        if spec.stores_shape:
            shape = tf.train.Int64List(value=arrays[name].shape)
            fields[_shape_name(name)] = tf.train.Feature(int64_list=shape)
    example = tf.train.Example(features=tf.train.Features(feature=fields))
    # Equal examples must give equal bytes, whatever the order of a map's fields.
    return example.SerializeToString(deterministic=True)


def _encode_feature(array: np.ndarray, spec: FeatureSpec) -> tf.train.Feature:
    if spec.encoding == "bytes_list":
        texts = tf.train.BytesList(value=array.reshape(-1).tolist())
        return tf.train.Feature(bytes_list=texts)
    if spec.encoding == "float_list":
        floats = tf.train.FloatList(value=array.reshape(-1))
        return tf.train.Feature(float_list=floats)
    if spec.encoding == "int64_list":
        # A list of int64 refuses Python's True.
        values = array.astype(np.int64).reshape(-1).tolist()
        integers = tf.train.Int64List(value=values)
        return tf.train.Feature(int64_list=integers)
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    raw = tf.train.BytesList(value=[little_endian.tobytes()])
    return tf.train.Feature(bytes_list=raw)


def decode_examples(
    records: tf.Tensor, features: Mapping[str, FeatureSpec]
) -> dict[str, tf.Tensor]:
    """The features of one record, or of a batch of records.

    Args:
      records: A string scalar, or string [B] when no feature's length varies.
      features: What every example of the set holds.

    Returns:
      Name to tensor: the feature's shape, after B for a batch.
    """
    schema: dict[str, tf.io.FixedLenFeature | tf.io.FixedLenSequenceFeature] = {}
    for name, spec in features.items():
        schema[name] = _schema_of(spec)
        if spec.stores_shape:
            rank = len(spec.shape)
            schema[_shape_name(name)] = tf.io.FixedLenFeature((rank,), tf.int64)
    parsed = tf.io.parse_example(records, schema)
    return {
        name: _restore(
            parsed[name], spec, tuple(records.shape), parsed.get(_shape_name(name))
        )
        for name, spec in features.items()
    }


def _schema_of(
    spec: FeatureSpec,
) -> tf.io.FixedLenFeature | tf.io.FixedLenSequenceFeature:
    if spec.encoding == "raw_bytes":
        return tf.io.FixedLenFeature((), tf.string)
    stored = {
        "bytes_list": tf.string,
        "float_list": tf.float32,
        "int64_list": tf.int64,
    }[spec.encoding]
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
            # A batch of unknown size of an empty feature: -1 would be any number.
            wanted[0] = tf.shape(stored)[0]
        stored = tf.reshape(stored, wanted)
    else:
        stored = tf.reshape(stored, example_shape)
    return tf.ensure_shape(stored, (*batch_shape, *spec.shape))
