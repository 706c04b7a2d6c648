"""A worker of a job in which one host is late at the end of its training.

    python -m tests.support.hosts_at_the_end FOLDER KIND LATE AFTER HOW MIN_HOSTS

KIND is "quorum", "backup" or "plain". Worker LATE sleeps after its step AFTER until
the others have made their last one (HOW is "last"), or have ended `fit` or for
LONG_SECONDS (HOW is "ended"). Each writes the hash of its final weights into FOLDER.
"""

import hashlib
import os
import pathlib
import sys
import time

import keras

import tfdp
from tests.support.apart import linear_model, regression_data

HOSTS, STEPS, EVERY, BATCH = 3, 20, 5, 24
LONGEST_SECONDS = 300
# Longer than the others wait for a host that answers.
TIMEOUT_SECONDS, LONG_SECONDS = 60.0, 8.0
SHORT_TIMEOUT_SECONDS = 5.0
SYNCS = {
    "quorum": lambda: tfdp.sync.DiLoCo(every=EVERY, quorum=2, grace_seconds=0.2),
    "backup": lambda: tfdp.sync.BackupWorkers(spare=1),
    "plain": lambda: tfdp.sync.DiLoCo(every=EVERY),
}


def number_in(file):
    """A file's number; 0 before it is written whole."""
    return int(file.read_text() or 0) if file.exists() else 0


class Pace(keras.callbacks.Callback):
    """Notes each step, and lets one worker sleep."""

    def __init__(self, folder, rank, late, after, how):
        super().__init__()
        self.folder, self.rank, self.steps = folder, rank, 0
        self.late, self.after, self.how = late, after, how

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        (self.folder / f"steps.{self.rank}").write_text(str(self.steps))
        time.sleep(0.02)
        if self.rank == self.late and self.steps == self.after:
            self.sleep()

    def sleep(self):
        others = [rank for rank in range(HOSTS) if rank != self.late]
        names = {"last": "steps", "ended": "ended"}
        files = [self.folder / f"{names[self.how]}.{rank}" for rank in others]
        until = time.monotonic() + LONGEST_SECONDS
        while not all(number_in(f) >= STEPS for f in files):
            if time.monotonic() > until:
                raise TimeoutError("the others do not come to their end")
            time.sleep(0.05)
        # Some time within which the others, which have not ended, may wait.
        time.sleep(1.0)


def main(folder, kind, late, after, how, min_hosts):
    folder, rank = pathlib.Path(folder), int(os.environ["TFDP_RANK"])
    is_too_late = how == "ended"
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(
            min_hosts=int(min_hosts),
            timeout_seconds=SHORT_TIMEOUT_SECONDS if is_too_late else TIMEOUT_SECONDS,
            silence_seconds=4.0,
        )
    )
    with strategy.scope():
        model = linear_model()
        inner = keras.optimizers.SGD(0.01, momentum=0.5)
        optimizer = tfdp.DistributedOptimizer(inner, sync=SYNCS[kind]())
        model.compile(optimizer, "mse", jit_compile=False)
    x, y = regression_data(STEPS * BATCH)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    pace = Pace(folder, rank, int(late), int(after), how)
    model.fit(x, y, callbacks=[pace], **options)
    weights = b"".join(w.tobytes() for w in model.get_weights())
    (folder / f"weights.{rank}").write_text(hashlib.sha256(weights).hexdigest())
    (folder / f"ended.{rank}").write_text(str(STEPS))


if __name__ == "__main__":
    main(*sys.argv[1:])
