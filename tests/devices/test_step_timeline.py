"""A training step as a picture: the exchanges are found in it."""

import dataclasses

import keras
import pytest

import tfdp
from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.callbacks.timeline_page import draw_timeline, hidden_share
from tfdp.errors import ConfigurationError


@dataclasses.dataclass
class Op:
    thread: str
    name: str
    start_us: float
    duration_us: float


@pytest.mark.parametrize(
    "shard, drawn, absent",
    [
        ("none", ["sum"], ["gather", "scatter"]),
        ("parameters", ["gather", "scatter"], ["sum"]),
    ],
)
def test_a_step_is_drawn_with_its_exchanges(tmp_path, capsys, shard, drawn, absent):
    page = tmp_path / "step.html"
    with make_strategy(2, shard=shard).scope():
        model = dense_model()
        model.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    x, y = classification_data(96)
    timeline = tfdp.callbacks.StepTimeline(page, step=3)
    model.fit(x, y, batch_size=24, verbose=0, callbacks=[timeline])
    text = page.read_text()
    marks = {"sum": "all_reduce", "gather": "all_gather", "scatter": "reduce_scatter"}
    for kind in drawn:
        assert f"tfdp_{marks[kind]}/" in text
    for kind in absent:
        assert f"tfdp_{marks[kind]}/" not in text
    assert 0 <= timeline.hidden_share <= 1
    assert str(page) in capsys.readouterr().out


def test_the_hidden_share_counts_other_threads_once():
    ops = [
        Op("a", "x/tfdp_all_gather/Recv", 0, 10),
        Op("a", "x/MatMul:MatMul", 2, 3),  # the same thread hides nothing
        Op("b", "y/MatMul:MatMul", 4, 4),
        Op("c", "z/MatMul:MatMul", 6, 10),  # from 6 to 8 twice
    ]
    assert hidden_share(ops) == pytest.approx(0.6)
    assert hidden_share(ops[1:]) is None


def test_names_are_text_in_the_page():
    page = draw_timeline([Op("a", "<op> & more:Add", 5, 1)], "a < b")
    assert "&lt;op&gt; &amp; more:Add" in page and "a &lt; b" in page


@pytest.mark.parametrize("step", [0, 1, True, 2.0])
def test_the_first_step_is_refused(step):
    with pytest.raises(ConfigurationError, match="at least 2"):
        tfdp.callbacks.StepTimeline(step=step)
