"""The programs of the analysis whose rows see each other are exact by one line."""

import keras
import pytest

import tfdp
from tests.devices.test_lint_programs import differences, one_device, watched
from tests.support import lint_layers
from tests.support.lint_programs import BOUND, PROGRAMS, strategy_of

#: By `tfdp.losses.on_all_rows(model)`, after `compile`.
BY_MODEL = [
    *("Barlow twins", "class centres", "classes balanced", "concordance"),
    *("contrast both ways", "correlation class", "focal by positives"),
    *("hardest rows", "largest loss", "local_mean forgotten", "local_mean of a root"),
    *("local_mean of a sum", "mean discrepancy", "own rows forgotten", "ranked pairs"),
    *("root of mean, class", "scalar mean", "soft dice", "softmax over losses"),
    *("tilted", "unexplained variance", "variance hinge", "variance of losses"),
    *("weights by mean", "compute_loss: detector", "compute_loss: mean by hand"),
    *("compute_loss: penalty", "compute_loss: sure"),
    *("compute_loss: weights normalised", "metric: root, function"),
    *("metric: running maximum", "towers: GRU", "towers: LSTM", "towers: convolution"),
    *("towers: dense", "towers: embedding", "towers: hash", "towers: lookup"),
]
#: By `tfdp.layers.AllRows(layer)`.
BY_LAYER = [
    name
    for name, program in PROGRAMS.items()
    if name.startswith(("layer: ", "add_loss: ")) and program.kind in ("warn", "exact")
]
#: Right programs, which call `compute_loss`: the line changes nothing.
RIGHT = [
    name
    for name, program in PROGRAMS.items()
    if program.kind == "exact" and name not in BY_LAYER
]


def assert_exact(name):
    program = PROGRAMS[name]
    broken = name.removesuffix(", fixed")
    weights, reports = one_device(broken if broken in PROGRAMS else name)
    with pytest.MonkeyPatch.context() as patch:
        mark(patch, name)
        found, told = watched(program.run, strategy_of(program.replicas[0]))
    assert told == []
    assert differences(found[0], weights) <= BOUND
    assert differences(found[1], reports, relative=True) <= program.report_bound


def mark(patch, name):
    compile_model, applied = keras.Model.compile, lint_layers.Applied
    if name in BY_LAYER:
        patch.setattr(
            lint_layers, "Applied", lambda call: tfdp.layers.AllRows(applied(call))
        )
        return

    def compile_and_mark(model, *args, **kwargs):
        compile_model(model, *args, **kwargs)
        tfdp.losses.on_all_rows(model)

    patch.setattr(keras.Model, "compile", compile_and_mark)


@pytest.mark.worth_seconds(40)
@pytest.mark.parametrize("name", BY_MODEL)
def test_losses_and_metrics_are_exact_by_one_line(name):
    assert PROGRAMS[name].kind == "warn"
    assert_exact(name)


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("name", BY_LAYER)
def test_layers_are_exact_by_one_line(name):
    assert_exact(name)
