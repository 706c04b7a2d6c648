"""What late and dying hosts cost: quorum DiLoCo, restarts, and backup workers.

    python -m benchmarks.quorum --data tinyshakespeare.txt --seconds 600
    python -m benchmarks.quorum --data tinyshakespeare.txt --case backup

Four processes of this machine train a small character model, with `--step-seconds` of
sleep in each step in the place of a device's work, so that a host that is away leaves
no core to the others. Every `--fault-seconds` one of them, in turn, is killed and
started again, or stopped for `--pause-seconds`.

goodput  tokens that reached the weights, of those that the same training, without
         faults, reads in the same time
loss     of held-out text, at the end; beside it that of synchronous training without
         faults on as many tokens

The ten minutes that a figure needs, with a fault every 30 s:

    python -m benchmarks.quorum --data tinyshakespeare.txt --seconds 600 \
        --baseline-seconds 120 --fault-seconds 30

With `--case backup` no host fails; each sleeps `--step-seconds` and an exponential time
of mean `--tail-seconds` in each step. The formula is that of `tfdp.sync.BackupWorkers`,
with what a step takes without a tail as t0.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A script of its own: the files beside this one have names of installed modules.
HOST = "from benchmarks.quorum import main\n\nmain()\n"
WORKERS, ROWS, LENGTH, EPOCH_STEPS = 4, 8, 32, 20
TRAINING_PART = 0.9
WITHOUT = re.compile(r"after update (\d+) ended without workers ([\d, ]+)")


# A worker.


def text_parts(path: str) -> tuple:
    """The number of symbols, and text to train on and to hold out, as numbers."""
    import numpy as np

    text = np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
    symbols, numbers = np.unique(text, return_inverse=True)
    cut = int(TRAINING_PART * len(numbers))
    return len(symbols), numbers[:cut].astype("int32"), numbers[cut:].astype("int32")


def work(options: argparse.Namespace) -> None:
    """One host of a training; notes its steps and losses in files of its folder."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp

    arm, folder = options.arm, pathlib.Path(options.folder)
    is_elastic = arm != "synchronous"
    communication = tfdp.Communication(
        min_hosts=1 if is_elastic else None,
        silence_seconds=options.silence_seconds,
        timeout_seconds=120,
    )
    strategy = tfdp.MultiHostDataParallelStrategy(communication=communication)
    rank = strategy.cluster.rank
    symbols, train, held_out = text_parts(options.data)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                layers.Embedding(symbols, 32),
                layers.Conv1D(64, 5, padding="causal", activation="relu"),
                layers.Conv1D(64, 5, padding="causal", activation="relu"),
                layers.Dense(symbols),
            ]
        )
        sync: tfdp.sync.DiLoCo | tfdp.sync.BackupWorkers | None = None
        if arm == "quorum":
            sync = tfdp.sync.DiLoCo(
                every=EPOCH_STEPS, quorum=WORKERS - 1, grace_seconds=options.grace
            )
        elif arm == "backup":
            sync = tfdp.sync.BackupWorkers(spare=options.spare)
        optimizer = tfdp.DistributedOptimizer(keras.optimizers.Adam(2e-3), sync=sync)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        optimizer.build(model.trainable_variables)
    starts = np.random.default_rng(2).permutation(len(train) - LENGTH - 1)
    places = tf.data.Dataset.from_tensor_slices(starts).repeat()
    windows = places.batch(WORKERS * ROWS, drop_remainder=True).map(
        lambda at: tf.gather(train, at[:, None] + tf.range(LENGTH + 1, dtype=at.dtype))
    )
    data = windows.map(lambda rows: (rows[:, :-1], rows[:, 1:]))
    ends = np.arange(0, len(held_out) - LENGTH - 1, LENGTH)[: options.held_out_rows]
    text = held_out[ends[:, None] + np.arange(LENGTH + 1)]
    tails = random.Random(rank)

    class Notes(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            (folder / f"pid.{rank}").write_text(str(os.getpid()))
            self.file = (folder / f"{rank}.{os.getpid()}.jsonl").open("a")

        def note(self, **values: object) -> None:
            self.file.write(json.dumps({"time": time.time(), **values}) + "\n")
            self.file.flush()

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            tail = 0.0
            if options.tail_seconds:
                tail = tails.expovariate(1 / options.tail_seconds)
            time.sleep(options.step_seconds + tail)

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            counters = [
                v for v in self.model.optimizer.variables if "sync_updates" in v.path
            ]
            count = [*counters, self.model.optimizer.iterations][0]
            self.note(update=int(count.numpy()))

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            self.note(loss=(logs or {}).get("val_loss"))

    callbacks: list = [Notes()]
    if not is_elastic:
        checkpoints = folder / "checkpoints"
        callbacks.append(
            tfdp.callbacks.Checkpoint(checkpoints, every_steps=EPOCH_STEPS)
        )
    model.fit(
        data,
        epochs=options.epochs,
        steps_per_epoch=EPOCH_STEPS,
        validation_data=(text[:, :-1], text[:, 1:]),
        verbose=0,
        callbacks=callbacks,
    )


# The driver.


class Training:
    """A training under `tfdp launch`, in a folder of its own."""

    def __init__(self, options: argparse.Namespace, arm: str, **changes: object):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"quorum-{arm}-"))
        self.arm = arm
        values = {**vars(options), "folder": self.folder, **changes}
        script = self.folder / "host.py"
        script.write_text(HOST)
        words = [str(script), "--arm", arm]
        for name in (
            "data",
            "folder",
            "step_seconds",
            "tail_seconds",
            "grace",
            "spare",
        ):
            words += [f"--{name.replace('_', '-')}", str(values[name])]
        for name in ("silence_seconds", "held_out_rows", "epochs"):
            words += [f"--{name.replace('_', '-')}", str(values[name])]
        self.output = (self.folder / "output").open("w")
        restarts = ["--max-restarts", "1000"]
        if arm != "synchronous":
            restarts += ["--restart", "one"]
        launch = [sys.executable, "-m", "tfdp", "launch", "--workers", str(WORKERS)]
        self.process = subprocess.Popen(
            [*launch, *restarts, *words],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONPATH": str(ROOT),
            },
        )

    def lines(self) -> dict[tuple[int, int], list[dict]]:
        """By rank and process."""
        found = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            rank, pid, _ = path.name.split(".")
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()
            found[int(rank), int(pid)] = [json.loads(line) for line in whole]
        return found

    def wait_until_it_trains(self, most_seconds: float = 300.0) -> None:
        """Until all workers have made an epoch: TensorFlow has started."""
        until = time.monotonic() + most_seconds
        while sum(len(rows) > EPOCH_STEPS for rows in self.lines().values()) < WORKERS:
            if time.monotonic() > until or self.process.poll() is not None:
                self.end()
                raise SystemExit((self.folder / "output").read_text()[-4000:])
            time.sleep(0.2)

    def disturb(self, options: argparse.Namespace) -> tuple[float, float]:
        """Runs for `--seconds` with a fault now and then; when it began and ended."""
        self.wait_until_it_trains()
        began, faults = time.time(), 0
        while time.time() < began + options.seconds and self.process.poll() is None:
            time.sleep(0.1)
            every = options.fault_seconds
            due = int((time.time() - began) / every) if every else 0
            if due <= faults:
                continue
            faults = due
            who = (faults + faults // 2) % WORKERS  # both kinds reach all of them
            pid = int((self.folder / f"pid.{who}").read_text())
            try:
                if faults % 2:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(options.pause_seconds)
                    os.kill(pid, signal.SIGCONT)
                else:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it is being started again
        return began, time.time()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.output.close()

    def counted(self, began: float, ended: float) -> int:
        """Host steps of this time that reached the weights."""
        if self.arm == "synchronous":
            steps = [
                row["update"]
                for rows in self.lines().values()
                for row in rows
                if "update" in row and row["time"] <= ended
            ]
            before = [
                row["update"]
                for rows in self.lines().values()
                for row in rows
                if "update" in row and row["time"] <= began
            ]
            return WORKERS * (max(steps) - max(before, default=0))
        missed = {
            int(update): {int(rank) for rank in ranks.split(",")}
            for update, ranks in WITHOUT.findall((self.folder / "output").read_text())
        }
        total = 0
        for (rank, _), rows in self.lines().items():
            updates = [(row["time"], row["update"]) for row in rows if "update" in row]
            newest = max((update for _, update in updates), default=0)
            for at, update in updates:
                end_of_round = -(-update // EPOCH_STEPS) * EPOCH_STEPS
                counts = end_of_round <= newest
                counts = counts and rank not in missed.get(end_of_round, ())
                total += bool(counts and began <= at <= ended)
        return total

    def last_loss(self) -> float:
        losses = [
            (row["time"], row["loss"])
            for rows in self.lines().values()
            for row in rows
            if row.get("loss") is not None
        ]
        return max(losses)[1] if losses else float("nan")

    def steps_made(self) -> int:
        return max(
            (row.get("update", 0) for rows in self.lines().values() for row in rows),
            default=0,
        )


def run_faults(options: argparse.Namespace) -> list[dict]:
    """Each arm with faults and without, and synchronous training on as many tokens."""
    results = []
    for arm in ("quorum", "synchronous"):
        training = Training(options, arm, tail_seconds=0)
        try:
            began, ended = training.disturb(options)
        finally:
            training.end()
        quiet = Training(options, arm, tail_seconds=0)
        calm = argparse.Namespace(**{**vars(options), "fault_seconds": 0})
        calm.seconds = options.baseline_seconds
        try:
            first, last = quiet.disturb(calm)
        finally:
            quiet.end()
        rate = quiet.counted(first, last) / (last - first)
        steps = training.steps_made()
        epochs = max(training.counted(0, ended) // WORKERS // EPOCH_STEPS, 1)
        same = Training(
            options, "synchronous", epochs=epochs, step_seconds=0, tail_seconds=0
        )
        try:
            same.process.wait()
        finally:
            same.end()
        results.append(
            {
                "arm": arm,
                "goodput": training.counted(began, ended) / (rate * (ended - began)),
                "tokens": training.counted(0, ended) * ROWS * LENGTH,
                "steps": steps,
                "loss": training.last_loss(),
                "undisturbed_loss": same.last_loss(),
                "folder": str(training.folder),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results


def harmonic(n: int) -> float:
    """H_n."""
    return sum(1 / k for k in range(1, n + 1))


def run_backup(options: argparse.Namespace) -> list[dict]:
    """Seconds of a step beside the formula."""
    results: list[dict] = []
    base = 0.0
    for spare, tail in ((1, 0.0), (1, options.tail_seconds), (2, options.tail_seconds)):
        training = Training(options, "backup", spare=spare, tail_seconds=tail)
        calm = argparse.Namespace(**{**vars(options), "fault_seconds": 0})
        try:
            began, ended = training.disturb(calm)
        finally:
            training.end()
        steps = [
            row["update"]
            for rows in training.lines().values()
            for row in rows
            if "update" in row and began <= row["time"] <= ended
        ]
        seconds = (ended - began) / (max(steps) - min(steps))
        base = base or seconds
        expected = base + tail * (harmonic(WORKERS) - harmonic(spare))
        row = {"spare": spare, "tail_seconds": tail, "seconds": seconds}
        row |= {"formula": expected if tail else base}
        row |= {"all_hosts": base + tail * harmonic(WORKERS)}
        results.append(row)
        print(json.dumps(row), flush=True)
    return results


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    names = [name for name in rows[0] if name != "folder"]
    lines = [names, ["---"] * len(names)]
    lines += [
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in map(row.get, names)]
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measures, or is one worker of a training."""
    first_line = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=first_line)
    parser.add_argument("--data", default=os.environ.get("TFDP_BENCHMARK_TEXT"))
    parser.add_argument("--case", choices=["faults", "backup"], default="faults")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--baseline-seconds", type=float, default=30.0)
    parser.add_argument("--fault-seconds", type=float, default=15.0)
    parser.add_argument("--pause-seconds", type=float, default=5.0)
    parser.add_argument("--silence-seconds", type=float, default=3.0)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--tail-seconds", type=float, default=0.05)
    parser.add_argument("--grace", type=float, default=0.5)
    parser.add_argument("--spare", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=100_000)
    parser.add_argument("--held-out-rows", type=int, default=256)
    parser.add_argument("--json", help="also write all figures here")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.data:
        parser.error("--data (or TFDP_BENCHMARK_TEXT) must name a text file")
    if options.arm:
        work(options)
        return
    run = run_faults if options.case == "faults" else run_backup
    results = run(options)
    print(table(results))
    if options.json:
        figures = {"suite": "quorum", "options": vars(options), "results": results}
        pathlib.Path(options.json).write_text(json.dumps(figures, default=str))


if __name__ == "__main__":
    main()
