"""Hosts that train apart, of which some die and come back: every meeting, noted.

    python -m tests.support.living_training FOLDER EPOCHS [WHAT=...]

Under TFDP_* variables every worker trains, and appends a line to FOLDER/RANK.PID.jsonl
for each meeting: what it brought, what came out, who was present. What happens is said
by arguments such as `die=1@8` (worker 1 kills itself before its update 8).
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np

import tfdp
from tests.support.apart import linear_model, regression_data, sgd
from tfdp.hosts.living_meeting import Meeting

ROWS, BATCH, EVERY = 96, 24, 4  # four steps in an epoch: a meeting at its end


class Notes(keras.callbacks.Callback):
    """A line for each batch with the hash of the outer weights; and what happens."""

    def __init__(self, folder, strategy, plans):
        super().__init__()
        self.strategy, self.rank = strategy, strategy.cluster.rank
        self.plans = plans
        self.folder = folder
        self.path = folder / f"{self.rank}.{os.getpid()}.jsonl"
        self.step_seconds = float(plans.get("step_seconds", 0.05))

    def on_train_batch_begin(self, batch, logs=None):
        update = self.update
        for name, number in (("die", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            who, _, when = self.plans.get(name, "").partition("@")
            is_first = not list(self.folder.glob(f"{name}.{self.rank}"))
            if who == str(self.rank) and is_first and update == int(when):
                (self.folder / f"{name}.{self.rank}").write_text(str(os.getpid()))
                os.kill(os.getpid(), number)
        time.sleep(self.step_seconds)
        self.start = time.monotonic()

    @property
    def update(self):
        optimizer = self.model.optimizer
        found = [v for v in optimizer.variables if "sync_updates" in v.path]
        return int(found[0].numpy()) if found else 0

    def on_train_batch_end(self, batch, logs=None):
        outer = np.concatenate([w.ravel() for w in self.model.get_weights()])
        kept = [v.numpy() for v in self.model.optimizer.variables if "outer" in v.path]
        state = hashlib.sha256(b"".join(v.tobytes() for v in [outer, *kept]))
        local = [
            v.value.local_copy(place).numpy().ravel().tolist()
            for v in self.model.trainable_variables
            for place in range(len(self.strategy.extended.worker_devices))
        ]
        line = {
            "time": time.time(),
            "seconds": time.monotonic() - self.start,
            "update": self.update,
            "batch": batch,
            "hash": state.hexdigest(),
            "outer": outer.tolist(),
            "local": local,
            "epoch": self.strategy.living.epoch,
            "present": self.strategy.living.present,
            "place": self.strategy.living.place,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def die_in_meeting(folder, rank, plan):
    """Lets this process kill itself within a meeting.

    Args:
      plan: `0@20@before:_decide`: worker 0, after update 20, before it decides.
    """
    who, update, where = plan.split("@")
    when, name = where.split(":")
    if who != str(rank) or list(folder.glob(f"died.{rank}")):
        return
    original = getattr(Meeting, name)

    def dying(meeting, *arguments):
        is_now = meeting._update == int(update)
        results = original(meeting, *arguments) if when == "after" else None
        if is_now:
            (folder / f"died.{rank}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return results if when == "after" else original(meeting, *arguments)

    setattr(Meeting, name, dying)


def main(folder, epochs, *plans):
    plans = dict(plan.split("=", 1) for plan in plans)
    folder = pathlib.Path(folder)
    communication = tfdp.Communication(
        min_hosts=int(plans.get("min_hosts", 1)),
        silence_seconds=float(plans.get("silence", 4)),
        timeout_seconds=float(plans.get("timeout", 60)),
    )
    if "in_meeting" in plans:
        die_in_meeting(folder, int(os.environ["TFDP_RANK"]), plans["in_meeting"])
    strategy = tfdp.MultiHostDataParallelStrategy(communication=communication)
    with strategy.scope():
        model = linear_model()
        sync = tfdp.sync.DiLoCo(every=EVERY)
        if plans.get("sync") == "local":
            sync = tfdp.sync.LocalSGD(EVERY)
        optimizer = tfdp.DistributedOptimizer(sgd(), sync=sync)
        model.compile(optimizer, "mse", jit_compile=False)
    x, y = regression_data(ROWS)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=int(epochs),
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        callbacks=[Notes(folder, strategy, plans)],
    ).history
    print("ENDED", strategy.cluster.rank, len(history["loss"]), flush=True)
    print("VALIDATION", history["val_loss"][-1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
