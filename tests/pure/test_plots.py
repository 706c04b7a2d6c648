"""Charts and bars of pages: every value is drawn, and every text is only text."""

import math
import re

import pytest

from tests.support.pictures import pictures_in
from tfdp.tools.report.plots import Chart, draw_bars, draw_chart, thinned

HOSTILE = "<script>alert(1)</script>&\"' $\\frac$ _x"
NUMBER = r"(-?[\d.]+)"


def curves(picture):
    """Of each line: its commands, as (letter, x, y)."""
    lines = re.findall(r'<g id="line2d_\d+">\s*<path d="([^"]*)" clip-path', picture)
    commands = [re.findall(f"([ML]) {NUMBER} {NUMBER}", line) for line in lines]
    return [[(c, float(x), float(y)) for c, x, y in line] for line in commands]


def test_points_lie_where_the_values_are():
    [picture] = pictures_in(
        draw_chart(Chart("a", {"": [(1, 4.0), (2, 1.0), (3, 2.0)]}, "epoch"))
    )
    [(_, x1, y1), (_, x2, y2), (_, x3, y3)] = curves(picture)[-1]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.01)
    # The y axis of a picture points down.
    assert (y2 - y1) / (y2 - y3) == pytest.approx(3.0, abs=0.01)


def test_a_value_that_is_not_finite_leaves_a_gap():
    points = [(1.0, 1.0), (2.0, 0.5), (3.0, math.nan), (4.0, 0.3), (5.0, 0.2)]
    [picture] = pictures_in(draw_chart(Chart("a", {"": points}, "s")))
    assert [command for command, *_ in curves(picture)[-1]] == list("MLML")


@pytest.mark.parametrize("low, high", [(-1e308, 1e308), (5e-324, 5e-324), (0, 1e249)])
def test_values_of_any_size_are_drawn(low, high):
    chart = Chart("a", {"": [(1, low), (2, high)]}, "steps", from_zero=True)
    assert len(pictures_in(draw_chart(chart))) == 1


def test_names_of_places_are_evenly_spaced():
    points = [("1", 1.0), ("16", 2.0), ("16k", 3.0)]
    [picture] = pictures_in(draw_chart(Chart("a", {"": points}, "devices")))
    [(_, x1, _), (_, x2, _), (_, x3, _)] = curves(picture)[-1]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.01) and ">16k</text>" in picture


def test_a_start_is_marked_and_lines_are_named():
    lines = {"_one": [(1.0, 1.0), (2.0, 2.0)], "two": [(1.0, 2.0), (2.0, 1.0)]}
    drawn = draw_chart(Chart("a", lines, "s", restarts=[1.5]))
    [picture] = pictures_in(drawn)
    assert ">_one</text>" in picture and ">two</text>" in picture
    assert "stroke-dasharray" in picture and "started again" in drawn


def test_bars_hold_every_part_the_limit_and_ranges():
    bars = [("plan", "3 MB", {"weights": 2.0, "slots": 1.0}), ("none", "failed", {})]
    colours = {"weights": "#1f5fa8", "slots": "#7a4fa0"}
    drawn = draw_bars(
        *("Memory", bars, colours, "MB"),
        limit=("memory: 2 MB", 2.0),
        ranges={"plan": (1, 2)},
    )
    assert "plan, 3 MB: weights 2 MB, slots 1 MB; none, failed: " in drawn
    [picture] = pictures_in(drawn)
    for text in ("plan: 3 MB", "none: failed", "weights", "memory: 2 MB", "MB"):
        assert f">{text}</text>" in picture
    for colour in ("#1f5fa8", "#7a4fa0", "#aa0000", "#000000"):
        assert colour in picture


def test_names_are_text():
    drawn = draw_chart(Chart(HOSTILE, {HOSTILE: [(1, 1.0)], "b": [(1, 2.0)]}, "epoch"))
    drawn += draw_bars(HOSTILE, [(HOSTILE, HOSTILE, {"a": 0.0})], {"a": "red"}, "s")
    for picture in pictures_in(drawn):
        assert "&lt;script&gt;" in picture and "$\\frac$" in picture


def test_thinned_points_are_means():
    assert thinned([(1, 1.0), (2, 3.0), (3, 5.0)], most=2) == [(2, 2.0), (3, 5.0)]
