"""What a first program gets wrong: each message names the cause and what to do."""

import builtins
import copy
import pickle
import warnings

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
    RunRecordWarning,
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
        r'shard="parameters".*jit_compile=False.*shard="gradients" works',
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
    with pytest.raises(DataError, match="parts holds no checkpoint. Give the .*Check"):
        merge_parts(tmp_path / "parts", tmp_path / "model.keras")


def test_a_notebook_has_its_kernel_restarted(monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    with pytest.raises(DeviceError, match="came too late.*restart the kernel"):
        tfdp.use_virtual_devices(3)
    # Another test of this process may have imported TensorFlow by tfdp.
    monkeypatch.setitem(tfdp.quiet.__globals__, "_was_quiet", [])
    with pytest.warns(TooLateWarning, match="restart the kernel"):
        tfdp.quiet()


def test_a_second_profiler_writes_nothing_and_ends_no_training(tmp_path, capsys):
    paths = [tmp_path / f"{name}.trace.json" for name in ("first", "second")]
    callbacks = [tfdp.callbacks.StepTimeline(path, step=3) for path in paths]
    model = compiled(make_strategy(2))
    model.fit(X, X[:, :1], batch_size=4, verbose=0, callbacks=callbacks)
    assert [path.exists() for path in paths] == [True, False]
    assert "TensorFlow has one profiler" in capsys.readouterr().out
    # It was not left running.
    again = tfdp.callbacks.StepTimeline(paths[1], step=3)
    model.fit(X, X[:, :1], batch_size=4, verbose=0, callbacks=[again])
    assert paths[1].exists()


def test_two_numbers_of_logical_cpus_are_refused():
    with pytest.raises(ConfigurationError, match="cpu_devices=2, devices_per_host=4.*"):
        tfdp.auto_strategy(cpu_devices=2, devices_per_host=4)
    strategy = tfdp.auto_strategy(cpu_devices=4, devices_per_host=4)
    assert strategy.num_replicas_in_sync == 4


@pytest.mark.parametrize("eagerly", [False, True])
def test_remat_of_a_model_that_has_trained(eagerly):
    """A step that was traced goes on; none is where Python runs each time."""
    model = compiled(make_strategy(2))
    model.run_eagerly = eagerly
    tfdp.remat(model)
    model.fit(X, X[:, :1], verbose=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TooLateWarning)
        tfdp.remat(model)
    said = [str(w.message) for w in caught if w.category is TooLateWarning]
    assert ["model.compile" in text for text in said] == ([] if eagerly else [True])
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error", TooLateWarning)
        tfdp.remat(model)


def test_a_record_behind_another_callback(tmp_path):
    model = compiled(make_strategy(2))
    other = keras.callbacks.LambdaCallback()
    record = tfdp.callbacks.RunRecord(tmp_path)
    with pytest.warns(RunRecordWarning, match="after LambdaCallback.*Place RunRecord"):
        model.fit(X, X[:, :1], verbose=0, callbacks=[other, record])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunRecordWarning)
        model.fit(X, X[:, :1], verbose=0, callbacks=[record, other])


def batched(dataset):
    return dataset.batch(4, drop_remainder=True).map(lambda row: row).prefetch(1)


@pytest.mark.parametrize(
    "batches",
    [
        lambda rows: rows.batch(4).prefetch(1),
        batched,
        lambda rows: rows.padded_batch(4),
    ],
)
def test_batches_are_no_records(batches, tmp_path):
    rows = tf.data.Dataset.from_tensor_slices({"x": X, "y": X[:, 0]})
    write = tfdp.data.write_tfrecords
    with pytest.raises(DataError, match="batched dataset.*unbatch"):
        write(batches(rows), tmp_path, num_shards=2)
    assert not list(tmp_path.iterdir())
    shapes = {"x": (4, 4), "y": (4,)}
    stated = {n: tfdp.data.FeatureSpec(s, "float32") for n, s in shapes.items()}
    index = write(batches(rows), tmp_path, num_shards=2, features=stated)
    assert sum(file.examples for file in index.files) == 6


def test_rows_and_sequences_are_records(tmp_path):
    """Pairs of rows of one length; tokens that a batch has brought together."""
    pairs = tf.data.Dataset.from_tensor_slices({"image": X, "mask": X > 0})
    tokens = tf.data.Dataset.range(12).batch(4).map(lambda text: {"tokens": text})
    for name, dataset, examples in (("pairs", pairs, 24), ("texts", tokens, 3)):
        index = tfdp.data.write_tfrecords(dataset, tmp_path, num_shards=1, name=name)
        assert index.files[0].examples == examples


def test_a_strategy_stays_in_its_process():
    """Its copy, and the file of a model that was made under it, do not leave it."""
    strategy = make_strategy(2)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ConfigurationError, match="KerasTuner.*train_loop_per_wor"):
            pickle.dumps({"strategy": strategy}, protocol)
    assert copy.deepcopy(strategy).num_replicas_in_sync == 2
    assert pickle.loads(pickle.dumps(compiled(strategy))).count_params() == 5
