"""Whether, when and where failed workers start again: the rules, without a process."""

import dataclasses

import pytest

from tfdp.cluster.progress import Progress
from tfdp.launch.restart_policy import Ending, Judge, combine, wait_seconds

BUG = Ending("ValueError: sample 17", place=0, worker="worker 0")
KILL = Ending("killed by SIGKILL", place=0, worker="worker 0", from_outside=True)
ASKS = Ending("the workers ask for it", requests_restart=True)
NO_HOST = Ending("beta does not answer", from_outside=True)


def at(ending, step=None, *, saved=None, place=None, error=None):
    changes = {"progress": Progress(saved_step=saved, step=step)}
    changes |= {} if place is None else {"place": place}
    changes |= {} if error is None else {"error": error}
    return dataclasses.replace(ending, **changes)


# endings in a row -> what is said to each: "go", "free" (costs nothing), "drop", "end".
ROWS = {
    "the same error, nothing known": ([BUG, BUG], ["go", "end"]),
    "other numbers in it": (
        [BUG, at(BUG, error="ValueError: sample 9 of 0x7f3a")],
        ["go", "go"],
    ),
    "the same but for its numbers": (
        [BUG, at(BUG, error="ValueError: sample 99")],
        ["go", "end"],
    ),
    "another error": ([BUG, at(BUG, error="OSError: disk full")], ["go", "go"]),
    "an error and a kill": ([BUG, KILL, BUG, KILL], ["go", "go", "go", "end"]),
    "the same error at the same step": ([at(BUG, 5), at(BUG, 5)], ["go", "end"]),
    "the same error at an earlier step": ([at(BUG, 5), at(BUG, 4)], ["go", "end"]),
    "the same error further on": ([at(BUG, 5), at(BUG, 6)], ["go", "go"]),
    "the same error after another save": (
        [at(BUG, 9, saved=4), at(BUG, 8, saved=5)],
        ["go", "go"],
    ),
    "the same error on another worker": ([BUG, at(BUG, place=1)], ["go", "end"]),
    # Killed from outside: no proof, but for the very same step and worker.
    "killed twice, nothing known": ([KILL] * 3, ["go"] * 3),
    "killed at the same step": ([at(KILL, 5), at(KILL, 5)], ["go", "end"]),
    "killed at an earlier step": ([at(KILL, 5), at(KILL, 4)], ["go", "go"]),
    "killed at one step, another": ([at(KILL, 5), at(KILL, 5, place=1)], ["go"] * 2),
    "hosts that do not answer": ([NO_HOST] * 4, ["go", "go", "go", "end"]),
    # Saved, start me again.
    "asks and gets further": (
        [at(ASKS, saved=step) for step in range(1, 9)],
        ["free"] * 8,
    ),
    "asks, nothing known": ([ASKS] * 4, ["go", "go", "go", "end"]),
    "asks at the same step": ([at(ASKS, saved=3)] * 2, ["free", "end"]),
}


def word(verdict):
    if not verdict.restart:
        return "end"
    if verdict.dropped is not None:
        return "drop"
    return "free" if verdict.is_free else "go"


@pytest.mark.parametrize("row", ROWS)
def test_what_follows(row):
    endings, expected = ROWS[row]
    judge = Judge(range(2), least_workers=2, most_restarts=3)
    assert [word(judge.judge(ending)) for ending in endings] == expected
    assert judge.used_restarts == expected.count("go")


def test_restarts_are_used_up():
    judge = Judge([0], 1, most_restarts=2)
    verdicts = [judge.judge(at(BUG, step)) for step in range(3)]
    assert [verdict.restart for verdict in verdicts] == [True, True, False]
    assert verdicts[2].reason == "2 of 2 restarts are used up"


@pytest.mark.parametrize("ending", [BUG, KILL, at(ASKS, saved=1)])
def test_none_allowed_is_none(ending):
    verdict = Judge([0], 1, most_restarts=0).judge(ending)
    assert (verdict.restart, verdict.reason) == (False, "")


def test_the_reason_names_step_and_error():
    judge = Judge([0], 1, most_restarts=9)
    judge.judge(at(BUG, 1234))
    reason = judge.judge(at(BUG, 1234)).reason
    assert "at step 1234, with nothing gained: ValueError: sample 17" in reason


def test_a_place_that_fails_twice_is_left_out_down_to_the_least():
    judge = Judge(range(4), least_workers=2, most_restarts=99)
    endings = [KILL, KILL, at(KILL, place=3), at(KILL, place=3), at(KILL, place=1)] + [
        at(KILL, place=1)
    ] * 3
    words = [word(judge.judge(ending)) for ending in endings]
    assert words == ["go", "drop", "go", "drop", "go", "go", "go", "go"]
    assert judge.places == [1, 2]


def test_a_place_that_fails_twice_and_gets_further_stays():
    judge = Judge(range(3), least_workers=1, most_restarts=99)
    words = [word(judge.judge(at(KILL, step))) for step in range(5)]
    assert words == ["go"] * 5


def test_an_error_that_moves_on_to_another_place_ends_it():
    judge = Judge(range(3), least_workers=1, most_restarts=99)
    words = [word(judge.judge(at(BUG, place=place))) for place in (0, 0, 1)]
    assert words == ["go", "drop", "end"]


def test_waits_double_while_nothing_is_gained():
    judge = Judge([0], 1, most_restarts=99)
    waits = [judge.judge(KILL).wait_seconds for _ in range(9)]
    for number, seconds in enumerate(waits):
        longest = min(60.0, 2.0**number)
        assert longest / 2 <= seconds <= longest
    assert judge.judge(at(KILL, 7)).wait_seconds <= 1.0
    assert judge.judge(at(KILL, 6)).wait_seconds >= 1.0
    assert wait_seconds(10**6, lambda: 1.0) == 60.0
    assert len({wait_seconds(1) for _ in range(50)}) > 1


def test_the_newest_save_and_the_furthest_step_count():
    notes = [
        None,
        Progress(10, 20, 24, resumed_seconds=1.0, saved_seconds=5.0),
        Progress(10, None, 25, resumed_seconds=2.0),
        Progress(None, 22, None, saved_seconds=6.0),
    ]
    assert combine(notes) == Progress(10, 22, 25, 2.0, 6.0)
    assert combine([None]) == Progress()
    assert combine(notes).reached_step == 25


def test_a_save_is_remembered_over_starts():
    judge = Judge([0], 1, most_restarts=9)
    judge.judge(at(KILL, 12, saved=10))
    judge.judge(at(KILL, 3))
    assert judge.saved_step == 10
