"""Reports, bounds and the table of causes of the parity check, without TensorFlow."""

import dataclasses
import json
import math
import re
import string

import numpy as np
import pytest

from tests.support.fresh_python import run_program
from tests.support.package_source import REPOSITORY
from tfdp.tools.testing import rounding
from tfdp.tools.testing.causes import (
    CHANGED_GRADIENTS,
    COMBINATIONS,
    FROM_FACTS,
    SEPARABLE,
    TOLD,
    TOO_LITTLE_MOVEMENT,
    UNKNOWN,
)
from tfdp.tools.testing.crashes import KNOWN, describe_error, explain_error
from tfdp.tools.testing.facts import CauseFacts
from tfdp.tools.testing.report import (
    HIDDEN_BY_DRAWS,
    INTENDED,
    MOST_EXCEEDING,
    Finding,
    ParityReport,
    VariableRow,
)

ROW = VariableRow(
    path="model/dense/kernel",
    shape=(3, 2),
    trainable=True,
    largest_difference=1e-8,
    bound=1e-7,
    movement=0.1,
    step=2,
    first_step_over=None,
    update_ratio=1.0,
)
OVER = dataclasses.replace(
    ROW, path="model/dense/bias", largest_difference=2e-3, first_step_over=1
)
STILL = dataclasses.replace(ROW, movement=0.0, largest_difference=0.0)
SILENT = dataclasses.replace(ROW, movement=5e-7)
FINDING = Finding("uneven batches", ("batch 2",), "holds when cut", "why so", "do that")
NOTHING = dataclasses.replace(FINDING, cause=TOO_LITTLE_MOVEMENT.name)
DRAWS = dataclasses.replace(FINDING, cause=HIDDEN_BY_DRAWS)


def report(*rows, **fields):
    return ParityReport("m", "Mirrored", 2, 2, (8, 5), 0, tuple(rows), **fields)


def test_frozen_variables_are_counted_in_one_line():
    frozen = dataclasses.replace(STILL, path="base/kernel", trainable=False)
    text = str(report(ROW, frozen, frozen))
    assert "base/kernel" not in text and "HOLDS: all 3 variables" in text
    assert "\n2 more, which are not trained, keep their values\n" in text
    # One that changes on a replica, or does not move though it should, has its row.
    moved = dataclasses.replace(frozen, largest_difference=0.1, first_step_over=1)
    assert "base/kernel" in str(report(ROW, moved)) and STILL.path in str(report(STILL))


def test_batch_normalization_alone_is_intended():
    norm = dataclasses.replace(FINDING, cause=INTENDED)
    alone = report(ROW, OVER, causes=(norm,))
    assert alone.is_intended and not alone.ok and alone.to_json()["is_intended"]
    last = str(alone).split("\n\n")[-1]
    assert last.startswith("HOLDS, but for batch normalization (intended): 1 of 2")
    for other in (
        report(ROW, OVER, causes=(norm, FINDING)),
        report(ROW, OVER),
        report(ROW, OVER, causes=(norm,), error="RuntimeError"),
    ):
        assert not other.is_intended
        assert "FAILS" in str(other)
    assert INTENDED in {cause.name for cause in SEPARABLE}


@pytest.mark.parametrize(
    "row, verdict, tells",
    [
        (ROW, "holds", True),
        (OVER, "exceeds", True),
        (STILL, "holds", False),
        (SILENT, "too small to tell", False),
    ],
)
def test_verdict_of_a_row(row, verdict, tells):
    assert (row.verdict, row.tells) == (verdict, tells)


@pytest.mark.parametrize(
    "rows, fields, verdict",
    [
        ([ROW, STILL, SILENT], {}, "HOLDS"),
        ([ROW, OVER], {}, "FAILS"),
        ([OVER, SILENT, SILENT], {}, "FAILS"),
        ([STILL, SILENT], {}, "INCONCLUSIVE"),
        ([SILENT], {"causes": (NOTHING,)}, "INCONCLUSIVE"),
        ([SILENT], {"causes": (FINDING,)}, "FAILS"),
        ([ROW, SILENT, SILENT], {}, "INCONCLUSIVE"),
        ([dataclasses.replace(ROW, trainable=False)], {}, "INCONCLUSIVE"),
        ([], {}, "INCONCLUSIVE"),
        ([ROW], {"error": "RuntimeError: no"}, "FAILS"),
        ([OVER, SILENT, SILENT], {"causes": (DRAWS,)}, "INCONCLUSIVE"),
        ([OVER], {"causes": (DRAWS, FINDING)}, "FAILS"),
        ([ROW], {"causes": (DRAWS,), "error": "RuntimeError: no"}, "FAILS"),
    ],
)
def test_a_report_has_one_of_three_verdicts(rows, fields, verdict):
    made = report(*rows, **fields)
    assert made.ok is (verdict == "HOLDS")
    assert made.inconclusive is (verdict == "INCONCLUSIVE")
    assert made.to_json()["inconclusive"] is made.inconclusive
    found = [word for word in ("HOLDS", "FAILS", "INCONCLUSIVE") if word in str(made)]
    assert found == [verdict]


def test_a_report_reads():
    text = str(report(ROW, OVER, causes=(FINDING,), notes=("switched off",)))
    lines = text.splitlines()
    assert "2 replicas of Mirrored against one device" in lines[0]
    assert "note: switched off" in lines
    columns = [line.index("1.0e-07") for line in lines if "1.0e-07" in line]
    assert len(columns) == 2 and len(set(columns)) == 1
    assert "EXCEEDS from step 1" in text
    assert "FAILS: 1 of 2 variables" in text and "model/dense/bias" in text
    assert lines[-4:] == [
        "cause: uneven batches: batch 2",
        "found by: holds when cut",
        "why: why so",
        "instead: do that",
    ]


def test_a_report_of_many_rows_that_exceed_shows_the_worst():
    over = [
        dataclasses.replace(OVER, path=f"weight{place}", bound=1e-7 * (place + 1))
        for place in range(MOST_EXCEEDING + 3)
    ]
    made = report(*over, ROW)
    text = str(made)
    assert text.count("EXCEEDS") == MOST_EXCEEDING and text.count("  holds") == 1
    assert "3 more exceed" in text and "--json" in text
    assert "weight0 " in text and over[-1].path not in text
    assert len(made.to_json()["rows"]) == len(over) + 1


def test_a_report_that_holds_counts_what_tells_nothing():
    assert "1 moved too little to be conclusive" in str(report(ROW, SILENT))


def test_json_has_verdicts_and_no_infinities():
    endless = dataclasses.replace(OVER, largest_difference=math.inf)
    plain = report(ROW, endless, causes=(FINDING,)).to_json()
    text = json.dumps(plain, allow_nan=False)
    assert json.loads(text)["rows"][1]["largest_difference"] == "inf"
    assert [row["verdict"] for row in plain["rows"]] == ["holds", "exceeds"]
    assert plain["rows"][0]["ratio"] == pytest.approx(0.1)
    assert plain["ok"] is False
    assert plain["causes"][0]["where"] == ["batch 2"]


def test_the_bound_is_its_formula():
    given = rounding.bound(
        spread=1e-6,
        step=3,
        largest_weight=2.0,
        travel=0.5,
        rows=16,
        variable_round_off=2.0**-24,
        compute_round_off=2.0**-11,
    )
    # 8 spread + 2 t u |w| + 2 sqrt(n) u travel
    assert given == pytest.approx(8e-6 + 12 * 2.0**-24 + 4 * 2.0**-11)


@pytest.mark.parametrize(
    "difference, bound, expected",
    [
        (0.0, 0.0, 0.0),
        (0.0, 1.0, 0.0),
        (2.0, 1.0, 2.0),
        (1e-9, 0.0, math.inf),
        (math.inf, 1.0, math.inf),
        (0.0, math.inf, math.inf),
        (math.inf, math.inf, math.inf),
    ],
)
def test_excess(difference, bound, expected):
    assert rounding.excess(difference, bound) == expected


def test_differences_that_are_not_finite_are_infinite():
    a = np.array([1.0, np.inf], "float32")
    assert rounding.largest_difference(a, a) == math.inf
    assert rounding.largest_difference(a[:1], np.zeros(1, "float32")) == 1.0
    assert rounding.largest_difference(a[:0], a[:0]) == 0.0


def test_a_nudge_moves_every_weight_by_one_rounding():
    weights = np.linspace(-2, 2, 64).astype("float32")
    moved = rounding.nudge(weights, 2.0**-24, np.random.default_rng(0))
    ulps = np.abs(moved - weights) / np.spacing(np.abs(weights))
    assert set(ulps.tolist()) <= {1.0, 2.0}  # two at a power of two, downwards
    assert len({moved[i] > weights[i] for i in range(64)}) == 2


FACTS = CauseFacts(
    replicas=3,
    batch_rows=(6, 7),
    optimizer="SGD",
    clipping=("clipnorm=1.0",),
    local_batch_norms=("a",),
    synchronized_batch_norms=("b",),
    masking_layers=("c",),
    drawing_layers=("d",),
    train_step="Mine",
    loss_functions=("f",),
    sample_weights=True,
    gradient_change="Clipped",
    gradient_advice="do that",
    half_precision=True,
    finite_on_one_device=False,
    finite_on_replicas=False,
    told="In a step of model 'm' rows meet",
    moved_enough=False,
)
INNOCENT = CauseFacts(replicas=3, batch_rows=(6, 9), optimizer="SGD")
CAUSES = {
    cause.name: cause
    for cause in (
        *FROM_FACTS,
        *SEPARABLE,
        CHANGED_GRADIENTS,
        *sum(COMBINATIONS, ()),
        TOLD,
        UNKNOWN,
    )
}


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_every_cause_has_its_words(cause):
    facts = FACTS
    if cause is TOO_LITTLE_MOVEMENT:  # gives way to one of the others
        facts = dataclasses.replace(FACTS, synchronized_batch_norms=())
    assert cause.where(facts) is not None
    for text in (cause.why, cause.instead, cause.evidence):
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name]
        assert set(fields) <= set(vars(FACTS))
        assert "{" not in text.format(**vars(FACTS))
    assert cause.why and cause.instead
    # The analysis of a step is evidence without an experiment.
    assert bool(cause.change or cause is CHANGED_GRADIENTS) == bool(cause.evidence)


@pytest.mark.parametrize(
    "cause", [*FROM_FACTS, *SEPARABLE, CHANGED_GRADIENTS], ids=lambda c: c.name
)
def test_a_cause_without_its_facts_is_none(cause):
    assert cause.where(INNOCENT) is None


def test_places():
    assert CAUSES["uneven batches"].where(FACTS) == ("batch 2 of 7 rows",)
    assert CAUSES["sum of local means"].where(FACTS) == ("Mine.train_step", "loss f")
    assert CHANGED_GRADIENTS.where(FACTS) == ("Mine.train_step",)
    assert CAUSES["means of means"].where(FACTS) == ("c", "sample_weight")


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.cause)
def test_known_errors_are_explained(known):
    found = explain_error(ValueError(f"lots of text, {known.piece}, and more"))
    assert (found.cause, found.instead) == (known.cause, known.instead)
    assert "ValueError" in found.evidence


def test_other_errors_are_told_as_they_are():
    assert explain_error(ValueError("my own")).cause == "training raises"
    assert describe_error(ValueError("a\n \x1b[1mbold\x1b[0m")) == "ValueError: a bold"
    assert len(describe_error(ValueError("long " * 500))) < 500


def test_reports_load_without_tensorflow():
    done = run_program(
        "import sys, tfdp.tools.testing.report, tfdp.tools.testing.causes\n"
        "print({'tensorflow', 'keras'} & set(sys.modules))\n"
    )
    assert done.stdout == "set()\n", done.stderr


def test_every_cause_is_on_the_page():
    page = (REPOSITORY / "docs" / "checking.md").read_text("utf-8")
    section = page.split("## The causes")[1].split("\n## ")[0]
    listed = re.findall(r"^\| ([a-z ]+) \|", section, re.M)
    assert set(listed) - {"cause"} == set(CAUSES)
