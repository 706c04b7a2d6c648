"""All sizes of buckets of a model, timed in turn in one training; regrets from that.

    tfdp launch --workers 2 -m tests.support.tuning_grid SUBJECT ROWS STEPS ROUNDS FILE
    python -m tests.support.tuning_grid FILE...

The first trains, on all settings and for ROUNDS rounds, with `Autotune` for what
switches. The second reads what the first has written: what `Autotune` would have chosen
from the search and the first three rounds, and how fast that was, beside the fastest
setting and the defaults, in the rounds after these.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time

import tfdp
from tests.support import tuning_subjects
from tests.support.tuning_regrets import regrets
from tfdp.files.checked_json import write_json
from tfdp.tools.callbacks import autotune


class Grid(tfdp.callbacks.Autotune):
    """Keeps the trials, and ends the training with the tuning."""

    def on_train_begin(self, logs=None):
        #: Setting -> seconds of the processor that each of its steps took, by turn.
        self.busy = {}
        super().on_train_begin(logs)

    def _begin(self, setting):
        super()._begin(setting)
        self._busy_before = time.process_time()

    def _end_of_setting(self, tuning):
        taken = time.process_time() - self._busy_before
        steps = len(self._seconds) + autotune.WARM_UP_EXECUTIONS
        self.busy.setdefault(tuning.setting, []).append(taken / steps)
        super()._end_of_setting(tuning)
        if self._tuning is None:
            self.trials = tuning.trials
            self.model.stop_training = True


def train(subject, rows, steps, rounds, path):
    autotune.FINALISTS = 100  # all of them
    strategy = tfdp.auto_strategy()
    build, (x, y) = getattr(tuning_subjects, subject)()
    with strategy.scope():
        model = build()
    grid = Grid(steps=int(steps), settings=100, rounds=int(rounds))
    model.fit(
        x[: int(rows)],
        y[: int(rows)],
        batch_size=int(rows),
        epochs=10**6,
        steps_per_epoch=1,
        verbose=0,
        callbacks=[grid],
    )
    if strategy.is_chief:
        # The first turn of a setting traces: it is no measure.
        found = [
            {**dataclasses.asdict(trial), "processor": grid.busy[trial.setting][1:]}
            for trial in grid.trials
        ]
        write_json(
            path,
            {
                "subject": subject,
                "replicas": str(strategy),
                "rows": int(rows),
                "load": os.getloadavg()[0],
                "trials": found,
            },
        )


if __name__ == "__main__":
    if sys.argv[1] in vars(tuning_subjects):
        train(*sys.argv[1:])
    else:
        for name in sys.argv[1:]:
            print(pathlib.Path(name).name, json.dumps(regrets(name), indent=1))
