"""Random damage to every file that tfdp reads: a typed error, or the right data.

Each row damages one kind of file again and again and prints its seed and what came of
it. A row of 100 (of record files 16) is run always, in the tier `all` one of 10,000.
"""

import collections
import functools
import json
import random
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.support import mutations
from tfdp import data
from tfdp.data.verify import check_before_reading, describe_fault
from tfdp.errors import DataError
from tfdp.files import checked_json

SEED = 20261122
SLOW = [pytest.mark.slow, pytest.mark.timeout(7200)]
COUNTS = [100, pytest.param(10_000, marks=SLOW)]
# A damaged file is searched by TensorFlow, which takes a tenth of a second and more.
COUNTS_OF_RECORDS = [16, pytest.param(10_000, marks=SLOW)]


class Files:
    """A folder that is damaged and restored.

    Args:
      folder: the sound files, flat.
      read: returns what the folder's files say, comparable.
    """

    def __init__(self, folder, read):
        self.folder, self._read = folder, read
        self.sound = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.expected = read()

    def outcome(self, changed):
        """What comes of other contents of some files, by name."""
        for name, content in changed.items():
            (self.folder / name).write_bytes(content)
        try:
            found = self._read()
        except DataError:
            return "typed error"
        except tf.errors.InvalidArgumentError as error:
            # tf.data's form of it.
            return "typed error" if "DataError: " in str(error) else repr(error)
        except Exception as error:
            return f"raw {error!r}"[:300]
        finally:
            for name in changed:
                (self.folder / name).write_bytes(self.sound[name])
        return "right data" if found == self.expected else "SILENT"


def judge(name, files, damages, count):
    """Tries `count` damages in turn; each must be refused or change nothing."""
    generator = random.Random(SEED)
    outcomes = collections.Counter()
    bad = []
    for number in range(count):
        damage = damages[number % len(damages)]
        changed = damage(generator)
        outcome = files.outcome(changed)
        outcomes[outcome.split(" ")[0]] += 1
        if outcome not in ("typed error", "right data"):
            bad.append((number, getattr(damage, "kind", ""), outcome))
    assert files.outcome({}) == "right data"
    print(f"{name}: seed {SEED}, {count} mutations, {dict(outcomes)}")
    assert bad == [], bad[:5]
    # Damage that nothing notices at all would prove nothing.
    assert outcomes["typed"] > count / 2


def damaged(files, names, functions):
    """One of the files is changed by one of the functions."""

    def with_function(function):
        def damage(generator):
            name = generator.choice(names)
            return {name: function(generator, files.sound[name])}

        damage.kind = function.__name__
        return damage

    return [with_function(function) for function in functions]


def swapped(files, others):
    """Files in the place of others: of the same folder, or of another write."""

    def damage(generator):
        first, second = generator.sample(sorted(others), 2)
        return {first: generator.choice([others[second], files.sound[second]])}

    def of_another_write(generator):
        name = generator.choice(sorted(others))
        return {name: others[name]}

    return [damage, of_another_write]


def write_set(folder, values, compression=""):
    """Two files of one size, larger than their ends."""
    return data.write_tfrecords(
        {"x": values}, folder, num_shards=2, compression=compression
    )


@pytest.fixture(scope="module", params=["", "GZIP"], ids=["plain", "gzip"])
def records(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    random_bytes = np.random.default_rng(0).integers(0, 256, (2, 120, 256), "uint8")
    index = write_set(folder / "1", random_bytes[0], request.param)
    write_set(folder / "2", random_bytes[1], request.param)
    # Made once: what is compared here is compared each time a file is opened.
    batches = data.read_tfrecords(index, 16, shuffle=False)

    def values():
        found = [batch["x"].numpy().tobytes() for batch in batches]
        for file in index.files:
            # The other door: it must refuse no sound file.
            path = index.file_path(file)
            describe = functools.partial(describe_fault, path, file, index.compression)
            check_before_reading(path, file, describe)
        return found

    others = {path.name: path.read_bytes() for path in (folder / "2").iterdir()}
    others.pop("train.index.json")
    return Files(folder / "1", values), others


@pytest.mark.parametrize("count", COUNTS_OF_RECORDS)
def test_records(records, count):
    files, _ = records
    names = [name for name in files.sound if name.endswith(".tfrecord")]
    judge("records", files, damaged(files, names, mutations.BYTES), count)


@pytest.mark.parametrize("count", COUNTS_OF_RECORDS)
def test_records_in_the_place_of_others(records, count):
    """Whole files, and whole records of one file: each by itself is sound."""
    files, others = records
    names = [name for name in files.sound if name.endswith(".tfrecord")]
    damages = swapped(files, others)
    if is_plain(files, names[0]):
        damages += damaged(files, names, [swap_records, repeat_record])
    judge("records swapped", files, damages, count)


def is_plain(files, name):
    return not files.sound[name].startswith(b"\x1f\x8b")


def records_of(content):
    size = len(content) // 60
    return [content[i : i + size] for i in range(0, len(content), size)]


def swap_records(generator, content):
    rows = records_of(content)
    first, second = generator.sample(range(len(rows)), 2)
    rows[first], rows[second] = rows[second], rows[first]
    return b"".join(rows)


def repeat_record(generator, content):
    rows = records_of(content)
    first, second = generator.sample(range(len(rows)), 2)
    rows[first] = rows[second]
    return b"".join(rows)


@pytest.fixture(scope="module")
def record_index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    write_set(folder / "1", np.zeros((20, 3), "int32"))
    write_set(folder / "2", np.ones((20, 3), "int32"))
    path = folder / "1" / "train.index.json"

    def said():
        index = data.RecordIndex.load(path)
        return index.name, dict(index.features), index.files, index.compression

    return Files(folder / "1", said)


@pytest.mark.parametrize("count", COUNTS)
def test_the_index_of_records(record_index, count):
    files, name = record_index, "train.index.json"
    functions = [*mutations.BYTES, *[mutations.edit_json] * 8]
    judge(name, files, damaged(files, [name], functions), count)


@pytest.mark.parametrize("count", COUNTS)
def test_an_index_that_a_stranger_has_signed(record_index, count):
    """Its checksum fits: what it says may differ, but can be said of a set."""
    files, name = record_index, "train.index.json"
    path = files.folder / name
    generator = random.Random(SEED)
    outcomes = collections.Counter()
    for _ in range(count):
        edited = json.loads(files.sound[name])
        text = mutations.edit_json(generator, json.dumps(edited))
        try:
            content = json.loads(text)
            path.write_text(checked_json.with_checksum(content))
        except (RecursionError, ValueError, TypeError):
            continue
        try:
            index = data.RecordIndex.load(path)
        except DataError:
            outcomes["typed error"] += 1
            continue
        finally:
            path.write_bytes(files.sound[name])
        outcomes["read"] += 1
        for file in index.files:
            assert index.file_path(file).parent == files.folder
            assert 0 <= file.examples * 16 <= file.size_bytes < 2**63
        assert index.path.parent == files.folder
    print(f"signed index: seed {SEED}, {count} mutations, {dict(outcomes)}")
    assert outcomes["typed error"] and outcomes["read"]


def test_the_table_sees_what_is_wrong(tmp_path):
    """A reader without checks is seen to be silent, and one that breaks to be raw."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps({"count": 12345, "name": "file"}))
    files = Files(folder, lambda: json.loads((folder / "a.json").read_bytes()))
    for function in (mutations.flip_bit, mutations.edit_json):
        with pytest.raises(AssertionError, match="SILENT|raw"):
            judge("unchecked", files, damaged(files, ["a.json"], [function]), 50)
    shutil.rmtree(folder)
