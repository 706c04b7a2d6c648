"""Writing TFRecords: exact round trips, and all or nothing on the disk."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdp import data
from tfdp.errors import ConfigurationError, DataError

_RNG = np.random.default_rng(0)
_DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    ml_dtypes.bfloat16,
    ">i4",
]


def _random_array(shape, dtype):
    return _RNG.normal(size=shape, scale=50).astype(dtype)


def _read_all(index, **options):
    batches = data.read_tfrecords(index, 4, shuffle=False, **options)
    return list(batches)


def _in_written_order(values, num_shards):
    """Undoes the round robin over files: the reader takes 16 in a row from each."""
    per_file = [
        np.arange(len(values))[shard::num_shards] for shard in range(num_shards)
    ]
    order = np.concatenate(per_file)
    restored = [None] * len(values)
    for position, value in zip(order, values, strict=True):
        restored[position] = value
    return restored


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)], ids=str)
def test_a_round_trip_is_exact_for_every_dtype(tmp_path, shape):
    # All dtypes in one set: a test of each would spend its time on setting up.
    arrays = {str(dtype): _random_array((10, *shape), dtype) for dtype in _DTYPES}
    index = data.write_tfrecords(arrays, tmp_path, num_shards=3)
    batches = _read_all(index)
    for name, array in arrays.items():
        parts = [batch[name] for batch in batches]
        read = _in_written_order(np.concatenate([part.numpy() for part in parts]), 3)
        np.testing.assert_array_equal(np.stack(read), array, err_msg=name)
        assert {part.dtype for part in parts} == {tf.as_dtype(array.dtype)}, name
        assert {tuple(part.shape[1:]) for part in parts} == {shape}, name


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_compressed_set_is_smaller_and_reads_alike(tmp_path, compression):
    array = np.arange(2000) // 100
    plain = data.write_tfrecords({"x": array}, tmp_path, num_shards=1, name="plain")
    index = data.write_tfrecords(
        {"x": array}, tmp_path, num_shards=1, compression=compression
    )
    assert index.size_bytes < plain.size_bytes / 2
    read = np.concatenate([batch["x"].numpy() for batch in _read_all(index)])
    np.testing.assert_array_equal(read, array)


def test_special_floats_survive(tmp_path):
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    index = data.write_tfrecords({"x": array}, tmp_path, num_shards=1)
    read = np.concatenate([batch["x"].numpy() for batch in _read_all(index)])
    assert read.tobytes() == array.tobytes()


def test_bytes_and_text_survive(tmp_path):
    texts = [b"", b"a\0", "ü".encode(), b"\xff\x00"]
    index = data.write_tfrecords({"x": texts}, tmp_path, num_shards=1)
    (batch,) = _read_all(index)
    assert batch["x"].numpy().tolist() == texts


def test_a_length_may_vary(tmp_path):
    rows = [np.arange(n, dtype=np.int32) for n in (0, 3, 1, 5)]
    index = data.write_tfrecords(
        {"x": rows, "label": np.arange(4)},
        tmp_path,
        num_shards=1,
        features={"x": data.FeatureSpec((None,), "int32")},
    )
    (batch,) = _read_all(index)
    assert isinstance(batch["x"], tf.RaggedTensor)
    assert batch["x"].to_list() == [row.tolist() for row in rows]
    assert batch["label"].numpy().tolist() == [0, 1, 2, 3]
    (padded,) = _read_all(index, variable_length="pad")
    np.testing.assert_array_equal(padded["x"], batch["x"].to_tensor())


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
def test_two_lengths_may_vary(tmp_path, dtype):
    images = [_random_array(shape, dtype) for shape in [(2, 3, 1), (4, 1, 1)]]
    index = data.write_tfrecords(
        {"image": images},
        tmp_path,
        num_shards=1,
        features={"image": data.FeatureSpec((None, None, 1), dtype)},
    )
    (batch,) = _read_all(index)
    for row, image in zip(batch["image"], images, strict=True):
        np.testing.assert_array_equal(row.to_tensor(), image)
    (padded,) = _read_all(index, variable_length="pad")
    assert padded["image"].shape == (2, 4, 3, 1)


@pytest.mark.parametrize(
    "examples",
    [
        {"image": np.arange(12).reshape(6, 2), "label": np.arange(6)},
        (np.arange(12).reshape(6, 2), np.arange(6)),
        [{"image": np.array([2 * i, 2 * i + 1]), "label": i} for i in range(6)],
        ({"image": np.array([2 * i, 2 * i + 1]), "label": i} for i in range(6)),
        tf.data.Dataset.from_tensor_slices(
            {"image": np.arange(12).reshape(6, 2), "label": np.arange(6)}
        ),
        tf.data.Dataset.from_tensor_slices((np.arange(12).reshape(6, 2), np.arange(6))),
    ],
    ids=["arrays", "tuple", "list", "generator", "dataset", "dataset of tuples"],
)
def test_every_source_gives_the_same_files(tmp_path, examples):
    index = data.write_tfrecords(
        examples, tmp_path, num_shards=2, feature_names=("image", "label")
    )
    assert [file.examples for file in index.files] == [3, 3]
    assert index.features["image"] == data.FeatureSpec((2,), "int64")
    batches = _read_all(index, as_supervised=("image", "label"))
    labels = np.concatenate([label.numpy() for _, label in batches])
    assert labels.tolist() == [0, 2, 4, 1, 3, 5]
    images = np.concatenate([image.numpy() for image, _ in batches])
    np.testing.assert_array_equal(images[:, 0], 2 * labels)


def test_a_dataset_declares_its_varying_lengths(tmp_path):
    rows = tf.ragged.constant([[1, 2], [3], [4, 5, 6]], dtype=tf.int64)
    dataset = tf.data.Dataset.from_tensor_slices({"x": rows})
    dataset = dataset.map(lambda parts: {"x": parts["x"] + 1})
    index = data.write_tfrecords(dataset, tmp_path, num_shards=1)
    assert index.features["x"].shape == (None,)
    (batch,) = _read_all(index)
    assert batch["x"].to_list() == [[2, 3], [4], [5, 6, 7]]


def test_the_index_holds_counts_and_sizes(tmp_path):
    index = data.write_tfrecords({"x": np.arange(11)}, tmp_path, num_shards=4)
    assert [file.examples for file in index.files] == [3, 3, 3, 2]
    assert index.files[1].name == "train-00001-of-00004.tfrecord"
    for file in index.files:
        assert (tmp_path / file.name).stat().st_size == file.size_bytes
    assert data.RecordIndex.load(index.path) == index
    with pytest.raises(dataclasses.FrozenInstanceError):
        index.name = "other"


def test_a_failure_leaves_nothing_behind(tmp_path):
    examples = [{"x": np.zeros(3)}] * 5 + [{"x": np.zeros(4)}]
    with pytest.raises(DataError, match=r"example 5: feature 'x' .*\(4,\)"):
        data.write_tfrecords(examples, tmp_path, num_shards=2)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_older_set_as_it_was(tmp_path):
    data.write_tfrecords({"x": np.arange(9)}, tmp_path, num_shards=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted():
        yield {"x": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.write_tfrecords(interrupted(), tmp_path, num_shards=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_set_cut_short_while_it_is_published_has_no_index(tmp_path, monkeypatch):
    data.write_tfrecords({"x": np.arange(9)}, tmp_path, num_shards=2)

    def fail(self):
        raise OSError("disk full")

    monkeypatch.setattr(data.RecordIndex, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        data.write_tfrecords({"x": np.arange(4)}, tmp_path, num_shards=2)
    with pytest.raises(DataError, match="never finished"):
        data.read_tfrecords(tmp_path, 2)


def test_a_new_run_replaces_all_of_the_older_set(tmp_path):
    data.write_tfrecords({"x": np.arange(9)}, tmp_path, num_shards=4)
    data.write_tfrecords({"x": np.arange(9)}, tmp_path, num_shards=1, name="test")
    index = data.write_tfrecords({"x": np.arange(4)}, tmp_path, num_shards=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "test-00000-of-00001.tfrecord",
        "test.index.json",
        "train-00000-of-00002.tfrecord",
        "train-00001-of-00002.tfrecord",
        "train.index.json",
    ]
    assert data.read_tfrecords(tmp_path / "train", 4).cardinality() == 1
    assert index.examples == 4


@pytest.mark.parametrize(
    ("examples", "options", "error", "message"),
    [
        ({"x": np.arange(4)}, {"num_shards": 0}, ConfigurationError, "num_shards"),
        ({"x": np.arange(4)}, {"num_shards": 1.5}, ConfigurationError, "num_shards"),
        ({"x": np.arange(4)}, {"name": "a/b"}, ConfigurationError, "name"),
        ({"x": np.arange(4)}, {"name": ""}, ConfigurationError, "name"),
        ({"x": np.arange(4)}, {"compression": "zip"}, ConfigurationError, "GZIP"),
        ({"x": np.arange(4)}, {"num_shards": 5}, DataError, "4 examples .*5 files"),
        ({"x": np.arange(4), "y": np.arange(3)}, {}, DataError, "'y': 3"),
        ((np.arange(4), np.arange(4)), {}, ConfigurationError, "feature_names"),
        ([], {}, DataError, "no examples"),
        ({}, {}, DataError, "no examples"),
        (7, {}, ConfigurationError, "int"),
        ([1, 2], {}, DataError, "example 0 is a int"),
        ([{"x": -1e39}], {}, DataError, "'x': a number -1e[+]39 is too large"),
        ([{"x": [-1, 2**63 + 1]}], {}, DataError, "9223372036854775809 would be"),
        (tf.data.Dataset.range(3), {}, DataError, "allowed are dicts"),
    ],
)
def test_bad_input_is_refused(tmp_path, examples, options, error, message):
    with pytest.raises(error, match=message):
        data.write_tfrecords(examples, tmp_path, **{"num_shards": 1, **options})
    assert list(tmp_path.iterdir()) == []
