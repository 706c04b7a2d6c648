"""Hosts die, stop and come back, between meetings and at every moment of one.

Each is a process without TensorFlow (`tests.support.living_meetings`). In all cases:
the present hosts have the same bits after every meeting; these are the mean of what
those who took part brought, exactly; nobody waits longer than is stated; all end.
"""

import collections

import numpy as np
import pytest

from tests.support.living_group import LivingGroup

SILENCE_SECONDS = 2.0
# Of what is stated (`tfdp.hosts.elastic_group`), with the time that a busy machine may
# take to run processes.
SLACK_SECONDS = 20.0
UPDATES = 40
# Workers, and which of them dies.
MORE = [(2, 1), (3, 0), (3, 1)]


def check(group):
    """The meetings of all; returns by update who took part, and who was left out."""
    took_part, left_out = collections.defaultdict(dict), []
    for (rank, _), lines in group.lines().items():
        for line in lines:
            assert line["seconds"] < 3 * SILENCE_SECONDS + SLACK_SECONDS, line
            if line["left_out"]:
                left_out.append((line["update"], rank))
            else:
                took_part[line["update"]].setdefault(rank, line)
    for update, by_rank in took_part.items():
        lines = list(by_rank.values())
        assert len({line["hash"] for line in lines}) == 1, (update, by_rank)
        assert len({tuple(line["present"]) for line in lines}) == 1, (update, by_rank)
    return took_part, left_out


def check_means(took_part, may_miss=()):
    """What comes out is the mean of what those brought who noted it.

    Args:
      may_miss: updates in which one had brought its part, and died before its note.
    """
    for update, by_rank in took_part.items():
        lines = list(by_rank.values())
        if update not in may_miss:
            mean = np.mean([line["brought"] for line in lines])
            assert lines[0]["mean"] == mean, (update, by_rank)


def run(folder, workers, *plans, updates=UPDATES, **options):
    plans = (f"silence={SILENCE_SECONDS}", *plans)
    module = "tests.support.living_meetings"
    with LivingGroup(workers, module, folder, updates, *plans, **options) as group:
        codes = group.run(seconds=240)
        return codes, *check(group), group.outputs()


@pytest.mark.slow
def test_all_present_all_the_time(tmp_path):
    codes, took_part, left_out, outputs = run(tmp_path, 3)
    assert codes == [0] * 3, outputs
    assert not left_out
    check_means(took_part)
    assert all(sorted(ranks) == [0, 1, 2] for ranks in took_part.values()), outputs


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_dies_between_meetings_and_the_others_go_on(tmp_path, who):
    codes, took_part, _, outputs = run(tmp_path, 3, f"die={who}@18")
    assert codes == [-9 if rank == who else 0 for rank in range(3)], outputs
    check_means(took_part)
    others = [rank for rank in range(3) if rank != who]
    for update in range(4, UPDATES + 1, 4):
        expected = [0, 1, 2] if update < 18 else others
        assert sorted(took_part[update]) == expected, outputs


@pytest.mark.worth_seconds(40)
@pytest.mark.parametrize(
    ("workers", "who"),
    [(2, 0), *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
)
def test_one_dies_and_comes_back(tmp_path, who, workers):
    plans = (f"die={who}@18", "until_all=1")
    codes, took_part, _, outputs = run(tmp_path, workers, *plans, comes_back=True)
    assert codes == [0] * workers, outputs
    check_means(took_part)
    counts = [len(took_part[update]) for update in sorted(took_part)]
    assert counts[0] == workers and workers - 1 in counts, outputs
    assert counts[-1] == workers, outputs


# Of a leader, and of a member. What is `before:_exchange` is a connection that is
# there and says nothing.
MOMENTS = [
    (0, "before:_lead"),
    (0, "after:_receive"),
    (0, "before:_hand_out"),
    (0, "after:_hand_out"),
    (0, "before:_decide"),
    (0, "after:_decide"),
    (1, "before:_follow"),
    (1, "before:_exchange"),
    (1, "after:_exchange"),
]


def slow_but(quick, rows):
    return [
        row if row == quick else pytest.param(*row, marks=pytest.mark.slow)
        for row in rows
    ]


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(("who", "moment"), slow_but((0, "before:_decide"), MOMENTS))
def test_one_dies_in_a_meeting(tmp_path, who, moment):
    codes, took_part, _, outputs = run(tmp_path, 3, f"die={who}@20@{moment}")
    assert codes == [-9 if rank == who else 0 for rank in range(3)], outputs
    check_means(took_part, may_miss=[20])
    others = [rank for rank in range(3) if rank != who]
    assert all(sorted(took_part[u]) == others for u in range(20, UPDATES + 1, 4))
    both = np.mean([took_part[20][rank]["brought"] for rank in others])
    all_three = np.mean([*(took_part[20][r]["brought"] for r in others), 0.0])
    mean = took_part[20][others[0]]["mean"]
    # Without the one that died, or with what it had brought before.
    brought = 3 * mean - 3 * all_three
    assert mean == both or brought == took_part[16][who]["mean"] + (who + 1) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("who", "moment"), [(0, ""), (1, ""), *MOMENTS])
def test_one_is_stopped_for_longer_than_it_may(tmp_path, who, moment):
    plan = f"stop={who}@18" if not moment else f"stop={who}@20@{moment}"
    codes, took_part, left_out, outputs = run(tmp_path, 3, plan, "until_all=1")
    assert codes == [0] * 3, outputs
    check_means(took_part, may_miss=[20])
    assert {rank for _, rank in left_out} <= {who}, outputs
    assert len(took_part[max(took_part)]) == 3, outputs


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_one_that_answers_and_is_late_is_left_out(tmp_path, who):
    plans = (f"late={who}@18", "timeout=3", "until_all=1")
    codes, took_part, left_out, outputs = run(tmp_path, 3, *plans)
    assert codes == [0] * 3, outputs
    check_means(took_part)
    assert left_out == [(20, who)] and "it was 3 seconds late" in outputs, outputs
    assert len(took_part[max(took_part)]) == 3, outputs


@pytest.mark.slow
def test_fewer_than_asked_for_wait_and_say_so(tmp_path):
    plans = ("die=1@18", "min_hosts=2", "timeout=3")
    codes, took_part, _, outputs = run(tmp_path, 2, *plans)
    assert codes[1] == -9 and codes[0] not in (0, -9), outputs
    assert max(took_part) == 16
    assert "1 of 2 hosts are left" in outputs


@pytest.mark.slow
def test_fewer_than_asked_for_wait_for_one_that_comes_back(tmp_path):
    plans = ("die=1@18", "min_hosts=2", "timeout=60")
    codes, took_part, _, outputs = run(tmp_path, 2, *plans, comes_back=True)
    assert codes == [0, 0], outputs
    check_means(took_part)
    assert len(took_part[20]) == 1 and len(took_part[24]) == 2, outputs
