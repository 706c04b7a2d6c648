"""`tfdp tune` over trials that nobody trains: what is tried, how long, who wins."""

import itertools
import re

import pytest

from tests.support.fake_trials import HOSTS, FakeTrials, fails
from tfdp.errors import ConfigurationError, MissingDependencyError
from tfdp.tools.commands import cli
from tfdp.tools.commands.tune_processes import TrialFailed, result_of
from tfdp.tools.commands.tune_run import TuneRun
from tfdp.tools.tune import words
from tfdp.tools.tune.space import DEFAULTS, Setting, knobs_of
from tfdp.tools.tune.tuning import SearchByOptuna


def run(trials, *, knobs=None, memory_bytes=None, fits=None, **more):
    options = {"most_trials": 100, "rounds": 3, "finalists": 2, "minutes": 1e6, **more}
    for_memory = memory_bytes is not None
    said = []
    found = TuneRun(
        trials,
        HOSTS,
        knobs or knobs_of(HOSTS, for_memory=for_memory),
        memory_bytes=memory_bytes,
        say=said.append,
        clock=trials.clock,
        fits=fits or (lambda *_: {}),
        **options,
    ).run()
    assert list(found.lines) == said
    return found


def speeds(**by_name):
    """100 samples per second, and more where a name is among the changes."""
    return lambda setting: (
        100.0 + sum(more for name, more in by_name.items() if name in setting.changes)
    )


def test_the_fastest_is_found():
    trials = FakeTrials(speeds(engine=20.0, first_bucket_bytes=5.0), noise=0.005)
    found = run(trials)
    winner = found.verdict.winner
    assert winner.engine == "tensorflow" and "first_bucket_bytes" in winner.changes
    assert found.verdict.gains[winner].median == pytest.approx(0.25, abs=0.03)
    assert found.lines[-1] == f"communication={winner.communication_line}"
    assert trials.tried[0] == DEFAULTS


def test_noise_keeps_the_defaults():
    """All are alike, and one of two finalists wins by chance in 8% of the cases
    (test_tune_decision): three or more of ten in 4%, and these seeds are fixed.
    """
    winners = [
        run(FakeTrials(speeds(), noise=0.1, seed=seed)).verdict.winner
        for seed in range(10)
    ]
    assert winners.count(DEFAULTS) >= 8


def test_it_was_lucky_once():
    """The best of the search is slower in the rounds: they alone count."""
    lucky = Setting(first_bucket_bytes=64 << 10)
    first = itertools.count()

    def speed_of(setting):
        return 200.0 if setting == lucky and not next(first) else 100.0

    trials = FakeTrials(speed_of)
    assert run(trials).verdict.winner == DEFAULTS
    assert trials.tried.count(lucky) == 4


def test_a_trial_that_fails_is_told_and_survived():
    def speed_of(setting):
        if setting.engine == "tensorflow":
            fails("some lines\nConfigurationError: no ring here\nexit code 1")
        return speeds(first_bucket_bytes=50.0)(setting)

    found = run(FakeTrials(speed_of))
    assert found.verdict.winner.engine == "auto" != found.verdict.winner
    failed = [trial for trial in found.trials if trial.speed is None]
    assert failed and all(t.setting.engine == "tensorflow" for t in failed)
    assert sum(
        "failed: ConfigurationError: no ring here" in x for x in found.lines
    ) == (len(failed))
    assert (
        f"{len(found.trials)} settings were tried, {len(failed)} failed" in found.lines
    )


def test_a_finalist_that_fails_in_the_rounds_cannot_win():
    fast = Setting(engine="tensorflow")
    calls = itertools.count()

    def speed_of(setting):
        if setting != fast:
            return 100.0
        if next(calls) == 2:
            fails("killed by signal 9")
        return 300.0

    found = run(FakeTrials(speed_of))
    assert found.verdict.winner == DEFAULTS
    assert any("failed: killed by signal 9" in line for line in found.lines)


def test_without_the_first_trial_there_is_no_answer():
    with pytest.raises(ConfigurationError, match="first trial failed.*no such thing"):
        run(FakeTrials(lambda setting: fails()))


def test_the_time_is_kept():
    """10 s each and 9 runs of rounds: in 150 s there is time for 6 trials before."""
    trials = FakeTrials(speeds(engine=20.0), seconds=10.0)
    found = run(trials, minutes=2.5)
    assert trials.now <= 150.0 and len(trials.tried) == 6 + 9
    assert found.verdict.winner.engine == "tensorflow"
    assert any("no time for more trials" in line for line in found.lines)


def test_too_little_time_keeps_the_defaults():
    trials = FakeTrials(speeds(engine=20.0), seconds=10.0)
    found = run(trials, minutes=0.3)
    assert found.verdict.winner == DEFAULTS and len(trials.tried) == 1


def test_what_does_not_fit_is_not_tried():
    def fits(target, place, memory_bytes, stored):
        assert (target, memory_bytes) == ("fake.py", 1000)
        return {each: (2000, each[0] == "optimizer") for each in stored}

    trials = FakeTrials(speeds(remat=-50.0))
    found = run(trials, memory_bytes=1000, fits=fits)
    assert {setting.shard for setting in trials.tried} == {"optimizer"}
    assert trials.tried[0] == Setting(shard="optimizer")
    assert any("The defaults do not fit" in line for line in found.lines)


def test_nothing_fits():
    def fits(target, place, memory_bytes, stored):
        return {each: (2_000_000, False) for each in stored}

    with pytest.raises(ConfigurationError, match="the smallest needs 2 MB"):
        run(FakeTrials(speeds()), memory_bytes=1000, fits=fits)


def test_the_log_counts_launches():
    found = run(FakeTrials(lambda s: 97.0 if s.bucket_bytes == 256 << 10 else 100.0))
    line = next(x for x in found.lines if "buckets of 256 KiB: 3.0% slower" in x)
    assert "launches more a step (8, not 4)" in line or "more a step" in line


def test_more_settings_than_trials_need_the_library(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    trials = FakeTrials(speeds())
    with pytest.raises(
        MissingDependencyError, match=r"pip install 'tfdp\[tune\]'"
    ) as raised:
        run(trials, most_trials=3)
    assert len(trials.tried) == 1
    enough = int(re.search(r"--trials (\d+)\.$", str(raised.value))[1])
    with pytest.raises(MissingDependencyError):
        run(FakeTrials(speeds()), most_trials=enough - 1)
    assert len(run(FakeTrials(speeds()), most_trials=enough).trials) == enough


def test_optuna_finds_it_with_fewer_trials():
    pytest.importorskip("optuna")
    trials = FakeTrials(speeds(engine=20.0, first_bucket_bytes=10.0), noise=0.005)
    found = run(trials, most_trials=10)
    assert len(found.trials) == 10 == len({trial.setting for trial in found.trials})
    assert found.trials[0].setting == DEFAULTS
    assert {"engine"} <= found.verdict.winner.changes.keys()


def test_optuna_is_asked_until_nothing_is_left():
    pytest.importorskip("optuna")
    from tests.support.fake_trials import MODEL
    from tfdp.tools.tune.space import Space

    space = Space(HOSTS, knobs_of(HOSTS), MODEL)
    search = SearchByOptuna(space, space.settings, trials=4)
    asked = []
    while (setting := search.next_setting()) is not None:
        search.record(setting, None if len(asked) % 3 == 0 else float(len(asked)))
        asked.append(setting)
    assert sorted(map(repr, asked)) == sorted(map(repr, space.settings))


@pytest.mark.parametrize(
    "program,message",
    [
        ("raise ValueError('mine')", "ValueError: mine"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "killed by signal 9",
        ),
        (
            "import time; print('on it', flush=True); time.sleep(60)",
            "no result within 1 s; it was stopped. Give a larger --timeout-seconds",
        ),
    ],
)
def test_processes_that_come_to_a_bad_end(program, message):
    with pytest.raises(TrialFailed, match=message):
        result_of("any", {}, 1.0 if "sleep" in program else 60.0, ["-c", program])


def test_gains_and_speeds_in_words():
    gains = [words._faster(gain) for gain in (0.034, -0.5, 0.0004)]
    assert gains == ["3.4% faster", "50.0% slower", "as fast"]
    assert [words._speed(each) for each in (1234.56, 0.12345)] == ["1,234.6", "0.123"]


@pytest.mark.parametrize(
    "words,message",
    [
        (["a.py", "--batch", "8"], "There is no script 'a.py'"),
        (["m:f", "--batch", "8", "--minutes", "nan"], "--minutes must be"),
        (
            ["m:f", "--batch", "8", "--timeout-seconds", "0"],
            "--timeout-seconds must be",
        ),
        (["m:f", "--batch", "8", "--replicas", "1"], "One replica sends nothing"),
        (["math:f", "--batch", "1", "--replicas", "2"], "less than a row each"),
        (["mathh:f", "--batch", "8", "--replicas", "2"], "no module 'mathh'"),
        (["m:f", "--batch", "8", "--page", "/no/such/a.html"], "/no/such"),
        (["m:f", "--batch", "8", "--memory", "much"], "A size is a number"),
        (
            ["math:f", "--batch", "8", "--replicas", "2", "--allow-lossy", "int8"],
            "between",
        ),
    ],
)
def test_bad_options_are_refused_before_a_trial(words, message, capsys):
    assert cli.main(["tune", *words]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
