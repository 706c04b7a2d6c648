"""Twenty scripts as users of Keras write them: `tfdp check` has a verdict of each.

They are in tests/support/everyday. Where replicas compute what one device does not, the
cause is named.
"""

import sys
import warnings

import pytest

from tests.support import slow_rows
from tests.support.package_source import REPOSITORY
from tests.support.parity import make_strategy
from tfdp.errors import LocalMeanWarning
from tfdp.testing import check_parity
from tfdp.tools.commands.check_target import ScriptRun, load_target, parse_target

SCRIPTS = REPOSITORY / "tests" / "support" / "everyday"
ROWS = "rows of a batch depend on each other"
CAUSES = {
    # Each image's Dice would be its own; this one is of all pixels of a batch.
    "segmentation": [ROWS],
    # A mean taken in `train_step`, of a row against its replica's rows only.
    "simclr": ["sum of local means", ROWS],
    "speech": ["batch normalization per replica"],
    "vae": ["sum of local means"],
}
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
#: What takes a few seconds each.
QUICK = ("detector", "diffusion", "multi_task", "triplets", "vae")


def test_there_are_twenty():
    assert len(NAMES) == 20 and set(CAUSES) | set(QUICK) <= set(NAMES)


@pytest.mark.worth_seconds(60)
@pytest.mark.filterwarnings("ignore::tfdp.errors.LocalStateWarning")
@pytest.mark.parametrize("name", slow_rows.covering(NAMES, QUICK))
def test_a_script_has_a_verdict_and_its_cause(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    target = parse_target(str(SCRIPTS / f"{name}.py"), ())
    expected = CAUSES.get(name, [])
    with warnings.catch_warnings():
        if expected:
            warnings.simplefilter("ignore", LocalMeanWarning)
        found = load_target(target, ScriptRun(lambda: make_strategy(2), 2, 4))
        report = check_parity(found.build, found.data, 2, **found.options)
    assert not report.inconclusive and not report.error, str(report)
    assert [finding.cause for finding in report.causes] == expected, str(report)
    assert report.ok == (not expected)
    assert report.is_intended == (name == "speech")
