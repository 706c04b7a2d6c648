"""One entry: what `auto_strategy` makes, what it refuses, what it says."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.fresh_python import run_program
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.errors import ConfigurationError, DeviceError
from tfdp.strategies.in_words import (
    FirstFitNotice,
    describe_strategy,
    without_fit_message,
)


def test_every_option_has_a_type_and_a_default():
    annotations = tfdp.auto_strategy.__annotations__
    assert "Any" not in annotations.values()
    assert {"shard", "communication", "cpu_devices", "return"} <= set(annotations)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shrad'"):
        tfdp.auto_strategy(shrad="optimizer")


def test_options_reach_the_strategy():
    strategy = tfdp.auto_strategy(
        shard=tfdp.Sharding("optimizer", group="host", min_bytes=7),
        communication=tfdp.Communication(engine="tensorflow"),
        draws_per_replica=False,
        pad_batches=16,
        cpu_devices=4,
    )
    assert (strategy.shard, strategy.shard_min_bytes) == ("optimizer", 7)
    assert (strategy.engine_name, strategy.pad_batches) == ("tensorflow", 16)
    assert not strategy.extended._draws_per_replica
    # On one host those of a host are all.
    assert tfdp.auto_strategy(shard="optimizer", shard_group="host").shard != "none"


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"wire_dtype": "bfloat16"}, ConfigurationError, "on one host: .*TPU"),
        ({"cpu_devices": 0}, ConfigurationError, "cpu_devices must be None or an int"),
        ({"devices_per_host": True}, ConfigurationError, "devices_per_host must be"),
        ({"cpu_devices": 3}, DeviceError, "already started with 4 logical"),
        ({"devices_per_host": 3}, DeviceError, "already started with 4 logical"),
        ({"shard_group": "some"}, ConfigurationError, "shard_group must be"),
        ({"draws_per_replica": "no"}, ConfigurationError, "must be True or False"),
        (
            {"communication": tfdp.Communication},
            ConfigurationError,
            r"call it: Communication\(\)",
        ),
    ],
)
def test_what_cannot_act_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        tfdp.auto_strategy(**options)


def test_a_tpu_refuses_what_is_of_hosts(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    with pytest.raises(ConfigurationError, match="on a TPU: the cores keep"):
        tfdp.auto_strategy(offload="optimizer", shard="optimizer", cpu_devices=2)


def test_several_hosts_refuse_what_is_of_one(monkeypatch):
    monkeypatch.setenv("TFDP_WORKERS", "2")
    monkeypatch.setenv("TFDP_RANK", "1")
    monkeypatch.setenv("TFDP_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="on 2 hosts: hosts take short"):
        tfdp.auto_strategy(pad_batches=True)


def test_the_devices_that_a_launcher_asks_of_one_worker(monkeypatch):
    monkeypatch.setenv("TFDP_WORKERS", "1")
    monkeypatch.setenv("TFDP_RANK", "0")
    monkeypatch.setenv("TFDP_DEVICES_PER_WORKER", "4")
    # Not 2, for which it is too late.
    assert tfdp.auto_strategy(cpu_devices=2).num_replicas_in_sync == 4


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: tfdp.DataParallelStrategy(["CPU:0", "CPU:2"]),
            "DataParallelStrategy(2 replicas: CPU:0, CPU:2; engine in_process)",
        ),
        (
            lambda: tfdp.DataParallelStrategy(["CPU:3"], shard=1, offload="optimizer"),
            "DataParallelStrategy(1 replica: CPU:3; engine in_process; "
            "shard optimizer)",
        ),
        (
            lambda: tfdp.auto_strategy(
                communication=tfdp.Communication(engine="tensorflow")
            ),
            "DataParallelStrategy(4 replicas: CPU:0, CPU:1, CPU:2, CPU:3; engine "
            "tensorflow (TensorFlow's ring))",
        ),
        (
            lambda: StandInStrategy(2),
            "StandInStrategy(2 replicas: CPU:0, CPU:1; engine cross_replica_sum)",
        ),
    ],
)
def test_the_repr_tells(make, words):
    assert repr(make()) == words


def test_many_devices_are_given_as_a_range():
    devices = [f"/job:worker/task:1/device:GPU:{number}" for number in range(8)]
    assert describe_strategy("S", devices, hosts=2, engine="tensorflow (NCCL)") == (
        "S(16 replicas on 2 hosts, here GPU:0 to GPU:7; engine tensorflow (NCCL))"
    )


def fitted(strategy, **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    x = np.arange(24, dtype="float32").reshape(8, 3)
    for _ in range(2):
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
    model.evaluate(x, x[:, :1], verbose=0)


def test_the_first_fit_says_it_once(monkeypatch, capfd):
    monkeypatch.setattr(FirstFitNotice, "_said", set())
    strategy = tfdp.DataParallelStrategy(["CPU:1", "CPU:3"])
    fitted(strategy)
    said = f"tfdp: {strategy!r}\n"
    assert capfd.readouterr().err.count(said) == 1
    # Another one that is alike, as in a cross-validation, and one that is not.
    fitted(tfdp.DataParallelStrategy(["CPU:1", "CPU:3"]))
    assert "tfdp:" not in capfd.readouterr().err
    fitted(tfdp.DataParallelStrategy(["CPU:1"]))
    assert "(1 replica: CPU:1;" in capfd.readouterr().err


def test_trainings_that_only_compare_say_nothing(monkeypatch, capfd):
    monkeypatch.setattr(FirstFitNotice, "_said", set())
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:2"])
    with without_fit_message():
        fitted(strategy)
    assert "tfdp:" not in capfd.readouterr().err
    fitted(strategy)
    assert "tfdp: DataParallelStrategy(2 rep" in capfd.readouterr().err


def test_input_that_each_replica_makes_does_not_hide_it(monkeypatch, capfd):
    monkeypatch.setattr(FirstFitNotice, "_said", set())
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"])
    x = tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.ones((4, 1)))).repeat(8)
    batches = strategy.distribute_datasets_from_function(lambda _: x)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)
    assert capfd.readouterr().err.count("tfdp: DataParallelStrategy(2 rep") == 1


# What acts between hosts only, by the value that a strategy of one host takes for it.
BETWEEN_HOSTS = [
    ("wire_dtype", "float16", None),
    ("compression", tfdp.compression.Int8(), None),
    ("min_hosts", 2, None),
    ("checksum", True, False),
    ("engine", "sockets", "auto"),
    ("engine", "mpi", "auto"),
]


@pytest.mark.parametrize("option, given, taken", BETWEEN_HOSTS)
def test_options_between_hosts_have_no_effect_on_one(option, given, taken):
    """Elsewhere (`test_option_places.py`) a strategy made by name refuses them."""
    communication = tfdp.Communication(**{option: given, "bucket_bytes": 7})
    strategy = tfdp.auto_strategy(communication=communication)
    assert strategy.communication == tfdp.Communication(bucket_bytes=7)
    assert getattr(strategy.communication, option) == taken
    (line,) = strategy.idle_lines
    assert line.startswith(f"{option} has no effect on one host: ")


@pytest.mark.parametrize(
    "options",
    [
        {"compression": tfdp.compression.Int8(), "compression_across": "replicas"},
        {"compression": tfdp.compression.Int8(), "hierarchy": (2, 2)},
        {"engine": "tensorflow", "timeout_seconds": 7, "repeated_rows": "sum"},
    ],
)
def test_options_that_act_on_one_host_do(options):
    communication = tfdp.Communication(**options)
    strategy = tfdp.auto_strategy(communication=communication)
    assert strategy.communication == communication
    assert strategy.idle_lines == ()


def auto_on_a_tpu(monkeypatch, **options):
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    monkeypatch.setattr(
        "tfdp.strategies.tpu.TPUDataParallelStrategy",
        lambda address, **options: StandInStrategy(2, **options),
    )
    return tfdp.auto_strategy(communication=tfdp.Communication(**options))


def test_options_between_hosts_have_no_effect_on_a_tpu(monkeypatch):
    options = {"wire_dtype": "bfloat16", "engine": "mpi", "min_hosts": 1}
    strategy = auto_on_a_tpu(monkeypatch, **options, timeout_seconds=7)
    names = [line.split(" has no effect on a TPU: ")[0] for line in strategy.idle_lines]
    assert sorted(names) == sorted(options)  # a deadline is kept where nobody is late
    with pytest.raises(ConfigurationError, match="hierarchy='flat'.*on a TPU"):
        auto_on_a_tpu(monkeypatch, wire_dtype="bfloat16", hierarchy="flat")


@pytest.mark.worth_seconds(10)
def test_hosts_that_train_apart_are_one_host(monkeypatch, capfd):
    """On one host the script of docs/local-sgd.md trains as without `sync`."""
    monkeypatch.setattr(FirstFitNotice, "_said", set())
    draw = np.random.default_rng(3)
    x, y = (draw.standard_normal((24, n)).astype("float32") for n in (3, 1))
    weights = []
    for sync in (None, tfdp.sync.DiLoCo(every=2, start_step=1)):
        keras.utils.set_random_seed(3)
        strategy = tfdp.auto_strategy(
            communication=tfdp.Communication(min_hosts=1, timeout_seconds=60)
        )
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            inner = keras.optimizers.SGD(0.1, momentum=0.5)
            optimizer = tfdp.DistributedOptimizer(inner, sync=sync)
            optimizer.build(model.trainable_variables)
            model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    # The same graph of the same numbers.
    np.testing.assert_array_equal(*weights)
    said = capfd.readouterr().err
    for option in ("min_hosts", "sync"):
        assert said.count(f"tfdp: {option} has no effect on one host: ") == 1
    # A file of the model trains hosts apart again where there are several.
    assert optimizer.get_config()["sync"] == sync.get_config()


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: tfdp.DataParallelStrategy(),
            "across='hosts' lets hosts train locally",
        ),
        (lambda: StandInStrategy(2), "StandInStrategy cannot"),
    ],
)
def test_a_strategy_made_by_name_refuses_hosts_that_train_apart(make, words):
    with make().scope():
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.SGD(), sync=tfdp.sync.LocalSGD(2)
        )
        with pytest.raises(ConfigurationError, match=words):
            optimizer.build([keras.Variable(np.zeros(3, "float32"))])


def test_simulated_hosts_train_apart():
    strategy = tfdp.auto_strategy(communication=tfdp.Communication(hierarchy=(2, 2)))
    with strategy.scope():
        sync = tfdp.sync.LocalSGD(2)
        optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync)
        optimizer.build([keras.Variable(np.zeros(3, "float32"))])
    assert optimizer.sync == sync and strategy.idle_lines == ()


UNUSED = """
import contextlib
import sys
import keras
import numpy as np
import tfdp
tfdp.quiet()
strategy = tfdp.auto_strategy(cpu_devices=2)
with {scope}:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
{before}
model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
{after}
"""
NEVER_USED = "(2 replicas: CPU:0, CPU:1; engine in_process) was made and never used"


def errors_of(scope="contextlib.nullcontext()", before="", after=""):
    done = run_program(UNUSED.format(scope=scope, before=before, after=after))
    assert (done.returncode == 0) == (not before + after), done.stderr
    return done.stderr


@pytest.mark.worth_seconds(6)
def test_a_model_made_outside_of_the_scope_is_told_at_its_first_fit():
    program = {"before": "print('now', file=sys.stderr)", "after": ""}
    told = run_program(UNUSED.format(scope="contextlib.nullcontext()", **program))
    before, _, after = told.stderr.partition("now\n")
    assert "tfdp: " not in before
    assert "the model 'sequential' trains on one device" in after
    assert "    with strategy.scope():\n        model = ...  # also keras" in after
    assert after.count("tfdp: ") == 1  # not again at the end


@pytest.mark.worth_seconds(10)
def test_another_model_made_outside_of_the_scope_is_told_once():
    """Also where the strategy trains one that was made in its scope."""
    fit = "model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)"
    leave = (
        f"{fit}\nmodel = keras.models.clone_model(model)\nmodel.compile('sgd', 'mse')"
    )
    leave += "\nprint('now', file=sys.stderr)"
    program = UNUSED.format(scope="strategy.scope()", before=leave, after=fit)
    before, _, after = run_program(program).stderr.partition("now\n")
    assert "on one device" not in before
    assert after.count("trains on one device, not under DataParallelStrategy(2") == 1
    assert "A model that is to train alone needs no change." in after


@pytest.mark.worth_seconds(6)
def test_a_strategy_that_no_loop_used_is_said_at_the_end():
    loop = UNUSED.replace("model.fit(", "model.train_on_batch(")
    loop = loop.replace(", batch_size=4, verbose=0)", ")")
    form = {"scope": "contextlib.nullcontext()", "before": "", "after": ""}
    assert NEVER_USED in run_program(loop.format(**form)).stderr


@pytest.mark.worth_seconds(6)
def test_a_program_that_exits_before_it_trains_says_nothing_of_it():
    assert errors_of(before="sys.exit('no data')").endswith("no data\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [{"scope": "strategy.scope()"}, {"after": "raise RuntimeError('mine')"}]
)
def test_a_program_that_uses_it_or_fails_says_nothing_of_it(program):
    assert "never used" not in errors_of(**program)


QUIET = """
import tfdp
{quiet}
import keras
import numpy as np
with tfdp.auto_strategy(cpu_devices=2).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 3), "float32")
model.fit(x, x[:, :1], batch_size=4, verbose=0)
{late}
"""


def own_lines(quiet, late=""):
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", QUIET.format(quiet=quiet, late=late)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.worth_seconds(6)
def test_quiet_leaves_what_is_the_programs_own():
    out, err = own_lines("tfdp.quiet()", "tfdp.quiet()")
    assert out == []
    assert err == [
        "tfdp: DataParallelStrategy(2 replicas: CPU:0, CPU:1; engine in_process)"
    ]


@pytest.mark.slow
def test_quiet_after_tensorflow_is_too_late():
    _, err = own_lines("", "tfdp.quiet()")
    assert any("TooLateWarning: tfdp.quiet() was called after" in line for line in err)
