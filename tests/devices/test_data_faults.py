"""Damaged files: the error names the file and the number of the record.

A record on the disk is 8 bytes of length, 4 of its checksum, the payload, and 4 of
the payload's checksum. With one int64 feature and equal payloads the place of every
record is known.
"""

import dataclasses
import gzip
import json
import re
import struct

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import stock_strategy
from tfdp import data
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import temporary_name

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
    batches = data.read_tfrecords(index, 8)
    _flip_byte(_second_file(index), number * _record_bytes(index) + offset)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(batches)
    assert "DataError" in str(caught.value)
    assert re.search(_names_record(index, number), str(caught.value))


def test_a_corrupt_record_is_named_in_fit(index):
    strategy = stock_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input(()), keras.layers.Reshape((1,))])
        model.compile(optimizer=None, loss="mse")
    batches = data.read_tfrecords(index, 8, as_supervised=("x", "x"))
    _flip_byte(_second_file(index), 7 * _record_bytes(index) + 14)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.evaluate(batches, verbose=0)
    assert re.search(_names_record(index, 7), str(caught.value))


def test_a_corrupt_record_is_named_when_examples_are_transformed(index):
    batches = data.read_tfrecords(index, 8, transform=lambda parts: parts["x"])
    _flip_byte(_second_file(index), 7 * _record_bytes(index) + 14)
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


def _write_records(path, *records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record.SerializeToString())


def _words(*numbers):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=numbers))


WORDS = data.FeatureSpec((None,), "int64")


def test_a_feature_that_no_record_holds_is_not_indexed(tmp_path):
    records = [
        tf.train.Features(feature={"words": _words(*range(number)), "x": _words(1)})
        for number in range(5)
    ]
    examples = [tf.train.Example(features=features) for features in records]
    _write_records(tmp_path / "a-0", *examples[:3])
    _write_records(tmp_path / "a-1", *examples[3:])
    found = r"no record of .*a-\* holds 'wrods'; records hold 'words', 'x'\.$"
    with pytest.raises(DataError, match=found):
        data.index_tfrecords(
            tmp_path / "a-*", {"wrods": WORDS, "words": WORDS}, name="a"
        )
    assert not list(tmp_path.glob("*.json"))


def test_a_feature_that_some_record_holds_is_indexed(tmp_path):
    """Whether with values or not, and in the last record only."""
    empty = tf.train.Example()
    for name, held in (("values", _words(4, 5)), ("none", _words())):
        last = tf.train.Example(features=tf.train.Features(feature={"words": held}))
        _write_records(tmp_path / f"{name}-0", empty, empty)
        _write_records(tmp_path / f"{name}-1", empty, last)
        index = data.index_tfrecords(
            tmp_path / f"{name}-*", {"words": WORDS}, name=name
        )
        data.verify_tfrecords(index)
        (batch,) = data.read_tfrecords(index, 4, shuffle=False)
        assert batch["words"].flat_values.numpy().tolist() == list(
            held.int64_list.value
        )


def test_lists_of_sequence_examples_are_not_indexed(tmp_path):
    frames = tf.train.FeatureLists(
        feature_list={"frames": tf.train.FeatureList(feature=[_words(1), _words(2)])}
    )
    context = tf.train.Features(feature={"label": _words(3)})
    record = tf.train.SequenceExample(context=context, feature_lists=frames)
    _write_records(tmp_path / "a-0", record)
    found = "holds 'frames'; records hold 'label'.* SequenceExamples, .*'frames'.*write"
    with pytest.raises(DataError, match=found):
        data.index_tfrecords(tmp_path / "a-*", {"frames": WORDS}, name="a")
    # Their context can be read.
    data.index_tfrecords(tmp_path / "a-*", {"label": WORDS}, name="a")


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


def _swap(first, second):
    contents = first.read_bytes(), second.read_bytes()
    for path, content in zip((second, first), contents, strict=True):
        path.write_bytes(content)


def test_files_in_each_others_place_are_refused(index):
    """Of one size, with as many records, all of them sound."""
    batches = data.read_tfrecords(index, 8)
    first, second = (index.file_path(file) for file in index.files)
    assert first.stat().st_size == second.stat().st_size
    _swap(first, second)
    for attempt in (
        lambda: data.read_tfrecords(index, 8),
        lambda: data.verify_tfrecords(index),
    ):
        with pytest.raises(DataError, match=f"{first} holds 20 .*another file"):
            attempt()
    # Opened before they were swapped: seen before the first record is handed on.
    with pytest.raises(tf.errors.InvalidArgumentError, match="another file"):
        next(iter(batches))


def test_a_file_of_another_write_is_refused(tmp_path, compressed_index):
    """Of the same size, and its first and last 4 KiB are the same."""
    compression = compressed_index.compression
    values = np.zeros(4000, np.float32)
    one = data.write_tfrecords(
        {"x": values}, tmp_path / "one", num_shards=1, compression=compression
    )
    values[2000] = 1
    other = data.write_tfrecords(
        {"x": values}, tmp_path / "other", num_shards=1, compression=compression
    )
    path = one.file_path(one.files[0])
    path.write_bytes(other.file_path(other.files[0]).read_bytes())
    with pytest.raises((DataError, tf.errors.InvalidArgumentError)) as caught:
        list(data.read_tfrecords(one, 8))
    assert "another set" in str(caught.value)


def test_records_in_each_others_place_are_refused(index):
    path, size = _second_file(index), _record_bytes(index)
    content = path.read_bytes()
    records = [content[i * size : (i + 1) * size] for i in range(_PER_FILE)]
    records[8], records[9] = records[9], records[8]
    path.write_bytes(b"".join(records))
    with pytest.raises(DataError, match="not in the order"):
        data.read_tfrecords(index, 8)


@pytest.mark.parametrize("length", [2**34, 2**40, 2**60, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_is_refused(compressed_index, length):
    """TensorFlow takes memory for it; where there is too little the process ends."""
    index = compressed_index
    opener = gzip.open if index.compression else open
    with opener(_second_file(index), "rb") as file:
        content = bytearray(file.read())
    size = len(content) // _PER_FILE
    header = struct.pack("<Q", length)
    content[7 * size : 7 * size + 12] = header + struct.pack(
        "<I", masked_crc32c(header)
    )
    with opener(_second_file(index), "wb") as file:
        file.write(content)
    for attempt in (
        lambda: data.read_tfrecords(index, 8),
        lambda: data.verify_tfrecords(index),
        lambda: data.index_tfrecords(
            index.directory / "*.tfrecord",
            index.features,
            name="again",
            compression=index.compression,
        ),
    ):
        with pytest.raises(DataError, match=_names_record(index, 7) + ": truncated"):
            attempt()


def masked_crc32c(content):
    """Bit by bit, as RFC 3720 defines it; then TFRecord's mask."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_an_index_without_checksums_is_read_as_it_always_was(index):
    files = tuple(
        data.RecordFile(file.name, file.examples, file.size_bytes)
        for file in index.files
    )
    old = dataclasses.replace(index, files=files)
    assert len(list(data.read_tfrecords(old, 8))) == 5
    batches = data.read_tfrecords(old, 8)
    _cut(_second_file(index), 7 * _record_bytes(index))
    with pytest.raises(tf.errors.InvalidArgumentError, match="record 7 "):
        list(batches)
    _write(index.directory, "")
    # Made anew, it has them.
    pattern = index.directory / "train-*"
    new = data.index_tfrecords(pattern, index.features, name="train")
    assert new == index == data.verify_tfrecords(index.path)


def test_writing_deletes_its_own_files_only(tmp_path):
    outside = tmp_path / "outside.tfrecord"
    outside.write_text("mine")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for names in (["../outside.tfrecord", str(outside)], ["notes.txt"]):
        content = {
            "format": "tfdp.tfrecords/1",
            "name": "train",
            "examples": 0,
            "compression": "",
            "features": {"x": {"shape": [], "dtype": "float32"}},
            "files": [{"name": n, "examples": 0, "size_bytes": 4} for n in names],
        }
        (folder / "train.index.json").write_text(json.dumps(content))
        (folder / leftover_of_another_start()).write_text("half")
        _write(folder, "")
        assert outside.read_text() == (folder / "notes.txt").read_text() == "mine"
        assert len(list(folder.iterdir())) == 4
    # A smaller set of the same name: the files of the larger one go.
    data.write_tfrecords({"x": np.arange(3.0)}, folder, num_shards=1)
    assert len(list(folder.iterdir())) == 3


def leftover_of_another_start():
    """What an earlier process with this process' number left."""
    start, place, pid, began, *rest = temporary_name("train.tfrecord").split("-")
    return "-".join([start, place, pid, str(int(began) - 1), *rest])


def test_names_that_no_file_can_have_are_refused(tmp_path):
    for name in ("n" * 232, "n" * 10_000, "a/b", "..", "a\0b", "a:b"):
        with pytest.raises(ConfigurationError, match="name is"):
            data.write_tfrecords({"x": np.arange(3)}, tmp_path, num_shards=1, name=name)
    data.write_tfrecords({"x": np.arange(3)}, tmp_path, num_shards=1, name="n" * 231)
    assert len(list(data.read_tfrecords(tmp_path, 3))) == 1
    with pytest.raises(ConfigurationError, match="cannot be made"):
        data.write_tfrecords({"x": np.arange(3)}, tmp_path / ("n" * 300), num_shards=1)


def test_what_cannot_be_indexed_is_said(tmp_path, monkeypatch):
    label = {"label": data.FeatureSpec((), "int64")}
    for name, options in (("empty", None), ("packed", "GZIP")):
        path = str(tmp_path / f"{name}-0.tfrecord")
        with tf.io.TFRecordWriter(path, options) as writer:
            if options:
                value = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
                features = tf.train.Features(feature={"label": value})
                writer.write(tf.train.Example(features=features).SerializeToString())
    for name, words in (("empty", "hold no records"), ("packed", "compression='GZIP'")):
        with pytest.raises(DataError, match=words):
            data.index_tfrecords(tmp_path / f"{name}-*.tfrecord", label, name=name)
    with pytest.raises(DataError, match="name existing files by one pattern"):
        data.index_tfrecords(tmp_path / "missing-*", label, name="x")
    with pytest.raises(ConfigurationError, match="by one path or pattern"):
        data.read_tfrecords([tmp_path / "packed-0.tfrecord"], 8)
    for features in ({"label": "int64"}, {1: label["label"]}, ["label"]):
        with pytest.raises(ConfigurationError, match="names with a FeatureSpec each"):
            data.index_tfrecords(tmp_path / "packed-*", features, name="x")
    shape = tf.TensorShape([2, None])
    assert data.FeatureSpec(shape, "int64").shape == (2, None)
    for shape in (None, 3, "ab"):
        with pytest.raises(ConfigurationError, match="shape of a feature is a tuple"):
            data.FeatureSpec(shape, "int64")
    with pytest.raises(DataError, match="names are texts"):
        data.write_tfrecords({1: np.arange(3)}, tmp_path, num_shards=1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no [*].index.json in"):
        data.read_tfrecords("", 4)
