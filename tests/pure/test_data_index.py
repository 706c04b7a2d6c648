"""The index file: what it says comes back, and what a source of data means."""

import json
import subprocess
import sys

import pytest

from tests.support.workers import LONGEST_SECONDS
from tfdp.data.features import FeatureSpec
from tfdp.data.index import RecordFile, RecordIndex, find_index
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import temporary_name
from tfdp.files.checked_json import with_checksum

_FEATURES = {
    "image": FeatureSpec((8, 8), "uint8"),
    "tokens": FeatureSpec((None,), "int64"),
}


def _make_set(directory, name, counts=(3, 2)):
    files = []
    for shard, count in enumerate(counts):
        path = directory / f"{name}-{shard:05d}-of-{len(counts):05d}.tfrecord"
        path.write_bytes(b"x" * count)
        files.append(RecordFile(path.name, count, count))
    index = RecordIndex(directory, name, _FEATURES, tuple(files), "GZIP")
    index.save()
    return index


def test_an_index_comes_back_as_it_was_saved(tmp_path):
    index = _make_set(tmp_path, "train")
    assert RecordIndex.load(index.path) == index
    assert (index.examples, index.size_bytes) == (5, 5)
    assert not list(tmp_path.glob(".*"))


def test_every_way_to_name_a_set_finds_it(tmp_path):
    index = _make_set(tmp_path, "train")
    for source in (
        index,
        tmp_path,
        str(tmp_path),
        index.path,
        tmp_path / "train",
        tmp_path / "train-*.tfrecord",
        tmp_path / "train-*",
        tmp_path / "*",
    ):
        assert find_index(source) == index


def test_a_pattern_chooses_some_of_the_files(tmp_path):
    index = _make_set(tmp_path, "train", (3, 2, 1))
    chosen = find_index(tmp_path / "train-0000[02]-*")
    assert chosen.files == (index.files[0], index.files[2])
    assert chosen.examples == 4


def test_two_sets_in_a_directory_must_be_told_apart(tmp_path):
    train, test = _make_set(tmp_path, "train"), _make_set(tmp_path, "test")
    assert find_index(tmp_path / "train*") == train
    assert find_index(tmp_path / "test") == test
    for source in (tmp_path, tmp_path / "t*"):
        with pytest.raises(ConfigurationError, match="test, train"):
            find_index(source)


def test_a_missing_file_is_still_part_of_the_set(tmp_path):
    index = _make_set(tmp_path, "train")
    index.file_path(index.files[1]).unlink()
    assert find_index(tmp_path / "train-*") == index


def test_no_match_says_what_is_there(tmp_path):
    with pytest.raises(DataError, match="there is no directory"):
        find_index(tmp_path / "absent" / "train-*")
    _make_set(tmp_path, "train")
    with pytest.raises(DataError, match=r"no file matches .*valid-\*.*: train"):
        find_index(tmp_path / "valid-*")


def test_files_without_an_index_are_refused(tmp_path):
    index = _make_set(tmp_path, "train")
    index.path.unlink()
    with pytest.raises(DataError, match=r"2 of the files .*never finished"):
        find_index(tmp_path / "train-*")
    with pytest.raises(DataError, match="never finished"):
        find_index(tmp_path)
    with pytest.raises(DataError, match="no index .*train.index.json"):
        find_index(index.path)


def test_a_file_that_the_index_does_not_know_is_refused(tmp_path):
    _make_set(tmp_path, "train")
    (tmp_path / "train-00007-of-00008.tfrecord").write_bytes(b"x")
    with pytest.raises(DataError, match="train-00007-of-00008"):
        find_index(tmp_path / "train-*")


def first(content):
    return content["files"][0]


def same_name(content):
    content["files"][0]["name"] = content["files"][1]["name"]


def image(content):
    return content["features"]["image"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.pop("files"), "files"),
        (lambda content: content.update(format="tfdp.tfrecords/9"), "tfrecords/9"),
        (lambda content: content.update(examples=6), "promises 6 .* add up to 5"),
        (lambda content: content["files"][0].pop("examples"), "examples"),
        (lambda content: content["features"]["image"].update(dtype="x"), "dtype"),
        (lambda content: content.update(features=None), "AttributeError"),
        (lambda content: content.update(files=7), "TypeError"),
        (lambda content: content.update(compression="LZ4"), "compression is"),
        (lambda content: content.update(compression=[]), "compression is"),
        (lambda content: content.update(name="../train"), "no plain names"),
        (lambda content: content.update(name="n" * 300), "no plain names"),
        (lambda content: content.update(name=5), "no plain names"),
        *(
            (lambda content, name=name: first(content).update(name=name), "no plain")
            for name in ("../other", "/etc/passwd", "..", "a\0b", "\ud800", 7, [])
        ),
        (lambda content: content["files"].reverse() or same_name(content), "no plain"),
        *(
            (lambda content, size=size: first(content).update(size_bytes=size), "sizes")
            for size in (-1, True, "3", 3.0, 10**30, None)
        ),
        (lambda content: first(content).update(examples=10**30), "sizes"),
        (lambda content: first(content).update(examples=10**18), "cannot hold"),
        (lambda content: first(content).update(records_digest=5), "digests"),
        (lambda content: image(content).update(shape=[10**30]), "shape"),
        (lambda content: image(content).update(shape=[2**40]), "no record can hold"),
        (lambda content: image(content).update(shape=[2.5]), "shape"),
        (lambda content: image(content).update(shape=5), "a tuple of lengths"),
        (lambda content: image(content).update(encoding=["x"]), "encoding"),
        (lambda content: content.update(examples=5.0), "examples"),
        (lambda content: content.update(examples="9" * 5000), "promises 9{100} "),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, damage, message):
    index = _make_set(tmp_path, "train")
    content = json.loads(index.path.read_text())
    damage(content)
    index.path.write_text(with_checksum(content))
    with pytest.raises(DataError, match=message):
        RecordIndex.load(index.path)


@pytest.mark.parametrize(
    "text", ['{"format": "tfdp', "[" * 100_000, "9" * 5000, b"\xff\xfe{}"], ids=range(4)
)
def test_an_index_that_is_no_json_is_refused(tmp_path, text):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "train.index.json").write_bytes(content)
    with pytest.raises(DataError, match="no readable index"):
        find_index(tmp_path)


@pytest.mark.parametrize("text", ["7", "[]", "null", '"text"', "{}"])
def test_an_index_that_is_other_json_is_refused(tmp_path, text):
    (tmp_path / "train.index.json").write_text(text)
    with pytest.raises(DataError, match="lacks a field"):
        find_index(tmp_path)


def test_an_index_that_was_changed_is_refused(tmp_path):
    """A shape of as many elements would be read as sound, and be wrong."""
    index = _make_set(tmp_path, "train")
    content = json.loads(index.path.read_text())
    content["features"]["image"]["shape"] = [4, 16]
    index.path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="changed after it was written"):
        RecordIndex.load(index.path)


def test_an_index_without_checksums_is_read(tmp_path):
    """As earlier versions wrote it."""
    index = _make_set(tmp_path, "train")
    content = json.loads(index.path.read_text())
    content["format"] = "tfdp.tfrecords/1"
    del content["checksum"]
    for file in content["files"]:
        del file["records_digest"], file["ends_digest"]
    index.path.write_text(json.dumps(content))
    assert RecordIndex.load(index.path) == index


@pytest.mark.parametrize("name", ["n" * 300, "n" * 5000])
def test_a_name_that_is_too_long_is_refused(tmp_path, name):
    for source in (tmp_path / name, f"{tmp_path}/{name}.index.json"):
        with pytest.raises(DataError, match=r"nothing can be read|no readable index"):
            find_index(source)


def test_what_is_being_written_is_no_part_of_a_set(tmp_path):
    index = _make_set(tmp_path, "train")
    (tmp_path / temporary_name("train-00000-of-00002.tfrecord")).write_bytes(b"x")
    assert find_index(tmp_path / "*") == index


def test_an_index_is_read_without_tensorflow(tmp_path):
    _make_set(tmp_path, "train")
    program = (
        "import sys, tfdp.data\n"
        f"index = tfdp.data.RecordIndex.load({str(tmp_path / 'train.index.json')!r})\n"
        "assert index.examples == 5\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LONGEST_SECONDS)
