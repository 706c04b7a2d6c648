"""Rounds with a quorum, and backup workers: a host is stopped, and comes back."""

import itertools
import os
import re
import signal
import time

import numpy as np
import pytest

import tfdp
from tests.support import living_training as training
from tests.support.apart import (
    MOMENTUM,
    RATE,
    gradient_of,
    linear_model,
    regression_data,
    vector_of,
)
from tests.support.fresh_python import run_python
from tests.support.living_group import LivingGroup
from tests.support.living_reference import (
    BOUND,
    Reference,
    batches_of,
    collectives_of,
    lines_of,
)

SECONDS = 180  # of a wait that ends by an event
EPOCHS = 12
STOPPED_AT, HELD_AT = 10, 18  # the rounds after 12 and 16 lie in between


def wait_until(is_so, group):
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, group.outputs()
        time.sleep(0.05)


def newest(folder, rank):
    """The last line that a worker has noted."""
    found = [lines for (who, _), lines in lines_of(folder).items() if who == rank]
    return found[-1][-1] if found and found[-1] else {"update": 0}


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize(
    ("who", "devices"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_the_others_go_on_and_the_late_host_continues_from_their_weights(
    tmp_path, who, devices
):
    """Worker `who` is stopped in the third round, and woken when the others have done
    two rounds without it and wait for the test within the next."""
    plans = (f"stop={who}@{STOPPED_AT}", f"hold={HELD_AT}", "quorum=2", "grace=2")
    with LivingGroup(
        3,
        "tests.support.living_training",
        tmp_path,
        EPOCHS,
        *plans,
        sleep_seconds=10 * SECONDS,
        variables={"TFDP_DEVICES_PER_WORKER": str(devices)},
    ) as group:
        others = [rank for rank in range(3) if rank != who]
        reach = [lambda r=r: newest(tmp_path, r)["update"] >= HELD_AT for r in others]
        wait_until(lambda: all(is_there() for is_there in reach), group)
        os.kill(group.processes[who].pid, signal.SIGCONT)
        wait_until(lambda: newest(tmp_path, who)["update"] >= 16, group)
        (tmp_path / "go").touch()
        codes = group.run(seconds=SECONDS)
        outputs = group.outputs()
    assert codes == [0] * 3, outputs
    assert "gone on without this one" not in outputs, outputs
    check(tmp_path, who, outputs)


def check(folder, who, outputs):
    by_rank = {rank: lines for (rank, _), lines in lines_of(folder).items()}
    at = {r: {line["update"]: line for line in lines} for r, lines in by_rank.items()}
    others = [rank for rank in range(3) if rank != who]
    # Back with the outer weights and momenta of the others, bit for bit, beyond the
    # updates that they have made without it.
    back = next(u for u in sorted(at[who]) if u > 12)
    assert 16 <= back < 20 and 12 not in at[who], sorted(at[who])
    assert at[who][back]["hash"] == at[others[0]][16]["hash"], outputs
    batches = batches_of(folder)
    reference = Reference(tfdp.sync.DiLoCo(every=training.EVERY), 3)
    ended_without = dict(
        re.findall(r"after update (\d+) ended without workers ([\d, ]+)", outputs)
    )
    missed = {int(u): [int(r) for r in w.split(",")] for u, w in ended_without.items()}
    assert missed[12] == missed[16] == [who], outputs
    for update in range(4, 21, 4):
        present = [rank for rank in range(3) if rank not in missed.get(update, ())]
        if update == 12:  # its lost updates move its inner momentum, which it keeps
            batches[who, 12] = batches[who, 11] + 1
            reference._train(who, range(9, 13), batches)
        starts = {who: back} if update == 20 else None
        reference.round(present, update, batches, starts)
        hashes = {at[rank][update]["hash"] for rank in present}
        assert len(hashes) == 1, update
        outer = np.array(at[present[0]][update]["outer"])
        assert np.max(np.abs(outer - reference.outer)) < BOUND, update
    # Later rounds have it again, and all end together.
    last = training.ROWS // training.BATCH * EPOCHS
    assert any(who not in missed.get(u, ()) for u in range(20, last + 1, 4)), outputs
    assert at[others[0]][last]["hash"] == at[others[1]][last]["hash"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sync"),
    [
        ("die=0@10", "diloco"),
        ("stop=0@10", "diloco"),
        ("die=2@10", "diloco"),
        ("die=0@10", "backup"),
        ("die=2@10", "backup"),
    ],
)
def test_bits_are_equal_whoever_leads(tmp_path, fault, sync):
    """A host is killed and started again, or stopped for longer than it may be silent:
    after each round the hosts that have it have the same bits."""
    plans = (fault, f"sync={sync}", "quorum=2", "grace=1", "silence=2")
    plans = (*plans, "step_seconds=0.3")
    module = "tests.support.living_training"
    with LivingGroup(
        3, module, tmp_path, 40, *plans, comes_back=True, sleep_seconds=8.0
    ) as group:
        codes = group.run(seconds=600)
        outputs = group.outputs()
    assert codes == [0] * 3, outputs
    rounds = collectives_of(tmp_path)
    assert set(range(4, 161, 4)) <= set(rounds), outputs
    for update, by_rank in rounds.items():
        assert len({line["hash"] for line in by_rank.values()}) == 1, (update, outputs)
    who = int(fault[fault.index("=") + 1])
    after = [update for update, by_rank in rounds.items() if update > 12]
    assert any(who in rounds[update] for update in after), outputs


def weights_of_updates(folder):
    """By update: the newest line of each rank."""
    found = {}
    for (rank, _), lines in lines_of(folder).items():
        for line in lines:
            found.setdefault(line["update"], {})[rank] = line
    return found


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_backup_workers_drop_late_gradients_and_all_make_the_same_updates(
    tmp_path, devices
):
    """Of three hosts one is spare, and one is stopped before step 6 until the others
    have done four steps without it: it then makes all of these updates.

    Which hosts counted in a step is found by trying all pairs, and all three."""
    who, stopped_at, held_at, epochs = 1, 5, 9, 5
    # It may be late by itself, and make updates 5 and 6 at once: then it stops after 6.
    stop = f"stop={who}@{stopped_at},{who}@{stopped_at + 1}"
    plans = (stop, f"hold={held_at}", "sync=backup", "spare=1")
    with LivingGroup(
        3,
        "tests.support.living_training",
        tmp_path,
        epochs,
        *plans,
        sleep_seconds=10 * SECONDS,
        variables={"TFDP_DEVICES_PER_WORKER": str(devices)},
    ) as group:
        others = [rank for rank in range(3) if rank != who]
        wait_until(
            lambda: all(newest(tmp_path, r)["update"] >= held_at for r in others), group
        )
        os.kill(group.processes[who].pid, signal.SIGCONT)
        wait_until(lambda: newest(tmp_path, who)["update"] >= held_at, group)
        (tmp_path / "go").touch()
        codes = group.run(seconds=SECONDS)
        outputs = group.outputs()
    assert codes == [0] * 3, outputs
    assert "gone on without this one" not in outputs, outputs
    updates = weights_of_updates(tmp_path)
    last = training.ROWS // training.BATCH * epochs
    assert set(range(1, last + 1)) <= set(updates), outputs
    stopped_at += who not in updates[stopped_at]
    assert not any(who in updates[u] for u in range(stopped_at + 1, held_at)), outputs
    assert who in updates[held_at], outputs
    x, y = regression_data(training.ROWS)
    weights = vector_of(linear_model().get_weights())
    velocity = np.zeros_like(weights)
    for update in range(1, last + 1):
        by_rank = updates[update]
        assert len({line["hash"] for line in by_rank.values()}) == 1, (update, outputs)
        got = np.array(next(iter(by_rank.values()))["outer"])
        gradients = {}
        for rank, line in by_rank.items():
            share = training.BATCH // 3
            first = line["batch"] * training.BATCH + share * rank
            rows = slice(first, first + share)
            gradients[rank] = gradient_of(weights, x[rows], y[rows])
        options = []
        for count in (2, 3):
            for ranks in itertools.combinations(sorted(gradients), count):
                mean = np.mean([gradients[rank] for rank in ranks], axis=0)
                moved = MOMENTUM * velocity - RATE * mean
                error = np.max(np.abs(weights + moved - got))
                options.append((error, ranks, moved))
        error, _, velocity = min(options, key=lambda option: option[0])
        # float32 beside float64, one step: as BOUND, of which a round is four steps.
        assert error < BOUND, (update, error, outputs)
        weights = got


WITHOUT_A_QUORUM = """
import sys

import keras
import numpy as np

import tfdp

strategy = tfdp.DataParallelStrategy(["CPU:0"])
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    sync = tfdp.sync.DiLoCo(every=2, across="replicas")
    optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync)
    model.compile(optimizer, "mse", jit_compile=False)
model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
found = [name for name in sys.modules if name.startswith("tfdp.")]
print([name for name in found if "quorum" in name or "backup_rounds" in name])
"""


def test_a_training_without_a_quorum_imports_nothing_of_it():
    done = run_python("-c", WITHOUT_A_QUORUM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
