"""Tar files in WebDataset's form, by the rules of TFRecords."""

import io
import re
import tarfile
import tracemalloc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import ConfigurationError, DataError

SAMPLES = 103


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write(folder, files, mode="w", ending=".tar", samples=SAMPLES):
    for shard in range(files):
        path = folder / f"train-{shard}{ending}"
        with tarfile.open(path, mode) as archive:
            add(archive, "__info__/about.txt", b"not a sample")
            for number in range(shard, samples, files):
                add(archive, f"a/{number:05}.cls", str(number % 10).encode())
                # A name with two dots; lengths differ from sample to sample.
                add(archive, f"a/{number:05}.seg.raw", bytes([number]) * (number + 1))
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """By number of files, the index of the same samples."""
    return {
        files: tfdp.data.index_webdataset(
            write(tmp_path_factory.mktemp("set"), files) / "train-*.tar", name="train"
        )
        for files in (1, 3, 8)
    }


def numbers_of(dataset):
    return [int(key[2:]) for batch in dataset for key in batch["__key__"].numpy()]


def test_samples_come_whole(sets):
    index = sets[3]
    assert index.examples == SAMPLES
    assert set(index.features) == {"__key__", "cls", "seg.raw"}
    dataset = tfdp.data.read_webdataset(index.directory, 10, shuffle=False)
    assert len(dataset) == 11
    rows = 0
    for batch in dataset:
        for key, label, raw in zip(
            *(batch[name].numpy() for name in ("__key__", "cls", "seg.raw")),
            strict=True,
        ):
            number = int(key[2:])
            assert key == f"a/{number:05}".encode()
            assert label == str(number % 10).encode()
            assert raw == bytes([number]) * (number + 1)
            rows += 1
    assert rows == SAMPLES


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("files, hosts", [(8, 1), (8, 3), (3, 5), (1, 2)])
def test_every_sample_is_read_once(sets, files, hosts, shuffle):
    shares = [
        tfdp.data.read_webdataset(
            sets[files],
            4 * hosts,
            shuffle=shuffle,
            input_context=tf.distribute.InputContext(hosts, host, 2 * hosts),
        )
        for host in range(hosts)
    ]
    orders = []
    for _ in range(2):
        epoch = [numbers_of(dataset) for dataset in shares]
        assert sorted(sum(epoch, [])) == list(range(SAMPLES))
        orders.append(epoch)
    assert (orders[0] != orders[1]) == shuffle


def test_the_seed_decides_the_order(sets):
    first, again, other = (
        numbers_of(tfdp.data.read_webdataset(sets[8], 10, seed=seed))
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_strategy_trains_on_it(sets):
    def decode(raw, label):
        length = tf.cast(tf.strings.length(raw), tf.float32)
        return length[None] / SAMPLES, tf.strings.to_number(label)

    train = tfdp.data.read_webdataset(
        sets[3], 16, as_supervised=("seg.raw", "cls"), transform=decode, repeat=True
    )
    with make_strategy(2).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(train, steps_per_epoch=7, epochs=2, verbose=0, shuffle=False)
    assert np.isfinite(history.history["loss"]).all()


def test_packed_files_are_read(tmp_path):
    write(tmp_path, 2, "w:gz", ".tar.gz", samples=9)
    index = tfdp.data.index_webdataset(tmp_path / "*.tar.gz", name="x")
    assert sorted(numbers_of(tfdp.data.read_webdataset(index, 4))) == list(range(9))


def cut(path):
    path.write_bytes(path.read_bytes()[:-12_000])


def change_content(path):
    # tar itself does not notice.
    content = path.read_bytes()
    raw = bytes([50]) * 51
    path.write_bytes(content.replace(raw, raw[:-1] + b"\0"))


def change_header(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"a/00050.cls")] = 0xFF
    path.write_bytes(bytes(content))


def longer(path):
    with tarfile.open(path, "a") as archive:
        add(archive, "a/99999.cls", b"1")
        add(archive, "a/99999.seg.raw", b"1")


def other_order(path):
    with tarfile.open(path) as archive:
        members = [(m.name, archive.extractfile(m).read()) for m in archive]
    moved = members[:1] + members[3:5] + members[1:3] + members[5:]
    with tarfile.open(path, "w") as archive:
        for name, content in moved:
            add(archive, name, content)


def missing(path):
    path.unlink()


DAMAGE = {
    cut: r"sample 98 \(counted from 0\)",
    change_content: r"sample 50 \(counted from 0\), 'a/00050', is not the one",
    change_header: r"sample 50 \(counted from 0\)",
    longer: r"sample 103 \(counted from 0\), 'a/99999', is one too many",
    other_order: r"sample 0 \(counted from 0\), 'a/00001', is not the one",
    missing: "is missing",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named(tmp_path, damage):
    write(tmp_path, 1)
    index = tfdp.data.index_webdataset(tmp_path / "*.tar", name="train")
    path = tmp_path / "train-0.tar"
    damage(path)
    with pytest.raises((DataError, tf.errors.OpError)) as caught:
        for _ in tfdp.data.read_webdataset(index, 8):
            pass
    assert re.search(DAMAGE[damage], str(caught.value)), caught.value
    assert "train-0.tar" in str(caught.value)


def test_samples_that_are_unlike_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "1.jpg", b"x")
        add(archive, "1.cls", b"1")
        add(archive, "2.jpg", b"x")
    with pytest.raises(
        DataError, match=r"a.tar, sample 1 \('2'\) has jpg; .*\('1'\) .*cls, jpg"
    ):
        tfdp.data.index_webdataset(tmp_path / "*.tar", name="a")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "1.jpg", b"x")
        add(archive, "1.jpg", b"y")
    with pytest.raises(DataError, match=r"a.tar.* it has 'jpg' twice"):
        tfdp.data.index_webdataset(tmp_path / "*.tar", name="a")


def peak_of_index(folder):
    """Bytes of Python's objects at the most, while a set is indexed; and its index."""
    tracemalloc.start()
    try:
        index = tfdp.data.index_webdataset(folder / "*.tar.gz", name="a")
        return tracemalloc.get_traced_memory()[1], index
    finally:
        tracemalloc.stop()


LONG_BYTES = 20 << 20


def test_long_samples_pass_through_little_memory(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", compresslevel=1) as archive:
        # Short ones behind it, whose names come before and behind its own.
        add(archive, "1.raw", b"x" * LONG_BYTES)
        add(archive, "1.cls", b"1")
        add(archive, "1.txt", b"one")
        add(archive, "LICENSE", bytes(LONG_BYTES))
    peak_bytes, index = peak_of_index(tmp_path)
    # Of a block of 1 MiB there are some copies; the whole would take 20 MiB and more.
    assert peak_bytes < 12 << 20
    # What was read without being kept has the checksum of what is.
    (batch,) = tfdp.data.read_webdataset(index, 1)
    assert batch["raw"].numpy()[0] == b"x" * LONG_BYTES


def long_header(archive):
    member = tarfile.TarInfo("1.cls")
    member.pax_headers = {"comment": "x" * (8 << 20)}
    archive.addfile(member)


def long_sample(archive):
    # Each file is short enough; the last one's content is not even there.
    add(archive, "1.cls", b"1")
    for ending, size in (("jpg", 1 << 20), ("raw", (1 << 30) - (1 << 20))):
        member = tarfile.TarInfo(f"1.{ending}")
        member.size = size
        archive.addfile(member, io.BytesIO(bytes(size)) if ending == "jpg" else None)


TOO_LONG = {
    long_header: r"sample 0 .*what comes before a file .* more than 4194304 bytes",
    long_sample: r"sample 0 .*with 1.raw its files have 1073743361 bytes; at most "
    "1073741824 are read",
}


@pytest.mark.parametrize("kind", TOO_LONG, ids=lambda kind: kind.__name__)
def test_what_is_too_long_is_refused_unread(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as made:
        kind(made)
    with pytest.raises(DataError, match=TOO_LONG[kind]):
        peak_of_index(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_are_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "1.jpg", b"x")
        link = tarfile.TarInfo("2.jpg")
        link.type, link.linkname = kind, "1.jpg"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"a.tar.*2.jpg is a link to 1.jpg"):
        tfdp.data.index_webdataset(tmp_path / "*.tar", name="a")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_what_follows_an_archive_is_told_of(tmp_path, mode):
    """As `cat a.tar b.tar` makes it: readers stop at the end of the first one."""
    for name in ("one", "two"):
        with tarfile.open(tmp_path / name, mode) as archive:
            add(archive, f"{name}.jpg", b"x")
    both = b"".join((tmp_path / name).read_bytes() for name in ("one", "two"))
    (tmp_path / "a.tar").write_bytes(both)
    with pytest.raises(DataError, match=r"sample 1 .*more follows after the end"):
        tfdp.data.index_webdataset(tmp_path / "*.tar", name="a")


def test_each_kind_of_set_has_its_reader(sets, tmp_path):
    with pytest.raises(ConfigurationError, match="tar files: .*read_webdataset"):
        tfdp.data.read_tfrecords(sets[1], 8)
    with pytest.raises(ConfigurationError, match="tar files: .*read_webdataset"):
        tfdp.data.verify_tfrecords(sets[1])
    records = tfdp.data.write_tfrecords({"x": np.arange(4)}, tmp_path, num_shards=1)
    with pytest.raises(ConfigurationError, match="tfrecord files: .*read_tfrecords"):
        tfdp.data.read_webdataset(records, 2)
    with pytest.raises(DataError, match="no file with .tar"):
        tfdp.data.index_webdataset(tmp_path / "*.zip", name="x")
    with pytest.raises(ConfigurationError, match="starts a file name"):
        tfdp.data.index_webdataset(tmp_path / "*.tar", name="a/b")


@pytest.mark.parametrize("pattern", [["a.tar", "b.tar"], None, 5])
def test_a_pattern_that_is_no_text_is_refused(pattern):
    with pytest.raises(tfdp.errors.ConfigurationError, match="one pattern"):
        tfdp.data.index_webdataset(pattern, name="a")


# The files of an archive, and the keys that the package webdataset 1.0.2 finds in it.
NAMES = {
    "two underscores": (["__3fXkQ.cls", "_b.cls", "c.cls"], ["__3fXkQ", "_b", "c"]),
    "metadata": (["__a__/1.cls", "__a.b__/x/2.cls", "__c.d__", "3.cls"], ["3"]),
    "no metadata": (["a/__b__/1.cls", "./__c__/2.cls"], ["a/__b__/1", "./__c__/2"]),
    "metadata's ending": (["__info__.cls", "1.cls"], ["__info__", "1"]),
    "no ending": (["a/1.cls", "a/LICENSE", "a.b/README", "x/"], ["a/1"]),
    "capital letters": (["A.CLS", "a.Cls"], ["A", "a"]),
    "dots in folders": (["v1.5/1.cls", "a.tar/b/2.cls"], ["v1.5/1", "a.tar/b/2"]),
    "other paths": (["./1.cls", "1.cls", "/x//1.cls"], ["./1", "1", "/x//1"]),
    "hidden": ([".cls", "a/.cls", "1.cls"], ["a/", "1"]),
    "again": (["1.cls", "2.cls", "1.cls"], ["1", "2", "1"]),
    "other letters": (["\u00e9.cls", "\udce9.cls"], ["\u00e9", "\udce9"]),
}


@pytest.mark.parametrize("names, keys", NAMES.values(), ids=NAMES)
def test_names_are_read_as_webdataset_reads_them(tmp_path, names, keys):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names:
            add(archive, name, b"1")
    index = tfdp.data.index_webdataset(tmp_path / "a.tar", name="a")
    assert set(index.features) == {"__key__", "cls"}
    (batch,) = tfdp.data.read_webdataset(index, 9, shuffle=False)
    assert batch["__key__"].numpy().tolist() == [
        key.encode(errors="surrogateescape") for key in keys
    ]


REFUSED_NAMES = {
    r"sample 0 .*it has 'cls' twice \(small and capital": ["1.cls", "1.CLS"],
    r"sample 0 .*'1.__key__' has an ending": ["1.__key__"],
    r"'2.' has an ending .*, ''": ["1.cls", "2."],
    r"sample 0 .*'1.cl\\udce9' has an ending": ["1.cl\udce9"],
    r"sample 1 \('1'\) has cls; .*\('__info__'\) has, txt": ["__info__.txt", "1.cls"],
}


@pytest.mark.parametrize("message", REFUSED_NAMES)
def test_names_that_cannot_be_read_are_refused(tmp_path, message):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in REFUSED_NAMES[message]:
            add(archive, name, b"1")
    with pytest.raises(DataError, match=message):
        tfdp.data.index_webdataset(tmp_path / "a.tar", name="a")


def test_a_long_name_takes_no_long_time(tmp_path):
    # With a pattern that tries each pair of slashes: hours.
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "a/" * 500_000 + "b", b"1")
        add(archive, "1.cls", b"1")
    index = tfdp.data.index_webdataset(tmp_path / "a.tar", name="a")
    assert index.examples == 1
