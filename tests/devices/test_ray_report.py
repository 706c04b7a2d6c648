"""`tfdp.ray.ReportCallback`, over a stand-in; the real Ray in tests/processes."""

import pathlib
import sys
import types

import keras
import numpy as np
import pytest

import tfdp
from tfdp.errors import ConfigurationError

EPOCHS = 5


class FakeTrain(types.ModuleType):
    """What the callback uses of `ray.train`; keeps what is reported."""

    class Checkpoint:
        @staticmethod
        def from_directory(folder):
            return folder

    def __init__(self, is_worker=True):
        super().__init__("ray.train")
        self.reports = []
        self._is_worker = is_worker

    def get_context(self):
        if not self._is_worker:
            raise RuntimeError("outside of a training function")

    def report(self, metrics, checkpoint=None):
        path = checkpoint and pathlib.Path(checkpoint, "model.keras")
        model = path and keras.saving.load_model(path)
        self.reports.append((metrics, model, checkpoint))


@pytest.fixture
def ray(monkeypatch):
    def install(train):
        package = types.ModuleType("ray")
        package.train = train
        monkeypatch.setitem(sys.modules, "ray", package)
        monkeypatch.setitem(sys.modules, "ray.train", train)
        return train

    return install


def fit(callback, *others, epochs=EPOCHS):
    with tfdp.DataParallelStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    rows = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
    history = model.fit(
        *(rows[:, :4], rows[:, 4:]),
        batch_size=8,
        epochs=epochs,
        verbose=0,
        callbacks=[*others, callback],
    )
    return model, history.history


def test_each_epoch_is_reported_and_some_bring_the_model(ray):
    train = ray(FakeTrain())
    model, history = fit(tfdp.ray.ReportCallback(every_epochs=2))
    assert [metrics["epoch"] for metrics, _, _ in train.reports] == list(range(EPOCHS))
    for name, values in history.items():
        told = [metrics[name] for metrics, _, _ in train.reports]
        assert told == values
        assert {type(value) for value in told} == {float}
    # After two, after four, and the last.
    assert [bool(copy) for _, copy, _ in train.reports] == [
        *(False, True, False, True, True)
    ]
    _, copy, folder = train.reports[-1]
    for mine, its in zip(model.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert not pathlib.Path(folder).exists()


def test_a_training_that_stops_early_brings_its_model(ray):
    train = ray(FakeTrain())
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(stop.model, "stop_training", True)
    )
    fit(tfdp.ray.ReportCallback(every_epochs=EPOCHS), stop)
    ((metrics, copy, _),) = train.reports
    assert metrics["epoch"] == 0 and copy is not None


def test_metrics_alone(ray):
    train = ray(FakeTrain())
    fit(tfdp.ray.ReportCallback(every_epochs=0), epochs=1)
    assert [copy for _, copy, _ in train.reports] == [None]


def test_outside_of_ray_nothing_is_done(ray, monkeypatch):
    train = ray(FakeTrain(is_worker=False))
    fit(tfdp.ray.ReportCallback(), epochs=1)
    assert train.reports == []
    monkeypatch.delitem(sys.modules, "ray")
    fit(tfdp.ray.ReportCallback(), epochs=1)


@pytest.mark.parametrize("epochs", [-1, 1.5, None, True])
def test_epochs_are_checked(epochs):
    with pytest.raises(ConfigurationError, match="every_epochs"):
        tfdp.ray.ReportCallback(every_epochs=epochs)
