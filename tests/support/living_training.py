"""Hosts that train apart, of which some die and come back: every meeting, noted.

    python -m tests.support.living_training FOLDER EPOCHS [WHAT=...]

Under TFDP_* variables every worker trains, and appends a line to FOLDER/RANK.PID.jsonl
for each batch: the update, a hash of the outer weights, who was present. For what
happens meanwhile see `tests.support.living_faults`.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import keras
import numpy as np

import tfdp
from tests.support.apart import linear_model, regression_data, sgd
from tests.support.living_faults import Faults

ROWS, BATCH, EVERY = 96, 24, 4  # four steps in an epoch: a meeting at its end


class Notes(keras.callbacks.Callback):
    """A line for each batch with the hash of the outer weights; and what happens."""

    def __init__(self, folder, strategy, plans):
        super().__init__()
        self.strategy, self.rank = strategy, strategy.cluster.rank
        self.faults = Faults(folder, self.rank, plans)
        self.path = folder / f"{self.rank}.{os.getpid()}.jsonl"
        self.held_at = int(plans.get("hold", -1))
        self.step_seconds = float(plans.get("step_seconds", 0.05))

    def on_train_batch_begin(self, batch, logs=None):
        self.faults.before_update(self.update)
        while self.update == self.held_at and not (self.path.parent / "go").exists():
            time.sleep(0.02)
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
        if not local_syncs(self.model.optimizer):  # all state is the same on all hosts
            kept = [v.numpy() for v in self.model.optimizer.variables]
        state = hashlib.sha256(b"".join(v.tobytes() for v in [outer, *kept]))
        local = [
            v.value.local_copy(place).numpy().ravel().tolist()
            for v in self.model.trainable_variables
            for place in range(len(self.strategy.extended.worker_devices))
            if v.value.has_local
        ]
        line = {
            "time": time.time(),
            "seconds": time.monotonic() - self.start,
            "update": self.update,
            "batch": batch,
            "hash": state.hexdigest(),
            "outer": outer.tolist(),
            "local": local,
            "epoch": self.strategy.elastic_hosts.epoch,
            "present": self.strategy.elastic_hosts.present,
            "place": self.strategy.elastic_hosts.place,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def local_syncs(optimizer):
    return isinstance(optimizer.sync, tfdp.sync.DiLoCo | tfdp.sync.LocalSGD)


def main(folder, epochs, *plans):
    plans = dict(plan.split("=", 1) for plan in plans)
    folder = pathlib.Path(folder)
    communication = tfdp.Communication(
        min_hosts=int(plans.get("min_hosts", 1)),
        silence_seconds=float(plans.get("silence", 4)),
        timeout_seconds=float(plans.get("timeout", 60)),
    )
    strategy = tfdp.MultiHostDataParallelStrategy(communication=communication)
    with strategy.scope():
        model = linear_model()
        sync = tfdp.sync.DiLoCo(
            every=EVERY,
            quorum=int(plans["quorum"]) if "quorum" in plans else None,
            grace_seconds=float(plans.get("grace", 0)),
        )
        if plans.get("sync") == "backup":
            sync = tfdp.sync.BackupWorkers(spare=int(plans.get("spare", 1)))
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
