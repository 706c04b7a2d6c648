"""Makes the test world: four logical CPU devices, set once, before TensorFlow starts.

Logical devices can only be made before the runtime starts, so the first thing the
test session does is to make them. `tests/pure` never imports TensorFlow: the split
happens in `tests/devices/conftest.py`.
"""

import dataclasses
import gc
import os
import pathlib

import pytest

from tests.support import affected, newer_keras, slow_rows, tiers
from tests.support.startup import sitecustomize  # the same for this process

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Python runs the `sitecustomize` that it finds there, in all that is started.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(
        None,
        [
            str(pathlib.Path(sitecustomize.__file__).parent),
            os.environ.get("PYTHONPATH"),
        ],
    )
)


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=tiers.TIERS,
        default="test",
        help="how much of the tests: see tests/support/tiers.py. Files and tests that "
        "are named run whole, but for the rows marked slow",
    )
    parser.addoption(
        "--piece", default="1/1", metavar="K/N", help="the K-th of N parts of the rows"
    )


DRAW = pytest.StashKey[tiers.Draw]()


def pytest_configure(config):
    slow_rows.wanted = config.getoption("--tier") in ("rest", "all")
    given = getattr(config, "workerinput", {}).get("draw")
    config.stash[DRAW] = tiers.Draw(**given) if given else draw(config)


def draw(config):
    """What the rows are drawn by; once for all processes of xdist."""
    if config.getoption("--tier") not in ("test", "rest"):
        return tiers.Draw(0)
    number = tiers.round_of_commit()
    if all(".py" in arg for arg in config.args):  # they run whole
        return tiers.Draw(number)
    changed = tiers.changed_files()
    tools = tiers.has_changed_tools(changed)
    return tiers.Draw(number, affected.nearness(changed), tools)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["draw"] = dataclasses.asdict(node.config.stash[DRAW])


def pytest_report_header(config):
    if config.getoption("--tier") in ("test", "rest"):
        return str(config.stash[DRAW])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure names what its row was drawn by, and how it runs again."""
    report = yield
    if report.failed and item.config.getoption("--tier") == "test":
        number = item.config.stash[DRAW].number
        again = (
            f"python -m pytest '{item.nodeid}'\nall rows that were drawn with it: "
            f"{tiers.SEED_VARIABLE}={number} make test"
        )
        report.sections.append(("this row again", again))
    return report


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_garbage():
    """After a file: what is left stays, so that nobody looks at it again.

    TensorFlow keeps so much that a search through all of it takes seconds.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    expect_changes(items)
    number, of = map(int, config.getoption("--piece").split("/"))
    if not 1 <= number <= of:
        raise pytest.UsageError("--piece must be K/N with K from 1 to N")
    keep(config, items, rows_of_tier(config, items))
    if config.getoption("--tier") == "test":
        items.sort(key=lambda item: config.stash[DRAW].distance(item.nodeid))
    # Rows that stand together share what takes long to make.
    first, end = (len(items) * edge // of for edge in (number - 1, number))
    keep(config, items, {item.nodeid for item in items[first:end]})


def expect_changes(items):
    """Marks the tests that fail with a newer Keras for a known reason."""
    for item in items:
        change = newer_keras.change_of(item.nodeid)
        if change is not None:
            reason = f"{change.why} ({change.day})"
            item.add_marker(pytest.mark.xfail(reason=reason, strict=change.is_always))


def rows_of_tier(config, items):
    """The names of those that the tier runs."""
    tier = config.getoption("--tier")
    everything = {item.nodeid for item in items}
    if tier == "all":
        return everything
    fast = [item for item in items if "slow" not in item.keywords]
    names = [item.nodeid for item in fast]
    worth = {
        item.nodeid: mark.args[0]
        for item in fast
        for mark in item.iter_markers("worth_seconds")
    }
    if tier == "quick":
        pure = [name for name in names if name.startswith("tests/pure/")]
        toured = [item.nodeid for item in fast if "quick" in item.keywords]
        names, worth = [*pure, *toured], dict.fromkeys(toured, tiers.TOUR_SECONDS)
        wanted = tiers.rows_that_fit(names, tiers.read_durations(), worth)
    else:
        wanted = config.stash[DRAW].rows(names, tiers.read_durations(), worth)
    if tier == "rest":
        return everything - wanted
    named = {arg.partition("::")[0] for arg in config.args if ".py" in arg}
    named = {os.path.abspath(path) for path in named}
    return wanted | {item.nodeid for item in fast if str(item.path) in named}


def keep(config, items, wanted):
    """Leaves all items out but those that are wanted, by their names."""
    left_out = [item for item in items if item.nodeid not in wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in wanted]
