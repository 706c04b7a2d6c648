"""What a first program gets wrong: each message names the cause and what to do."""

import builtins

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.checkpoint import merge_parts
from tfdp.errors import (
    CollectiveError,
    ConfigurationError,
    DataError,
    DeviceError,
    ScopeError,
    TooLateWarning,
)

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
NODES, EDGES = np.ones((6, 4), "float32"), np.array([[0, 1], [1, 2], [3, 4], [4, 5]])


def compiled(strategy, jit_compile=False):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=jit_compile)
    return model


def rows_that_were_not_batched():
    dataset = tf.data.Dataset.from_tensor_slices((X, X[:, :1]))
    compiled(make_strategy(2)).fit(dataset, verbose=0)


def numbers_that_were_not_batched():
    dataset = tf.data.Dataset.from_tensor_slices((X, X[:, 0]))
    compiled(make_strategy(2)).fit(dataset, verbose=0)


def batches_that_are_graphs():
    dataset = tf.data.Dataset.from_tensors(((NODES, EDGES), X[:2, :1]))
    compiled(make_strategy(2)).fit(dataset, verbose=0)


def fit_in_the_scope_of_another_strategy():
    model = compiled(make_strategy(2))
    with make_strategy(2).scope():
        model.fit(X, X[:, :1], verbose=0)


def fit_in_the_scope_of_more_replicas():
    model = compiled(make_strategy(2))
    with make_strategy(3).scope():
        model.fit(X, X[:, :1], verbose=0)


def shards_in_a_compiled_step():
    strategy = make_strategy(2, shard="parameters")
    compiled(strategy, jit_compile=True).fit(X, X[:, :1], verbose=0)


def a_step_in_the_scope_alone():
    strategy = make_strategy(2)
    model = compiled(strategy)
    with strategy.scope():
        model.train_step((X, X[:, :1]))


def more_devices_in_a_running_process():
    tfdp.use_virtual_devices(3)


TWO = r"DataParallelStrategy\(2 replicas: CPU:0, CPU:1; .*\)"
CAUSES = {
    rows_that_were_not_batched: (DataError, r"\.batch\(global_batch_size\) is missing"),
    numbers_that_were_not_batched: (
        DataError,
        r"\.batch\(global_batch_size\) is missing",
    ),
    batches_that_are_graphs: (DataError, "graphs by .*distribute_datasets_from_funct"),
    fit_in_the_scope_of_another_strategy: (
        ScopeError,
        rf"^{TWO} is entered, .* within the scope of another {TWO}\.",
    ),
    fit_in_the_scope_of_more_replicas: (
        ScopeError,
        rf"^{TWO} is entered, .* scope of DataParallelStrategy\(3 replicas",
    ),
    shards_in_a_compiled_step: (
        CollectiveError,
        r"shard='parameters'.*jit_compile=False, or take shard=\"gradients\"",
    ),
    a_step_in_the_scope_alone: (
        ConfigurationError,
        "'sequential.*/kernel:0' has a copy on each replica.*by strategy.run",
    ),
    more_devices_in_a_running_process: (DeviceError, r"\(right after the imports\)\.$"),
}


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("mistake", CAUSES, ids=lambda mistake: mistake.__name__)
def test_an_error_names_the_cause(mistake):
    kind, words = CAUSES[mistake]
    with pytest.raises(kind, match=words):
        mistake()


@pytest.mark.parametrize(
    "given, words",
    [
        (keras.optimizers.Adam, r"the class Adam; call it: Adam\(\)"),
        ("adam", r"keras\.optimizers\.get\('adam'\)"),
    ],
)
def test_an_optimizer_that_is_none(given, words):
    with pytest.raises(ConfigurationError, match=words):
        tfdp.DistributedOptimizer(given)


def test_an_empty_folder_is_not_merged(tmp_path):
    (tmp_path / "parts").mkdir()
    with pytest.raises(DataError, match="parts is empty. Give the one that .*save_par"):
        merge_parts(tmp_path / "parts", tmp_path / "model.keras")


def test_a_notebook_has_its_kernel_restarted(monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    with pytest.raises(DeviceError, match="came too late.*restart the kernel"):
        tfdp.use_virtual_devices(3)
    with pytest.warns(TooLateWarning, match="restart the kernel"):
        tfdp.quiet()


def test_a_second_profiler_draws_nothing_and_ends_no_training(tmp_path, capsys):
    pages = [tmp_path / "first.html", tmp_path / "second.html"]
    callbacks = [tfdp.callbacks.StepTimeline(page, step=3) for page in pages]
    model = compiled(make_strategy(2))
    model.fit(X, X[:, :1], batch_size=4, verbose=0, callbacks=callbacks)
    assert [page.exists() for page in pages] == [True, False]
    assert "TensorFlow has one profiler" in capsys.readouterr().out
    # It was not left running.
    again = tfdp.callbacks.StepTimeline(pages[1], step=3)
    model.fit(X, X[:, :1], batch_size=4, verbose=0, callbacks=[again])
    assert pages[1].exists()
