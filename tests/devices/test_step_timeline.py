"""The trace of a training step: its format, and the exchanges in it."""

import dataclasses
import json

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.errors import ConfigurationError
from tfdp.tools.runs.traces import (
    ENDING,
    chrome_trace,
    hidden_share,
    kind_of,
    seconds_by_kind,
)


@dataclasses.dataclass
class Op:
    thread: str
    name: str
    start_us: float
    duration_us: float


def check_format(trace):
    """Checks the rules of the Trace Event Format for the two kinds of events in use."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "X":
            assert isinstance(event["cat"], str)
            for time_us in (event["ts"], event["dur"]):
                assert isinstance(time_us, (int, float)) and time_us >= 0
        else:
            assert event["ph"] == "M"
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
    # Each process and thread with events has one name.
    named = {
        what: [(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == what]
        for what in ("process_name", "thread_name")
    }
    rows = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert sorted(named["thread_name"]) == sorted(rows)
    pids = [pid for pid, _ in named["process_name"]]
    assert sorted(pids) == sorted({pid for pid, _ in rows})


def check_trace(trace, drawn, marks):
    """Checks names, the begin at 0, and that each exchange is found on each replica."""
    check_format(trace)
    events = trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"host, replica 0", "host, replica 1"} <= set(names.values())
    assert min(e["ts"] for e in complete) == 0
    for kind in drawn:
        ranks = {
            e["args"]["replica"]
            for e in complete
            if f"tfdp_{marks[kind]}/" in e["name"] and e["cat"].startswith(kind)
        }
        assert ranks == {0, 1}


def test_a_host_among_several_names_its_replicas():
    ops = [
        Op("a", "StatefulPartitionedCall/replica_1/dense/MatMul:MatMul", 5.0, 2.0),
        Op("b", "StatefulPartitionedCall/dense/MatMul:MatMul", 4.0, 1.0),
        Op("b", "IteratorGetNext:IteratorGetNext", 3.0, 1.0),
    ]
    trace = json.loads(chrome_trace(ops, steps="step 5", host=1, hosts=2, first_rank=2))
    check_format(trace)
    assert trace["otherData"] == {"steps": "step 5"}
    events = trace["traceEvents"]
    assert [e["args"]["replica"] for e in events if e["ph"] == "X"] == [3, 2, None]
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {"host 1, input", "host 1, replica 2", "host 1, replica 3"}
    times = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert times == [(2.0, 2.0), (1.0, 1.0), (0.0, 1.0)]


def test_a_run_that_is_too_short_says_so(tmp_path, capsys):
    model = dense_model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    timeline = tfdp.callbacks.StepTimeline(tmp_path / "step.trace.json")
    x, y = classification_data(96)
    model.fit(x, y, batch_size=24, verbose=0, callbacks=[timeline])
    said = capsys.readouterr().out
    assert "after 4 steps, and StepTimeline(step=5) waits for step 5" in said
    assert "Use StepTimeline(step=4)" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "shard, drawn, absent",
    [
        ("none", ["sum"], ["gather", "scatter"]),
        ("parameters", ["gather", "scatter"], ["sum"]),
    ],
)
def test_a_step_is_traced_with_its_exchanges(tmp_path, capsys, shard, drawn, absent):
    path = tmp_path / "step.trace.json"
    with make_strategy(2, shard=shard).scope():
        model = dense_model()
        model.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    x, y = classification_data(96)
    timeline = tfdp.callbacks.StepTimeline(path, step=3)
    model.fit(x, y, batch_size=24, verbose=0, callbacks=[timeline])
    text = path.read_text()
    marks = {"sum": "all_reduce", "gather": "all_gather", "scatter": "reduce_scatter"}
    for kind in drawn:
        assert f"tfdp_{marks[kind]}/" in text
    for kind in absent:
        assert f"tfdp_{marks[kind]}/" not in text
    assert 0 <= timeline.hidden_share <= 1
    out = capsys.readouterr().out
    assert str(path) in out and "https://ui.perfetto.dev" in out
    check_trace(json.loads(text), drawn, marks)
    assert timeline.seconds["update of weights"] > 0
    assert timeline.seconds["computing"] > 0
    for kind in ("gather of weights", "scatter of gradients", "sum of gradients"):
        is_there = any(kind.startswith(word) for word in drawn)
        assert (timeline.seconds[kind] > 0) == is_there


@pytest.mark.parametrize(
    "step, drawn",
    [
        (2, (4, 6)),  # TensorFlow traces in the execution of steps 1 to 3
        (5, (4, 6)),
        (8, (7, 8)),  # an epoch has 8 steps: its last execution has 2
        (9, (9, 11)),
    ],
)
def test_steps_that_run_together_are_traced_together(tmp_path, capsys, step, drawn):
    path = tmp_path / "step.trace.json"
    with make_strategy(1).scope():
        model = dense_model()
        model.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
            steps_per_execution=3,
        )
    timeline = tfdp.callbacks.StepTimeline(path, step=step)
    x, y = classification_data(32)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[timeline])
    assert timeline.traced_steps == drawn
    words = f"steps {drawn[0]} to {drawn[1]}"
    assert json.loads(path.read_text())["otherData"] == {"steps": words}
    assert f"timeline of {words}" in capsys.readouterr().out


def test_the_hidden_share_counts_other_threads_once():
    ops = [
        Op("a", "x/tfdp_all_gather/Recv", 0, 10),
        Op("a", "x/MatMul:MatMul", 2, 3),  # the same thread hides nothing
        Op("b", "y/MatMul:MatMul", 4, 4),
        Op("c", "z/MatMul:MatMul", 6, 10),  # from 6 to 8 twice
    ]
    assert hidden_share(ops) == pytest.approx(0.6)
    assert hidden_share(ops[1:]) is None


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())


class OwnOptimizers(keras.Model):
    """As a GAN's: nothing is given to compile."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(5)
        self.adam = keras.optimizers.Adam()

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tfdp.losses.local_mean(tf.square(self(x)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.adam.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    "build, optimizer",
    [
        (dense_model, scaled),
        (dense_model, lambda: tfdp.DistributedOptimizer(keras.optimizers.Adam())),
        (OwnOptimizers, lambda: None),
    ],
)
def test_the_update_of_any_optimizer_is_timed(tmp_path, build, optimizer):
    with make_strategy(2).scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, jit_compile=False)
    timeline = tfdp.callbacks.StepTimeline(tmp_path / "step.trace.json", step=3)
    x, y = classification_data(96)
    model.fit(x, y, batch_size=24, verbose=0, callbacks=[timeline])
    assert timeline.seconds["update of weights"] > 0


@pytest.mark.parametrize(
    "name, kind",
    [
        ("StatefulPartitionedCall/adam/update_0/Mul_3:Mul", "update of weights"),
        ("StatefulPartitionedCall/replica_1/adam_2/Sub_28:Sub", "update of weights"),
        # In a function that replicas share.
        ("adam/Sub_122:Sub", "update of weights"),
        ("adamant/MatMul:MatMul", "computing"),
        ("StatefulPartitionedCall/adam/tfdp_all_gather/concat", "gather of weights"),
        ("gradient_tape/model/adamant/MatMul:MatMul", "computing"),
    ],
)
def test_ops_are_known_by_their_scopes(name, kind):
    assert kind_of(name, ["adam"]) == kind
    assert seconds_by_kind([Op("a", name, 0, 2e6)], ["adam"])[kind] == 2.0


@pytest.mark.parametrize("step", [0, 1, True, 2.0])
def test_the_first_step_is_refused(step):
    with pytest.raises(ConfigurationError, match="at least 2"):
        tfdp.callbacks.StepTimeline(step=step)


def test_a_path_that_cannot_be_is_refused_before_training(tmp_path):
    model = dense_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = classification_data(8)
    taken = tmp_path / f"taken{ENDING}"
    taken.mkdir()
    for path in (tmp_path / "missing" / f"x{ENDING}", taken):
        timeline = tfdp.callbacks.StepTimeline(path)
        with pytest.raises(ConfigurationError, match="^StepTimeline: path "):
            model.fit(x, y, verbose=0, callbacks=[timeline])


@pytest.mark.parametrize("path", ["timeline.html", "/dev/full", "", "trace.json"])
def test_a_path_with_another_ending_is_refused(path):
    with pytest.raises(ConfigurationError, match=r"must end in \.trace\.json"):
        tfdp.callbacks.StepTimeline(path)
