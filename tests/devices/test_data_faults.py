"""Damaged files: the error names the file and the number of the record.

A record on the disk is 8 bytes of length, 4 of its checksum, the payload, and 4 of
the payload's checksum. With one int64 feature and equal payloads the place of every
record is known.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp import data
from tfdp.errors import ConfigurationError, DataError

_EXAMPLES = 40
_PER_FILE = 20


@pytest.fixture(params=["", "GZIP"])
def compressed_index(tmp_path, request):
    return _write(tmp_path, request.param)


@pytest.fixture
def index(tmp_path):
    return _write(tmp_path, "")


def _write(directory, compression):
    values = np.arange(_EXAMPLES, dtype=np.float32)
    return data.write_tfrecords(
        {"x": values}, directory, num_shards=2, compression=compression
    )


def _second_file(index):
    return index.file_path(index.files[1])


def _record_bytes(index):
    return index.files[1].size_bytes // _PER_FILE


def _flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def _cut(path, size_bytes):
    path.write_bytes(path.read_bytes()[:size_bytes])


def _names_record(index, number):
    return re.escape(f"{_second_file(index)}, record {number} (counted from 0)")


@pytest.mark.parametrize("number", [0, 7, _PER_FILE - 1])
@pytest.mark.parametrize("part", ["length", "payload"])
def test_a_corrupt_record_is_named_while_iterating(index, number, part):
    offset = {"length": 0, "payload": 14}[part]
    _flip_byte(_second_file(index), number * _record_bytes(index) + offset)
    batches = data.read_tfrecords(index, 8)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(batches)
    assert "DataError" in str(caught.value)
    assert re.search(_names_record(index, number), str(caught.value))


def test_a_corrupt_record_is_named_in_fit(index):
    _flip_byte(_second_file(index), 7 * _record_bytes(index) + 14)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input(()), keras.layers.Reshape((1,))])
        model.compile(optimizer=None, loss="mse")
    batches = data.read_tfrecords(index, 8, as_supervised=("x", "x"))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.evaluate(batches, verbose=0)
    assert re.search(_names_record(index, 7), str(caught.value))


def test_a_corrupt_record_is_named_when_examples_are_transformed(index):
    _flip_byte(_second_file(index), 7 * _record_bytes(index) + 14)
    batches = data.read_tfrecords(index, 8, transform=lambda parts: parts["x"])
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(batches)
    assert re.search(_names_record(index, 7), str(caught.value))


@pytest.mark.parametrize("number", [0, 7, _PER_FILE - 1])
@pytest.mark.parametrize("extra_bytes", [0, 5, 14])
def test_a_cut_file_is_named_before_training(index, number, extra_bytes):
    # 0 extra bytes: cut between two records, which TensorFlow reads as a whole file.
    _cut(_second_file(index), number * _record_bytes(index) + extra_bytes)
    with pytest.raises(DataError, match=_names_record(index, number)):
        data.read_tfrecords(index, 8)


def test_a_file_cut_after_opening_is_named_while_iterating(index):
    batches = data.read_tfrecords(index, 8)
    _cut(_second_file(index), 7 * _record_bytes(index))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(batches)
    assert re.search(_names_record(index, 7), str(caught.value))


def test_a_file_deleted_after_opening_is_named_while_iterating(index):
    batches = data.read_tfrecords(index, 8)
    _second_file(index).unlink()
    with pytest.raises(tf.errors.InvalidArgumentError, match="is missing") as caught:
        list(batches)
    assert str(_second_file(index)) in str(caught.value)


def test_a_file_with_more_records_than_promised_is_refused(index):
    path = _second_file(index)
    path.write_bytes(path.read_bytes() + path.read_bytes()[: _record_bytes(index)])
    with pytest.raises(DataError, match="holds 21 records; the index promises 20"):
        data.read_tfrecords(index, 8)


def test_a_whole_file_of_another_set_is_refused(index, tmp_path):
    other = tmp_path / "other"
    data.write_tfrecords({"x": np.arange(20)}, other, num_shards=1)
    path = other / "train-00000-of-00001.tfrecord"
    _second_file(index).write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="belongs to another set"):
        data.read_tfrecords(index, 8)


def test_a_missing_file_is_named(compressed_index):
    _second_file(compressed_index).unlink()
    with pytest.raises(DataError, match=f"{_second_file(compressed_index)} is missing"):
        data.read_tfrecords(compressed_index, 8)


def test_verify_accepts_a_sound_set(compressed_index):
    assert data.verify_tfrecords(compressed_index.path) == compressed_index


def test_verify_names_every_bad_file(index):
    _flip_byte(_second_file(index), 7 * _record_bytes(index) + 14)
    _cut(index.file_path(index.files[0]), 3 * _record_bytes(index))
    with pytest.raises(DataError) as caught:
        data.verify_tfrecords(index)
    first, second = str(caught.value).splitlines()
    assert "train-00000-of-00002.tfrecord, record 3 " in first
    assert re.search(_names_record(index, 7), second)


def test_a_cut_compressed_file_is_named(tmp_path):
    index = _write(tmp_path, "GZIP")
    _cut(_second_file(index), index.files[1].size_bytes // 2)
    with pytest.raises(DataError, match=f"{_second_file(index)}, record "):
        data.read_tfrecords(index, 8)


def test_verify_names_a_record_that_is_no_example_of_the_set(index, tmp_path):
    sound = tf.data.TFRecordDataset(str(_second_file(index)))
    records = list(sound.as_numpy_iterator())
    other = tf.train.Example(
        features=tf.train.Features(
            feature={"y": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0]))}
        )
    )
    records[4] = other.SerializeToString()
    with tf.io.TFRecordWriter(str(_second_file(index))) as writer:
        for record in records:
            writer.write(record)
    with pytest.raises(DataError, match=_names_record(index, 4)):
        data.verify_tfrecords(index)


def _write_foreign(directory, count=6):
    for shard in range(2):
        with tf.io.TFRecordWriter(str(directory / f"other-{shard}.rec")) as writer:
            for number in range(shard, count, 2):
                texts = tf.train.BytesList(value=[b"image %d" % number])
                labels = tf.train.Int64List(value=[number])
                feature = {
                    "image/encoded": tf.train.Feature(bytes_list=texts),
                    "label": tf.train.Feature(int64_list=labels),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    return {
        "image/encoded": data.FeatureSpec((), "string"),
        "label": data.FeatureSpec((), "int32", "int64_list"),
    }


def test_files_of_another_tool_are_read_once_they_are_indexed(tmp_path):
    features = _write_foreign(tmp_path)
    pattern = tmp_path / "other-*"
    with pytest.raises(DataError, match="index_tfrecords"):
        data.read_tfrecords(pattern, 2)
    index = data.index_tfrecords(pattern, features, name="other")
    assert [file.examples for file in index.files] == [3, 3]
    # A second time: the index is no data file, though the pattern matches it.
    assert data.index_tfrecords(pattern, features, name="other") == index
    batches = data.read_tfrecords(pattern, 2, as_supervised=("image/encoded", "label"))
    pairs = [
        (image, int(label))
        for batch in batches
        for image, label in zip(*(part.numpy() for part in batch), strict=True)
    ]
    assert sorted(pairs) == [(b"image %d" % number, number) for number in range(6)]


def test_a_damaged_file_is_not_indexed(tmp_path):
    features = _write_foreign(tmp_path)
    path = tmp_path / "other-1.rec"
    _flip_byte(path, path.stat().st_size - 10)
    with pytest.raises(DataError, match=f"{path}, record 2 "):
        data.index_tfrecords(tmp_path / "other-*", features, name="other")
    assert not list(tmp_path.glob("*.json"))


def test_files_that_hold_something_else_are_not_indexed(tmp_path):
    _write_foreign(tmp_path)
    features = {"absent": data.FeatureSpec((), "int64")}
    with pytest.raises(DataError, match=r"record 0 .*absent"):
        data.index_tfrecords(tmp_path / "other-*", features, name="other")


def test_bad_arguments_of_the_index_are_refused(tmp_path):
    features = _write_foreign(tmp_path)
    with pytest.raises(DataError, match="no file matches"):
        data.index_tfrecords(tmp_path / "absent-*", features, name="other")
    with pytest.raises(ConfigurationError, match="features"):
        data.index_tfrecords(tmp_path / "other-*", {}, name="other")
    with pytest.raises(ConfigurationError, match="compression"):
        data.index_tfrecords(
            tmp_path / "other-*", features, name="other", compression="x"
        )
