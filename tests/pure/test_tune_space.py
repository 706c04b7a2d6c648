"""Which settings `tfdp tune` may try, and in which order the simulator puts them."""

import dataclasses

import pytest

from tests.support.fake_trials import HOSTS, MODEL
from tfdp.errors import ConfigurationError
from tfdp.plan.communication import Communication
from tfdp.tools.simulator.machine import Link
from tfdp.tools.tune.proposal import TrialFacts, in_order, predicted_speed
from tfdp.tools.tune.space import DEFAULTS, LOSSY, Setting, Space, TrialLayout, knobs_of

ONE_PROCESS = TrialLayout(1, 4, 64, "in_process")


def space_of(place=HOSTS, fits=None, **more):
    return Space(place, knobs_of(place, **more), MODEL, fits)


@pytest.mark.parametrize(
    "place", [HOSTS, ONE_PROCESS, TrialLayout(1, 1, 8, "in_process")]
)
@pytest.mark.parametrize("for_memory", [False, True])
def test_the_defaults_are_the_first(place, for_memory):
    assert space_of(place, for_memory=for_memory).settings[0] == DEFAULTS


def test_the_simulator_has_a_cost_for_every_engine():
    for place in (HOSTS, ONE_PROCESS):
        space = space_of(place)
        ordered = in_order(space, TrialFacts(MODEL, 1.0), DEFAULTS)
        assert {setting for setting, _ in ordered} == set(space.settings)
        assert all(speed > 0 for _, speed in ordered)


def test_no_two_settings_make_the_same_training():
    space = space_of()
    plans = [(each.engine, space.buckets(each)) for each in space.settings]
    assert len(plans) == len(set(plans)) > 6
    # 128 MiB hold these gradients as 64 MiB do.
    larger = Setting(bucket_bytes=128 << 20)
    assert space.same_as(larger) == space.same_as(Setting(bucket_bytes=64 << 20))
    assert space.same_as(larger) in space.settings


def test_buckets_are_not_turned_where_each_tensor_goes_alone():
    mine = [each for each in space_of(ONE_PROCESS).settings if each.engine == "auto"]
    assert {each.bucket_bytes for each in mine} == {DEFAULTS.bucket_bytes}
    assert {each.hierarchy for each in mine} == {"auto", (2, 2)}


def test_between_processes_the_levels_are_the_processes():
    settings = space_of(TrialLayout(2, 4, 64, "sockets")).settings
    assert {each.hierarchy for each in settings} == {"auto"}
    assert {each.engine for each in settings} == {"auto", "tensorflow"}


def test_only_what_is_allowed_is_lossy():
    assert {each.lossy for each in space_of().settings} == {None}
    allowed = space_of(allow_lossy=["int8", "bfloat16"]).settings
    assert {each.lossy for each in allowed} == {None, "int8", "bfloat16"}


@pytest.mark.parametrize(
    "place,names,message",
    [
        (HOSTS, ["int7"], "Received: 'int7'"),
        (ONE_PROCESS, ["int8"], "acts between processes"),
    ],
)
def test_what_cannot_be_lossy_is_refused(place, names, message):
    with pytest.raises(ConfigurationError, match=message):
        knobs_of(place, names)


def test_shards_and_remat_only_with_a_memory():
    plain = {
        each.changes.keys() & {"shard", "remat"} == set()
        for each in space_of().settings
    }
    assert plain == {True}
    settings = space_of(for_memory=True).settings
    assert {each.shard for each in settings} == {
        "none",
        "optimizer",
        "gradients",
        "parameters",
    }
    assert {each.accumulation_steps for each in settings} == {1, 2, 4, 8}
    # What the strategies refuse.
    assert not [s for s in settings if s.shard != "none" and s.engine == "tensorflow"]


def test_what_does_not_fit_is_not_there():
    space = space_of(for_memory=True, fits=lambda setting: setting.remat)
    assert space.settings and all(setting.remat for setting in space.settings)


def test_accumulation_keeps_rows_for_each_replica():
    knobs = knobs_of(TrialLayout(2, 2, 12, "sockets"), for_memory=True)
    assert knobs["accumulation_steps"] == (1, 2)  # of 12 rows, 4 steps leave 3 for 4


@pytest.mark.parametrize("name", LOSSY)
def test_the_line_to_paste_makes_what_was_tried(name):
    import tfdp
    from tfdp import compression  # noqa: F401  (the line names it)

    setting = Setting(bucket_bytes=1000, first_bucket_bytes=1 << 20, lossy=name)
    made = eval(setting.communication_line, {"tfdp": tfdp})  # noqa: S307
    assert isinstance(made, Communication) and made.bucket_bytes == 1000
    argument, value = setting.lossy_argument
    assert value in (getattr(made, argument), type(made.compression).__name__)


def test_a_setting_survives_json():
    setting = Setting(hierarchy=(2, 2), lossy="int8", shard="optimizer", remat=True)
    said = {**setting.as_json(), "hierarchy": [2, 2]}
    assert Setting.from_json(said) == setting


def test_the_simulator_likes_few_buckets_where_a_launch_is_dear():
    """A latency of 50 ms, and sums that take less than 1: fewer launches are faster."""
    link = Link(5e-2, 1e12)
    order = in_order(space_of(), TrialFacts(MODEL, 1.0, link), DEFAULTS)
    counts = [len(space_of().buckets(setting)) for setting, _ in order]
    assert counts[0] <= 3 < counts[-1] == max(counts)


def test_the_simulator_likes_to_start_early_where_bytes_are_dear():
    """8 MB of 9 at 10 MB/s: what does not travel during backprop takes 0.5 s more."""
    link = Link(1e-6, 1e7)
    facts = TrialFacts(MODEL, 2.0, link)
    order = in_order(space_of(), facts, DEFAULTS)
    best, worst = order[0][0], order[-1][0]
    assert len(space_of().buckets(best)) > len(space_of().buckets(worst))


def test_a_prediction_of_what_was_tried_is_what_was_measured():
    facts = TrialFacts(MODEL, 0.5, Link(1e-3, 1e8))
    assert predicted_speed(DEFAULTS, facts, HOSTS) == pytest.approx(128.0, rel=1e-3)
    remat = dataclasses.replace(DEFAULTS, remat=True)
    assert predicted_speed(remat, facts, HOSTS) < 128.0
    assert predicted_speed(remat, facts, HOSTS, tried=remat) == pytest.approx(
        128.0, rel=1e-3
    )
