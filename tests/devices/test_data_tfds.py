"""TensorFlow Datasets: prepared data is read, nothing is ever fetched unasked."""

import socket
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdp import data
from tfdp.errors import ConfigurationError, DataError, MissingDependencyError

tfds = pytest.importorskip("tensorflow_datasets")

_TRAIN = 23


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A small prepared dataset: an image whose pixels are its label."""

    class TinyPictures(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        # Nothing is fetched. Found out by itself, this needs importlib_resources,
        # which tensorflow-datasets 4.9.10 uses but does not require.
        url_infos = {}

        def _info(self):
            features = {
                "image": tfds.features.Tensor(shape=(4, 4), dtype=np.uint8),
                "label": tfds.features.ClassLabel(num_classes=_TRAIN),
                "words": tfds.features.Sequence(np.int64),
            }
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(_TRAIN),
                "test": self._generate_examples(5),
            }

        def _generate_examples(self, count):
            for number in range(count):
                yield (
                    number,
                    {
                        "image": np.full((4, 4), number, np.uint8),
                        "label": number,
                        "words": list(range(number % 3)),
                    },
                )

    builder = TinyPictures(data_dir=tmp_path_factory.mktemp("tfds"))
    builder.download_and_prepare()
    return builder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a test tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _labels(batches):
    return [label.numpy().tolist() for _, label in batches]


@pytest.mark.parametrize("source", ["builder", "directory", "name"])
def test_every_way_to_name_a_dataset_reads_it(builder, source):
    options = {}
    given = builder
    if source == "directory":
        given = str(builder.data_path)
    elif source == "name":
        given = "tiny_pictures:1.0.0"
        options["data_dir"] = builder.data_path.parent.parent
    batches = data.from_tfds(given, "train", 10, as_supervised=True, **options)
    assert len(batches) == 3
    epoch = list(batches)
    assert [len(label) for _, label in epoch] == [10, 10, 3]
    labels = np.concatenate([label.numpy() for _, label in epoch])
    images = np.concatenate([image.numpy() for image, _ in epoch])
    assert sorted(labels) == list(range(_TRAIN))
    np.testing.assert_array_equal(images[:, 2, 2], labels)


def test_the_seed_decides_the_order_of_every_epoch(builder):
    first, second, other = (
        data.from_tfds(builder, "train", 10, seed=seed, as_supervised=True)
        for seed in (5, 5, 6)
    )
    epochs = [_labels(first) for _ in range(2)]
    assert [_labels(second) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert _labels(other) != epochs[0]


def test_a_slice_of_a_split_is_read_in_order(builder):
    batches = data.from_tfds(
        builder,
        "train[:50%]",
        8,
        shuffle=False,
        drop_remainder=True,
        as_supervised=True,
    )
    assert batches.element_spec[0].shape == (8, 4, 4)
    assert [len(labels) for labels in _labels(batches)] == [8]


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """A dataset that its author wants read in the order of its keys, in five files."""

    class Frames(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = {}

        def _info(self):
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict({"frame": np.int64}),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {"train": ((frame, {"frame": frame}) for frame in range(50))}

        def _generate_examples(self):
            raise NotImplementedError

    builder = Frames(data_dir=tmp_path_factory.mktemp("ordered"))
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=5)
    )
    assert len(builder.info.splits["train"].filenames) == 5
    return builder


def _frames(batches):
    return [frame for batch in batches for frame in batch["frame"].numpy().tolist()]


@pytest.mark.parametrize(
    "split, wanted", [("train", (0, 50)), ("train[4:37]", (4, 37))]
)
def test_a_dataset_with_an_order_keeps_it(ordered, split, wanted):
    batches = data.from_tfds(ordered, split, 8, shuffle=False)
    for _ in range(2):
        assert _frames(batches) == list(range(*wanted))


def test_a_dataset_with_an_order_is_shuffled_when_asked(ordered, caplog):
    # A buffer of two mixes hardly anything: the files are mixed as well.
    first, again = (
        data.from_tfds(ordered.data_path, "train", 8, seed=3, shuffle_buffer_examples=2)
        for _ in range(2)
    )
    epochs = [_frames(first) for _ in range(2)]
    assert [_frames(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
        assert [frame // 10 for frame in epoch[5::10]] != list(range(5))
    assert not caplog.records


def test_varying_lengths_become_ragged_or_padded(builder):
    ragged = data.from_tfds(builder, "test", 5, shuffle=False)
    assert isinstance(ragged.element_spec["words"], tf.RaggedTensorSpec)
    padded = data.from_tfds(builder, "test", 5, shuffle=False, variable_length="pad")
    (batch,) = padded
    assert batch["words"].shape == (5, 2)


def test_transform_is_applied_to_examples(builder):
    batches = data.from_tfds(
        builder,
        "test",
        5,
        as_supervised=True,
        transform=lambda image, label: (tf.reshape(image, (16,)), label),
    )
    assert batches.element_spec[0].shape.as_list() == [None, 16]


@pytest.mark.parametrize(
    ("source", "split", "options", "error", "message"),
    [
        ("builder", "valid", {}, ConfigurationError, r"'valid'.*\['test', 'train'\]"),
        ("builder", "train", {"seed": None}, ConfigurationError, "seed"),
        (7, "train", {}, ConfigurationError, "builder_or_name .* Received: a int"),
        ("absent_dataset", "train", {}, DataError, "no prepared dataset"),
        ("mnist", "train", {}, DataError, "download=True"),
        ("directory above", "train", {}, DataError, "no dataset_info.json"),
    ],
)
def test_what_is_not_there_is_refused(
    builder, tmp_path, source, split, options, error, message
):
    if source == "builder":
        source = builder
    elif source == "directory above":
        source = builder.data_path.parent
    else:
        options = {**options, "data_dir": tmp_path}
    with pytest.raises(error, match=message):
        data.from_tfds(source, split, 5, **options)


def test_a_builder_that_is_not_prepared_is_refused(builder, tmp_path):
    unprepared = type(builder)(data_dir=tmp_path)
    with pytest.raises(DataError, match=r"tiny_pictures.* is not prepared"):
        data.from_tfds(unprepared, "train", 5)
    batches = data.from_tfds(unprepared, "train", 5, download=True)
    assert len(batches) == 5


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tfdp\[tfds\]'"):
        data.from_tfds("mnist", "train", 8)
