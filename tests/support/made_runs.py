"""Records of runs that never ran, as `RunRecord` would have written them."""

import dataclasses
import json

from tfdp.tools.runs.entries import End, Epoch, Start, Steps
from tfdp.tools.runs.run_file import RunFile, steps_of_line
from tfdp.tools.runs.traces import chrome_trace

STEP_SECONDS, EXCHANGE_SECONDS, BETWEEN_SECONDS = 0.04, 0.004, 0.001
BATCH, BETWEEN_BYTES, WITHIN_BYTES = 32, 4_000_000, 8_000_000
FIRST_SECONDS = 3.0


@dataclasses.dataclass
class MadeRun:
    """A run of some workers.

    Args:
      workers: how many.
      steps: of all epochs.
      epochs: of equal length.
      slow: rank to seconds that it takes longer for a step; the others wait.
      slow_in: the part that takes longer: "computing", "input" or "between".
      every: a slow worker is slow in each step of as many.
      killed_at: no line after this step, and no end.
      session: of this start.
      began_seconds: when.
      first_epoch: with which it goes on.
      knows_exchange: whether the time in exchanges is known.
      present: the workers that write.
      model: what trains, in words.
      executed: steps in one call.
    """

    workers: int = 1
    steps: int = 60
    epochs: int = 3
    slow: dict = dataclasses.field(default_factory=dict)
    slow_in: str = "computing"
    every: int = 1
    killed_at: int | None = None
    session: str = "one"
    began_seconds: float = 1_790_000_000.0
    first_epoch: int = 0
    knows_exchange: bool = True
    present: tuple | None = None
    model: str = "net: 1,000 weights"
    executed: int = 1

    def write(self, folder):
        """Adds the files of all workers to `folder`, and returns it."""
        present = range(self.workers) if self.present is None else self.present
        for rank in present:
            file = RunFile(folder, rank)
            for entry in self.entries(rank):
                file.add(entry)
            file.close()
        return folder

    def start(self, rank):
        return Start(
            self.session,
            rank,
            self.workers,
            self.workers,
            f"host-{rank}",
            self.began_seconds,
            self.steps // self.epochs,
            0,
            tuple(f"host-{r}" for r in range(self.workers)) if rank == 0 else (),
            {
                "strategy": "DataParallelStrategy(...)",
                "model": self.model,
                "steps per execution": str(self.executed),
            },
            {"tfdp": "0.1", "keras": "3"},
            {"host": f"host-{rank}", "processor": "made up", "usable_cores": "2"},
        )

    def extra(self, step, rank):
        return self.slow.get(rank, 0.0) if step % self.every == 0 else 0.0

    def entries(self, rank):
        """What a worker writes."""
        yield self.start(rank)
        at, line = 0.0, None
        per_epoch = self.steps // self.epochs
        for step in range(1, self.steps + 1):
            if self.killed_at is not None and step > self.killed_at:
                return
            mine = self.extra(step, rank)
            most = max(self.extra(step, r) for r in range(self.workers))
            waits = most - mine
            inside = STEP_SECONDS + waits
            inside += mine if self.slow_in != "between" else 0.0
            between = BETWEEN_SECONDS + (mine if self.slow_in == "between" else 0.0)
            inside = FIRST_SECONDS if step == 1 else inside
            waited = 0.002 + (mine if self.slow_in == "input" else 0.0)
            at += inside + between
            batch = (step - 1) % per_epoch + 1
            epoch = self.first_epoch + (step - 1) // per_epoch
            exchange = EXCHANGE_SECONDS + waits if self.workers > 1 else 0.0
            this = Steps(
                self.session,
                step,
                1,
                epoch,
                batch,
                at,
                inside + between,
                inside,
                0.0,
                inside + between,
                waited,
                exchange if self.knows_exchange else None,
                BATCH,
                WITHIN_BYTES,
                BETWEEN_BYTES if self.workers > 1 else 0,
                500_000_000 + 1000 * step,
                600_000_000 + rank,
                loss=2.0 / (1 + step / 20),
            )
            line = this if line is None else added(line, this)
            is_full = line.steps >= steps_of_line(step - line.steps)
            if is_full or batch == per_epoch:
                yield line
                line = None
            if batch == per_epoch:
                logs = {"loss": 1.0 / (epoch + 1), "val_loss": 1.5 / (epoch + 1)}
                yield Epoch(self.session, epoch, step, at, 0.0, logs)
        yield End(self.session, self.steps, at)


def added(line, this):
    """Both in one line."""
    sums = ("seconds", "step_seconds", "input_seconds", "exchange_seconds", "samples")
    changes = {
        name: getattr(line, name) + getattr(this, name)
        for name in (*sums, "within_bytes", "between_bytes", "steps")
        if getattr(line, name) is not None
    }
    longest = max(line.longest_seconds, this.longest_seconds)
    return dataclasses.replace(this, longest_seconds=longest, **changes)


@dataclasses.dataclass
class Op:
    """Of a trace."""

    thread: str
    name: str
    start_us: float
    duration_us: float


def write_trace(path):
    """A trace of two replicas: of replica 0 half an exchange is hidden, of 1 nothing.

    0: computing 0..60 ms, exchange 40..80, update 80..90; 1: computing 0..40,
    exchange 40..80, update 80..100.
    """
    call = "StatefulPartitionedCall/"
    ops = [
        Op("a", f"{call}dense/MatMul:MatMul", 0.0, 60e3),
        Op("b", f"{call}tfdp_all_reduce/Recv:Recv", 40e3, 40e3),
        Op("a", f"{call}sgd/AssignSub:AssignSub", 80e3, 10e3),
        Op("c", f"{call}replica_1/dense/MatMul:MatMul", 0.0, 40e3),
        Op("c", f"{call}replica_1/tfdp_all_reduce/Recv:Recv", 40e3, 40e3),
        Op("c", f"{call}replica_1/sgd/AssignSub:AssignSub", 80e3, 20e3),
        Op("d", "IteratorGetNext:IteratorGetNext", 0.0, 1e3),
    ]
    text = chrome_trace(ops, ["sgd"])
    assert json.loads(text)
    path.write_text(text, "utf-8")
    return path
