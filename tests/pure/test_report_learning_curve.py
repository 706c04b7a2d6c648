"""The learning curve: a picture for a person, drawn by matplotlib."""

import math
import sys

import pytest

from tfdp.errors import ConfigurationError, MissingDependencyError
from tfdp.tools.report import write_learning_curve
from tfdp.tools.report.learning_curve import _charts

_HISTORY = {
    "loss": [2.0, 1.0, 0.5],
    "val_loss": [2.5, 1.5, 1.0],
    "accuracy": [0.1, 0.5, 0.9],
}


class _History:
    history = _HISTORY


@pytest.mark.parametrize("history", [_HISTORY, _History()])
def test_a_panel_holds_training_and_validation(history):
    loss, accuracy = _charts(history)
    assert loss.lines == {
        "training": [(1, 2.0), (2, 1.0), (3, 0.5)],
        "validation": [(1, 2.5), (2, 1.5), (3, 1.0)],
    }
    assert accuracy.lines == {"training": [(1, 0.1), (2, 0.5), (3, 0.9)]}


@pytest.mark.parametrize(
    "name, beginning", [("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml")]
)
def test_a_file_is_drawn_without_a_window(tmp_path, name, beginning):
    # Other tests of the session may have imported it (Keras does).
    before = "matplotlib.pyplot" in sys.modules
    path = write_learning_curve(_HISTORY, tmp_path / "new" / name, title="<a> $x$")
    assert path.read_bytes().startswith(beginning)
    assert [entry.name for entry in path.parent.iterdir()] == [name]
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [math.nan], [1.0, math.nan, 2]])
def test_a_curve_without_a_range_is_drawn(tmp_path, values):
    path = write_learning_curve({"loss": values}, tmp_path / "c.svg")
    assert ">loss</text>" in path.read_text("utf-8")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tfdp\[plots\]'"):
        write_learning_curve(_HISTORY, tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("history", "name", "message"),
    [
        (_HISTORY, "curve.jpg", r"\.png or \.svg"),
        ({}, "c.svg", "at least one epoch"),
        ({"loss": []}, "c.svg", "at least one epoch"),
        (None, "c.svg", "at least one epoch"),
        ({"loss": ["low"]}, "c.svg", "'loss' must be numbers"),
    ],
)
def test_bad_input_is_refused(tmp_path, history, name, message):
    with pytest.raises(ConfigurationError, match=message):
        write_learning_curve(history, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
