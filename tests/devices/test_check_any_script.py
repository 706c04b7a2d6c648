"""Scripts that nobody wrote for `tfdp check`: what their first `fit` gives, or not."""

import os
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.fresh_python import run_python
from tests.support.parity import make_strategy
from tfdp.errors import ConfigurationError
from tfdp.planning import plan
from tfdp.testing import check_parity
from tfdp.tools.commands.check_target import ScriptRun, load_target, parse_target
from tfdp.tools.testing.batches import collect_batches

BEFORE = """
import keras
import numpy as np
import tensorflow as tf
import tfdp

x = np.arange(20, dtype="float32").reshape(10, 2)
y = np.arange(10, dtype="int64") % 3

def new_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(source, *, replicas=3, batches=2, arguments=()):
        path = tmp_path / "train.py"
        path.write_text(BEFORE + textwrap.dedent(source), "utf-8")
        script_run = ScriptRun(lambda: make_strategy(2), replicas, batches)
        return load_target(parse_target(str(path), arguments), script_run)

    return load


class_weight = {0: 1.0, 1: 5.0, 2: 7.0}
WEIGHTED = "class_weight={0: 1.0, 1: 5.0, 2: 7.0}"
DATA = {
    "arrays": ("new_model().fit(x, y, 4, epochs=9)", 4),
    "the default batch": ("new_model().fit(x=x, y=y)", 10),
    "rows for validation": (
        "new_model().fit(np.tile(x, (2, 1)), np.tile(y, 2), 4, validation_split=0.5)",
        4,
    ),
    "class weights": (f"new_model().fit(x, y, batch_size=4, {WEIGHTED})", 4),
    "a dataset": (
        "pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()\n"
        "new_model().fit(pairs, steps_per_epoch=3)",
        4,
    ),
    "a weighted dataset": (
        "pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)\n"
        f"new_model().fit(pairs, {WEIGHTED})",
        4,
    ),
    "a distributed dataset": (
        "strategy = tf.distribute.MirroredStrategy()\n"
        "pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)\n"
        "new_model().fit(strategy.experimental_distribute_dataset(pairs))",
        4,
    ),
    "a generator": (
        "new_model().fit((x[i:i+4], y[i:i+4]) for i in range(0, 10, 4))",
        4,
    ),
    "a Python dataset with threads": (
        """
        class Pairs(keras.utils.PyDataset):
            def __len__(self):
                return 3
            def __getitem__(self, i):
                return x[4*i:4*i+4], y[4*i:4*i+4]
        new_model().fit(Pairs(workers=2), shuffle=False)
        """,
        4,
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_the_data_are_those_of_the_call(case, load):
    source, rows = DATA[case]
    found = load(source)
    assert found.options == {"batch_size": rows}
    x = np.arange(20, dtype="float32").reshape(10, 2)
    y = np.arange(10) % 3
    [first, second] = collect_batches(found.data, 2, rows)
    assert np.array_equal(first[0], x[:rows]) and np.array_equal(first[1], y[:rows])
    last = y[:rows]
    if rows < 10:
        # Of arrays the last batch is the short one.
        is_array = isinstance(found.data, tuple)
        last = y[8:] if is_array else y[4:8]
    assert np.array_equal(second[1], last)
    if "weight" in case:
        expected = [class_weight[int(each)] for each in last]
        assert np.array_equal(second[2], expected)
    else:
        assert len(second) == 2


MADE = {
    "none": "",
    "tfdp's": "strategy = tfdp.auto_strategy(cpu_devices=7)",
    "of names": "strategy = tfdp.DataParallelStrategy(['GPU:5', 'GPU:6'])",
    "of hosts": "strategy = tfdp.MultiHostDataParallelStrategy()",
    "stock": "strategy = tf.distribute.MirroredStrategy(['GPU:0'])",
    "stock of hosts": "strategy = tf.distribute.MultiWorkerMirroredStrategy()",
}


@pytest.mark.parametrize("kind", MADE)
def test_a_model_is_built_in_the_scope_that_is_open(kind, load):
    """Whatever strategy the script makes, and whatever it does to TensorFlow."""
    found = load(
        f"""
        tfdp.quiet()
        keras.backend.clear_session()
        tf.config.threading.set_intra_op_parallelism_threads(7)
        tf.config.set_visible_devices([], "GPU")
        {MADE[kind]}
        if {kind != "none"}:
            assert strategy.num_replicas_in_sync == 3
            assert isinstance(strategy, tf.distribute.Strategy)
            scope = strategy.scope()
        else:
            import contextlib
            scope = contextlib.nullcontext()
        with scope:
            model = new_model()
            assert model.get_layer("dense") is model.layers[0]
        assert model.predict(x, verbose=0).shape == (10, 3)
        try:
            model.fit(x, y, callbacks=[keras.callbacks.ModelCheckpoint("a.keras")])
        except Exception:
            pass
        raise ValueError("fit came back")
        """
    )
    strategies = [make_strategy(2), None, make_strategy(3)]
    models = []
    for strategy in strategies:
        with strategy.scope() if strategy else tf.device("CPU:1"):
            models.append(found.build())
        expected = strategy or tf.distribute.get_strategy()
        assert models[-1].distribute_strategy is expected
    assert len({id(model) for model in models}) == 3
    kernels = [model.get_weights()[0] for model in models]
    assert np.array_equal(kernels[0], kernels[1])
    # The methods of Keras are its own again.
    models[1].fit(np.zeros((4, 2)), np.zeros(4), verbose=0)


def test_a_module_beside_the_script_is_imported_anew(load, tmp_path):
    (tmp_path / "parts_beside.py").write_text(
        "import keras\nmodel = keras.Sequential([keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n",
        "utf-8",
    )
    source = """
        import os
        from parts_beside import model
        os.chdir("/")
        try:
            model.fit(x, y)
        finally:
            del x, y
    """
    here = os.getcwd()
    found = load(source)
    assert found.build() is not found.build()
    assert "parts_beside" not in sys.modules and "tfdp" in sys.modules
    assert os.getcwd() == here and len(found.data[0]) == 10


def test_a_stopped_script_overwrites_no_model(load, tmp_path):
    (tmp_path / "model.keras").write_text("trained", "utf-8")
    load(
        f"""
        model = new_model()
        model.save_weights({str(tmp_path / "start.weights.h5")!r})
        try:
            model.fit(x, y)
        finally:
            model.save({str(tmp_path / "model.keras")!r}, overwrite=True)
        """
    )
    assert (tmp_path / "start.weights.h5").exists()
    assert (tmp_path / "model.keras").read_text("utf-8") == "trained"


def test_the_arguments_are_those_after_two_dashes(load):
    source = "import sys\nnew_model().fit(x, y, int(sys.argv[1]))"
    assert load(source, arguments=["6"]).options == {"batch_size": 6}
    main = sys.modules["__main__"]
    with pytest.raises(IndexError):
        load(source)
    assert sys.modules["__main__"] is main


REFUSED = {
    "no fit": ("new_model()", "ended without calling fit"),
    "an exit": ("raise SystemExit(0)", "its first fit, with exit code 0. .*after --"),
    "a last word": ("raise SystemExit('no file')", "its first fit: no file. "),
    "batch by batch": ("new_model().train_on_batch(x, y)", "optimizer is applied"),
    "a tape": (
        """
        model = new_model()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        try:
            model.optimizer.apply_gradients(zip(gradients, weights))
        except Exception:
            pass
        """,
        "first fit: an optimizer is applied before it",
    ),
    "run": ("tfdp.auto_strategy().run(print)", "strategy.run is called"),
    "parts of batches": (
        "tfdp.auto_strategy().distribute_datasets_from_function(print)",
        "batches of one replica",
    ),
    "a thread": (
        """
        import threading
        thread = threading.Thread(target=lambda: new_model().fit(x, y))
        thread.start()
        thread.join()
        """,
        "fit is called in another thread",
    ),
    "a pool": (
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: new_model().fit(x, y)).result()
        """,
        "fit is called in another thread",
    ),
    "an empty dataset": (
        "new_model().fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(0))",
        "has no batch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_fit_gives_is_refused(case, load):
    source, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message) as raised:
        load(source)
    if case != "an empty dataset":
        assert "Define build_model() and make_data()" in str(raised.value)


def test_what_the_script_raises_is_raised(load):
    with pytest.raises(ZeroDivisionError):
        load("1 / 0")
    with pytest.raises(ValueError, match="Unrecognized data"):
        load("new_model().fit(object())")
    assert keras.Model.fit.__qualname__.endswith(".fit")


def test_a_model_whose_call_takes_no_batch_is_checked_and_planned(load):
    """Two models and two optimizers: only the train_step calls them on a batch."""
    found = load(
        """
        class Pair(keras.Model):
            def __init__(self):
                super().__init__()
                dense = keras.layers.Dense
                self.first = keras.Sequential([keras.Input((2,)), dense(3)])
                self.second = keras.Sequential([keras.Input((3,)), dense(1)])
                self.other = keras.optimizers.SGD(0.1)

            def call(self, hidden):
                return self.second(hidden)

            def train_step(self, batch):
                with tf.GradientTape(persistent=True) as tape:
                    predicted = self.second(self.first(batch))
                    loss = self.loss_of(tf.zeros_like(predicted), predicted)
                for part, optimizer in (
                    (self.first, self.optimizer), (self.second, self.other)
                ):
                    weights = part.trainable_variables
                    optimizer.apply(tape.gradient(loss, weights), weights)
                return {"loss": loss}

        pair = Pair()
        pair.compile(keras.optimizers.SGD(0.1))
        pair.loss_of = keras.losses.MeanSquaredError()
        pair.fit(tf.data.Dataset.from_tensor_slices(x / 20).batch(5))
        """
    )
    report = check_parity(found.build, found.data, make_strategy(2), steps=2)
    assert report.ok, str(report)
    planned = plan(found.build, found.data[0], replicas=2)
    # 3 x 2 + 3 and 3 + 1 float32 weights.
    assert planned.parts["weights"] == 13 * 4


def test_a_sync_between_hosts_is_left_out_by_check_and_by_plan(load):
    loaded = load("""
        with tfdp.auto_strategy(cpu_devices=2).scope():
            model = new_model()
            model.compile(
                tfdp.DistributedOptimizer(
                    keras.optimizers.SGD(0.1), sync=tfdp.sync.DiLoCo(every=2)
                ),
                "sparse_categorical_crossentropy",
            )
        model.fit(x, y, 4)
    """)
    batch = (np.zeros((4, 2), "float32"), np.zeros(4, "int64"))
    planned = plan(loaded.build, batch, replicas=2)
    assert [note for note in planned.notes if "sync has no effect on one host" in note]
    strategy = tfdp.auto_strategy()
    report = check_parity(loaded.build, loaded.data, strategy, steps=2)
    assert report.ok, str(report)
    assert "sync has no effect on one host" in str(report)
    with pytest.raises(ConfigurationError, match="Check the model without sync"):
        check_parity(loaded.build, loaded.data, make_strategy(2), steps=1)


def test_a_fit_that_prepares_its_data_prepares_them_once(load):
    """As KerasHub's, which tokenizes texts, and refuses tokens."""
    found = load("""
        class Scaled(keras.Sequential):
            def fit(self, x, y, **more):
                if not isinstance(x, np.ndarray) or x.max() <= 1:
                    raise TypeError("these data are scaled")
                return super().fit(x / 20, y, **more)

        model = Scaled([keras.Input((2,)), keras.layers.Dense(3)])
        model.compile("sgd", new_model().loss)
        model.fit(x, y, batch_size=5)
    """)
    expected = np.arange(20, dtype="float32").reshape(10, 2) / 20
    np.testing.assert_array_equal(found.data[0], expected)
    report = check_parity(
        found.build, found.data, make_strategy(2), steps=2, **found.options
    )
    assert report.ok, str(report)


def test_a_script_that_configures_its_output_runs_again(load):
    """What it prints from its second run on goes nowhere, as to a file."""
    found = load("""
        import sys
        sys.stdout.reconfigure(line_buffering=True)
        sys.stdout.buffer.write(b"bytes")
        print("from a child's handle", sys.stdout.fileno() > 0)
        new_model().fit(x, y)
    """)
    assert found.build().built


def test_a_script_that_cannot_run_twice_says_so(load, tmp_path, capsys):
    found = load(f"""
        import os
        os.mkdir({str(tmp_path / "run")!r})
        new_model().fit(x, y)
    """)
    with pytest.raises(ConfigurationError, match="failed when it was run again"):
        found.build()
    assert "FileExistsError" in capsys.readouterr().err


ENDS = {
    "a thread that waits": """
        import threading
        threading.Thread(target=threading.Event().wait).start()
        new_model().fit(x, y)
    """,
    "a handler that saves": """
        import atexit, pathlib
        atexit.register(pathlib.Path("trained.keras").write_text, "untrained")
        new_model().fit(x, y)
    """,
    "a loop that catches everything": """
        while True:
            try:
                new_model().fit(x, y)
                break
            except BaseException:
                pass
    """,
}


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("case", ENDS)
def test_a_command_ends_whatever_the_script_leaves_behind(case, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BEFORE + textwrap.dedent(ENDS[case]), "utf-8")
    done = run_python("-m", "tfdp", "plan", path, "--quick", cwd=tmp_path)
    assert not (tmp_path / "trained.keras").exists()
    if "loop" in case:
        assert done.returncode == 2
        assert "catches every exception of fit" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "at the peak of a step" in done.stdout
