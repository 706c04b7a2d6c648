"""`callbacks.RunRecord` on two workers, of which one sleeps: `tfdp report` names it.

What is compared is relative: the machine may be busy, and then both workers wait.
"""

import json

import pytest

from tests.support.launching import Launches
from tfdp.tools.commands.cli import main
from tfdp.tools.runs.facts import facts_of
from tfdp.tools.runs.read import read_run

SCRIPT = """
import json
import tfdp
tfdp.quiet()
import keras
import numpy as np

class Sleeps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == SLEEPER and batch % 2:
            time.sleep(0.3)

strategy = tfdp.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", jit_compile=False)
x = np.random.default_rng(0).normal(size=(180, 4)).astype("float32")
history = model.fit(
    x, x[:, :3], batch_size=8, epochs=2, verbose=0,
    callbacks=[
        tfdp.callbacks.RunRecord(FOLDER / "run"), tfdp.callbacks.Traffic(), Sleeps()
    ],
).history
note(f"history-{RANK}", json.dumps(history))
"""
STEPS = 2 * 23  # the last batch of an epoch has 4 rows


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("sleeper", [0, 1])
def test_the_worker_that_sleeps_is_named(tmp_path, capsys, sleeper):
    with Launches(tmp_path) as launches:
        script = SCRIPT.replace("SLEEPER", str(sleeper))
        code, _, errors, _ = launches.run(script, "--workers", 2)
    assert code == 0, errors
    run = read_run(tmp_path / "run")
    assert run.notes == []
    (session,) = run.sessions
    assert sorted(session.workers) == [0, 1]
    for rank, worker in session.workers.items():
        assert [line.step for line in worker.steps] == list(range(1, STEPS + 1))
        # Each worker has its own half of the rows.
        assert sum(line.samples for line in worker.steps) == 180
        text = tmp_path.joinpath(f"history-{rank}").read_text("utf-8")
        history = json.loads(text)
        assert [epoch.logs["loss"] for epoch in worker.epochs] == history["loss"]
        sent = sum(line.between_bytes for line in worker.steps)
        assert sent == pytest.approx(23 * sum(history["bytes_between_hosts"]))
    facts = facts_of(run)
    found = facts.stragglers.found[0]
    assert (found.worker, found.cause) == (sleeper, "between steps")
    # It slept after 22 of the 45 steps that are looked at.
    assert found.share > 0.4
    waited = facts.stragglers.waited_seconds
    assert waited[1 - sleeper] > 2 * waited[sleeper]
    parts = facts.part_seconds
    assert parts[sleeper]["between steps"] > 2 * parts[1 - sleeper]["between steps"]
    assert main(["report", str(tmp_path / "run")]) == 0
    assert f"Look at worker {sleeper}" in capsys.readouterr().out
