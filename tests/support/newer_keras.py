"""What a Keras newer than the pinned one changes in the tests, and is expected to.

The weekly run with Keras' nightly is red for any other test that fails, and for a row
of `CHANGES` that passes again.
"""

import importlib.metadata
from typing import NamedTuple


def _installed():
    for name in ("keras", "keras-nightly"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "0.0"


#: Of the installed Keras: (3, 16) for "3.16.0.dev2026102704".
MINOR_VERSION = tuple(map(int, _installed().split(".")[:2]))
#: One device reads shuffled arrays in one order for ever; replicas do not.
GIVES_ARRAYS_OTHER_ORDERS = MINOR_VERSION >= (3, 16)


class Change(NamedTuple):
    """A test that fails with a newer Keras, for a reason that is not tfdp's.

    Args:
      test: the beginning of its name.
      since: the first minor version of Keras with which it fails.
      day: when that was seen.
      why: what Keras does.
      is_always: whether it fails in every run.
    """

    test: str
    since: tuple[int, int]
    day: str
    why: str
    is_always: bool = True


TRACES_STATIC = "without a strategy Keras traces a step for each number of rows"

CHANGES = (
    Change(
        "tests/devices/test_resume.py::test_broken_off_again_and_again",
        (3, 16),
        "2026-11-29",
        f"{TRACES_STATIC}: a resumed training differs in the last bits",
    ),
    Change(
        "tests/devices/test_resume.py::test_broken_off_and_gone_on[0-",
        (3, 16),
        "2026-11-29",
        f"{TRACES_STATIC}: a resumed training differs in the last bits",
        is_always=False,
    ),
    Change(
        "tests/devices/test_defects.py::"
        "test_stock_fails_and_tfdp_does_not[D16-ema-overwrite]",
        (3, 16),
        "2026-11-29",
        "Keras has mended ema_overwrite_frequency under the stock strategy",
    ),
    Change(
        "tests/devices/test_one_replica.py::test_fit_equals_keras_bit_for_bit[",
        (3, 16),
        "2026-11-29",
        f"{TRACES_STATIC}: sums differ in the last bits",
        is_always=False,
    ),
    Change(
        "tests/devices/test_fits_exact.py::"
        "test_fit_and_evaluate_equal_one_device[two-outputs-masked]",
        (3, 16),
        "2026-11-29",
        f"{TRACES_STATIC}: it weights the loss of an output by this number, and where "
        "it is unknown, as in replicas and in 3.15, each batch alike; the losses agree",
    ),
    Change(
        "tests/devices/test_losses_exact.py::test_every_keras_loss_is_in_the_table",
        (3, 16),
        "2026-11-29",
        "SparseCategoricalFocalCrossentropy is new, and is to be added with 3.16",
    ),
    Change(
        "tests/devices/test_one_replica.py::test_a_step_runs_the_operations_of_keras",
        (3, 16),
        "2026-11-29",
        f"{TRACES_STATIC}: its graph has constants where that of tfdp has shapes",
    ),
)


def change_of(test):
    """The row of `CHANGES` for a test with the installed Keras; else None."""
    for change in CHANGES:
        if test.startswith(change.test) and MINOR_VERSION >= change.since:
            return change
    return None
