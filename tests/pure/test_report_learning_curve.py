"""The learning curve: a picture for a person, with or without matplotlib."""

import importlib.util
import math
import re
import sys
import xml.etree.ElementTree

import pytest

from tfdp.errors import ConfigurationError
from tfdp.tools.report import write_learning_curve
from tfdp.tools.report.charts import ticks_between

_HISTORY = {
    "loss": [2.0, 1.0, 0.5],
    "val_loss": [2.5, 1.5, 1.0],
    "accuracy": [0.1, 0.5, 0.9],
}


class _History:
    history = _HISTORY


def _curves(page):
    """Of each panel: the points of each curve, as drawn."""
    panels = re.findall(r"<svg.*?</svg>", page, re.S)
    found = []
    for panel in panels:
        xml.etree.ElementTree.fromstring(panel)
        paths = re.findall(r'<path d="([^"]*)"', panel)
        found.append([re.findall(r"[ML]([\d.]+) ([\d.]+)", path) for path in paths])
    return found


@pytest.mark.parametrize("history", [_HISTORY, _History()])
def test_a_page_holds_every_curve(tmp_path, history):
    path = write_learning_curve(history, tmp_path / "new" / "curve.html", title="<a>")
    page = path.read_text("utf-8")
    loss, accuracy = _curves(page)
    assert [len(curve) for curve in loss] == [3, 3]
    assert [len(curve) for curve in accuracy] == [3]
    assert "&lt;a&gt;" in page
    assert "validation" in page
    assert "http" not in page
    assert [entry.name for entry in path.parent.iterdir()] == ["curve.html"]


def test_points_lie_where_the_values_are(tmp_path):
    path = write_learning_curve({"loss": [4.0, 1.0, 2.0]}, tmp_path / "c.html")
    (((x1, y1), (x2, y2), (x3, y3)),) = _curves(path.read_text("utf-8"))[0:1][0]
    # The y axis of a picture points down; points are drawn to a tenth of a pixel.
    assert float(x2) - float(x1) == pytest.approx(float(x3) - float(x2), abs=0.2)
    ratio = (float(y2) - float(y1)) / (float(y2) - float(y3))
    assert ratio == pytest.approx((4.0 - 1.0) / (2.0 - 1.0), abs=0.02)


def test_a_value_that_is_not_finite_leaves_a_gap(tmp_path):
    path = write_learning_curve(
        {"loss": [1.0, 0.5, math.nan, 0.3]}, tmp_path / "c.html"
    )
    drawn = re.search(r'<path d="([^"]*)"', path.read_text("utf-8"))[1]
    assert [command[0] for command in re.findall(r"[ML]\S+", drawn)] == list("MLM")


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [math.nan]])
def test_a_curve_without_a_range_is_drawn(tmp_path, values):
    path = write_learning_curve({"loss": values}, tmp_path / "c.html")
    assert len(_curves(path.read_text("utf-8"))) == 1


def test_a_png_is_drawn_by_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    # Other tests of the session may have imported it (Keras does).
    before = "matplotlib.pyplot" in sys.modules
    path = write_learning_curve(_HISTORY, tmp_path / "curve.png")
    assert path.name == "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_without_matplotlib_a_page_takes_its_place(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find_spec(name),
    )
    path = write_learning_curve(_HISTORY, tmp_path / "curve.png")
    assert path == tmp_path / "curve.html"
    assert [entry.name for entry in tmp_path.iterdir()] == ["curve.html"]


@pytest.mark.parametrize(
    ("history", "name", "message"),
    [
        (_HISTORY, "curve.jpg", r"\.png or \.html"),
        ({}, "c.html", "at least one epoch"),
        ({"loss": []}, "c.html", "at least one epoch"),
        (None, "c.html", "at least one epoch"),
        ({"loss": ["low"]}, "c.html", "'loss' must be numbers"),
    ],
)
def test_bad_input_is_refused(tmp_path, history, name, message):
    with pytest.raises(ConfigurationError, match=message):
        write_learning_curve(history, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 30.0, [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]),
        (-0.1, 0.12, [-0.1, -0.05, 0.0, 0.05, 0.1]),
        (970.0, 1000.0, [970.0, 975.0, 980.0, 985.0, 990.0, 995.0, 1000.0]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(low, high, expected):
    assert ticks_between(low, high) == pytest.approx(expected)
