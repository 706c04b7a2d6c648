"""Plants one fault at a time in a copy of the project, and sees `make test` find it.

    python -m tests.planted_faults            all of them: an hour or more on two cores
    python -m tests.planted_faults exchange   those whose file has this word
    python -m tests.planted_faults --check    only whether each still fits its file

A fault is a line that a hurried change could leave, one in each of 20 rooms. What `make
test` draws may be made smaller as long as it finds them all. Its rows are those of a
commit that has the fault: rows near a change come first, and most faults are found
within a minute or two. Each line names the row: whether it is one about the fault is
for you to see, as a row that fails without the fault finds them all.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import both_halves

REPOSITORY = Path(__file__).parents[1]
ROUND = "3"
SECONDS = 3600.0
#: The test that all faults fit their files would find each.
SEEING_ITSELF = (
    "--deselect",
    "tests/pure/test_tiers.py::test_the_planted_faults_fit_their_files",
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """`before` becomes `after` in a file of tfdp, where `before` stands once."""

    file: str
    before: str
    after: str

    @property
    def path(self) -> Path:
        return REPOSITORY / "tfdp" / self.file

    def fits(self) -> bool:
        return self.path.read_text("utf-8").count(self.before) == 1


FAULTS = (
    Fault(  # statistics are averaged without their rows
        "chain/buffers.py",
        "tf.where(own > 0, value * own, ",
        "tf.where(own > 0, value * 0.5, ",
    ),
    Fault(  # sums lose what replicas 2 and later have
        "exchange/send_receive.py",
        "return sum_in_order(parts)",
        "return sum_in_order(parts[:2])",
    ),
    Fault(  # clipping uses a part of the norm
        "sharding/optimizers.py",
        "tf.sqrt(tf.add_n([*whole, *squares]))",
        "tf.sqrt(tf.add_n([*whole, *squares][:1]))",
    ),
    Fault(  # a dummy row counts
        "tracing/rows.py",
        "return tf.where(self.present, value, tf.zeros_like(value))",
        "return value",
    ),
    Fault(  # all replicas draw the same numbers
        "variables/global_seed.py",
        "offset = (first_draw + rank) * SEED_STRIDE",
        "offset = first_draw * SEED_STRIDE",
    ),
    Fault(  # variances miss what lies between replicas
        "layers/moments.py", "within + between)", "within)"
    ),
    Fault(  # weight decay is missing from the norm
        "optimizers/lars.py",
        "slope_norm + decay * weight_norm + self.epsilon",
        "slope_norm + self.epsilon",
    ),
    Fault(  # one number less than the ratio says
        "compression/top_k.py", "max(1, math.ceil(ratio * ", "max(1, int(ratio * "
    ),
    Fault(  # DiLoCo without Nesterov's look ahead
        "step/local_sgd.py", "w - rate * (d + mu * b) for", "w - rate * b for"
    ),
    Fault(  # the last step of a decay is one too early
        "plan/schedule_formulas.py",
        "return (total_steps + 1 - step) / (",
        "return (total_steps - step) / (",
    ),
    Fault(  # slow hosts get more rows
        "plan/balance.py", "share / whole / time for", "share / whole * time for"
    ),
    Fault(  # a damaged checkpoint is read
        "checkpoint/array_files.py", "self._read(name, crc, CHECK_BYTES)", "pass"
    ),
    Fault(  # a killed writer's file is in the way for ever
        "files/atomic.py",
        "    remove_leftovers(target.parent)\n    half",
        "    half",
    ),
    Fault(  # a damaged length is read
        "data/framing.py", "return (masked & 0xFFFFFFFF) == checksum", "return True"
    ),
    Fault(  # two workers of one host have one rank
        "cluster/launchers.py",
        'rank=0 if workers == 1 else integer(found, "RANK", least=0)',
        'rank=0 if workers == 1 else integer(environment, "LOCAL_RANK", least=0)',
    ),
    Fault(  # a launcher that a signal has ended says that all went well
        "launch/restarts.py", "else 128 + number", "else 0"
    ),
    Fault(  # hosts add other pieces than they were sent
        "hosts/ring.py",
        "parts[(first - step) % len(parts)]",
        "parts[(first + step) % len(parts)]",
    ),
    Fault(  # a mean over a cast count of rows is no mean
        "lint/arithmetic.py",
        "is_count = number >= LEAST_ROWS and (is_cast or is_divisor)",
        "is_count = number >= LEAST_ROWS and is_divisor",
    ),
    Fault(  # a plan reports the least memory
        "tools/planning/liveness.py",
        "return max(found, key=lambda memory: memory.peak_bytes)",
        "return min(found, key=lambda memory: memory.peak_bytes)",
    ),
    Fault(  # a resumed run draws other numbers
        "callbacks/training_state.py",
        "np.random.set_state(state)",
        "state",
    ),
    Fault(  # rows that were added to a batch count
        "data/padding.py",
        "signed = tf.where(places < count, count, -count)",
        "signed = tf.where(places < size, count, -count)",
    ),
)


def find(fault: Fault, folder: Path) -> str:
    """The first row of `make test` that fails in a copy of the project with the fault;
    empty: none does."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    clone = ["git", "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(copy)]
    subprocess.run(clone, check=True)
    (copy / ".venv").symlink_to(REPOSITORY / ".venv")
    path = copy / "tfdp" / fault.file
    path.write_text(path.read_text("utf-8").replace(fault.before, fault.after), "utf-8")
    environment = os.environ | {"PYTHONPATH": str(copy), "TFDP_TEST_SEED": ROUND}
    log = folder / f"{fault.file.replace('/', '-')}.log"
    with log.open("w") as output:
        halves = [
            subprocess.Popen(
                [
                    *without_nice(both_halves.command_of(half, jobs)),
                    "-x",
                    *SEEING_ITSELF,
                ],
                cwd=copy,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for half, jobs in (("processes", 1), ("devices", 2))
        ]
        try:
            is_found = has_failed(halves)
        finally:
            for process in halves:
                process.terminate()
                process.wait()
    lines = log.read_text("utf-8", "replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or ["?"])[0] if is_found else ""


def without_nice(command: list[str]) -> list[str]:
    """Drops the low priority: whichever half finds the fault first ends the run."""
    return command[command.index(sys.executable) :]


def has_failed(halves: list[subprocess.Popen]) -> bool:
    """Waits for the first failure, or for the end of both."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in halves]
        if any(codes):
            return True
        if None not in codes:
            return False
        time.sleep(1.0)
    return False


def main(words: list[str]) -> int:
    wrong = [fault.file for fault in FAULTS if not fault.fits()]
    if wrong:
        print(f"do not fit any more: {', '.join(wrong)}")
        return 1
    if words == ["--check"]:
        return 0
    missed = 0
    folder = Path(tempfile.mkdtemp(prefix="planted-faults-"))
    print(f"logs: {folder}")
    for fault in FAULTS:
        if words and words[0] not in fault.file:
            continue
        began = time.monotonic()
        row = find(fault, folder)
        missed += not row
        state = "found" if row else "MISSED"
        seconds = time.monotonic() - began
        print(f"{state} {seconds:5.0f} s {fault.file}: {row[:100]}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
