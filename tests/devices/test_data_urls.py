"""Sets of files behind URLs, in the memory file system that TensorFlow has for tests.

Object stores (`gs://`) are reached by the same `tf.io.gfile` calls.
"""

import contextlib
import itertools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp import data
from tfdp.data.index import RecordIndex
from tfdp.data.places import RemotePath
from tfdp.errors import ConfigurationError, DataError

EXAMPLES, FILES = 40, 2
_numbers = itertools.count()


@pytest.fixture
def url():
    return f"ram://bucket/set-{next(_numbers)}"


def write(url, **options):
    values = np.arange(EXAMPLES, dtype=np.float32)
    return data.write_tfrecords({"x": values}, url, num_shards=FILES, **options)


def values_in(source):
    batches = data.read_tfrecords(source, 16, shuffle=False)
    return [x for batch in batches for x in batch["x"].numpy()]


def test_a_set_is_written_and_read(url):
    index = write(url)
    assert sorted(tf.io.gfile.listdir(url)) == [
        "train-00000-of-00002.tfrecord",
        "train-00001-of-00002.tfrecord",
        "train.index.json",
    ]
    assert RecordIndex.load(f"{url}/train.index.json") == index
    for source in (index, url, f"{url}/", f"{url}/train", f"{url}/train-*.tfrecord"):
        assert sorted(values_in(source)) == list(range(EXAMPLES))
    # Example i is in file i modulo 2.
    assert set(values_in(f"{url}/train-00001-*")) == set(range(1, EXAMPLES, 2))
    assert data.verify_tfrecords(url) == index


def test_compressed_files_and_a_second_set(url):
    write(url, compression="GZIP")
    write(url, name="test")
    assert len(values_in(f"{url}/train")) == EXAMPLES
    with pytest.raises(ConfigurationError, match="test, train"):
        data.read_tfrecords(url, 16)


def test_a_new_set_takes_the_place_of_the_old_one(url):
    write(url)
    data.write_tfrecords({"x": np.arange(3)}, url, num_shards=3)
    assert values_in(url) == [0, 1, 2]
    assert len(tf.io.gfile.listdir(url)) == 4


def test_a_run_that_is_cut_short_leaves_the_older_set(url):
    write(url)

    def fails():
        yield {"x": np.float32(1)}
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        data.write_tfrecords(fails(), url, num_shards=1)
    assert len(tf.io.gfile.listdir(url)) == 1 + FILES
    assert sorted(values_in(url)) == list(range(EXAMPLES))


def test_a_damaged_record_is_named(url):
    index = write(url)
    path = str(index.file_path(index.files[1]))
    with tf.io.gfile.GFile(path, "rb") as file:
        content = bytearray(file.read())
    # Records are of one length: this byte is in the payload of record 7.
    record_bytes = len(content) // (EXAMPLES // FILES)
    content[7 * record_bytes + 14] ^= 0xFF
    tf.io.gfile.remove(path)  # writing to a file in memory adds to it
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(bytes(content))
    named = rf"{path}, record 7 \(counted from 0\): corrupted record at byte"
    with pytest.raises(DataError, match=named):
        values_in(url)
    with pytest.raises(DataError, match=named):
        data.verify_tfrecords(url)


def test_what_is_missing_is_named(url):
    index = write(url)
    path = str(index.file_path(index.files[0]))
    tf.io.gfile.remove(path)
    with pytest.raises(DataError, match=f"{path} is missing"):
        data.read_tfrecords(url, 16)
    with pytest.raises(DataError, match=f"{path} is missing"):
        data.verify_tfrecords(url)
    with pytest.raises(DataError, match=r"no file matches .*valid-\*.*: train"):
        data.read_tfrecords(f"{url}/valid-*", 16)
    with pytest.raises(DataError, match="there is no directory ram://nothing"):
        data.read_tfrecords("ram://nothing/train-*", 16)
    tf.io.gfile.remove(f"{url}/train.index.json")
    with pytest.raises(DataError, match=r"no \*.index.json in"):
        data.read_tfrecords(url, 16)
    with pytest.raises(DataError, match="no index"):
        RecordIndex.load(f"{url}/train.index.json")


def test_files_of_another_tool_get_an_index(url):
    tf.io.gfile.makedirs(url)
    for number in range(2):
        with tf.io.TFRecordWriter(f"{url}/foreign-{number}") as writer:
            feature = {
                "n": tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
            }
            features = tf.train.Features(feature=feature)
            writer.write(tf.train.Example(features=features).SerializeToString())
    spec = {"n": data.FeatureSpec((), "int64")}
    data.index_tfrecords(f"{url}/foreign-*", spec, name="foreign")
    [batch] = data.read_tfrecords(url, 2, shuffle=False)
    np.testing.assert_array_equal(batch["n"], [0, 1])
    with pytest.raises(DataError, match="no file matches"):
        data.index_tfrecords("ram://nowhere/*", spec, name="foreign")


def test_a_url_that_cannot_be_used_is_explained():
    with pytest.raises(ConfigurationError, match="allowed are .*gs://"):
        data.read_tfrecords("abc://bucket/train", 16)
    with pytest.raises(ConfigurationError, match="give it as text"):
        write(Path("gs://bucket/train"))
    denied = tf.errors.PermissionDeniedError(None, None, "no such right")
    with (
        mock.patch.object(tf.io.gfile, "isdir", side_effect=denied),
        pytest.raises(DataError, match="ram://x cannot be used .*no such right"),
    ):
        data.read_tfrecords("ram://x", 16)


def test_folders_of_object_stores_end_with_a_slash():
    with (
        mock.patch.object(tf.io.gfile, "isdir", return_value=True),
        mock.patch.object(tf.io.gfile, "listdir", return_value=["a/", "b", "ab"]),
    ):
        found = list(RemotePath("gs://bucket/folder/").glob("a*"))
    assert list(map(str, found)) == ["gs://bucket/folder/a", "gs://bucket/folder/ab"]


def test_prepared_datasets_may_lie_behind_a_url():
    tfds = pytest.importorskip("tensorflow_datasets")
    directory = "gs://bucket/mnist/3.0.1"
    with (
        mock.patch.object(tf.io.gfile, "isdir", lambda url: url == directory),
        mock.patch.object(tf.io.gfile, "exists", lambda url: "info.json" in url),
        mock.patch.object(
            tfds, "builder_from_directory", side_effect=StopIteration
        ) as build,
        pytest.raises(StopIteration),
    ):
        data.from_tfds(directory, "train", 16)
    build.assert_called_once_with(directory)


@pytest.mark.parametrize(
    "use",
    [
        lambda path: data.read_tfrecords(path, 4),
        lambda path: data.index_webdataset(path, name="a"),
        lambda path: tfdp.callbacks.Checkpoint(path),
    ],
)
def test_a_path_with_nul_is_refused(use):
    with pytest.raises(ConfigurationError, match=r"NUL.*'a\\x00b'"):
        use("a\0b")
