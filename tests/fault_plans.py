"""Trainings with planned faults, which must end as if there had been none.

    python -m tests.fault_plans --plans 50 --seed 20261122 --folder out/faults

Each plan is drawn from its seed, and printed: what is trained, by how many workers, and
what goes wrong in each start: a worker is killed in a step, after one, while a
checkpoint is written, committed or restored, is stopped for seconds, or for longer than
the others wait for a sign of it and then continued or killed, gets SIGTERM or finds the
disk full; beside that one worker's disk may fail for a while, at any point of a save:
full, stale, or not the one of the others; between two starts the newest checkpoint is
damaged, or the number of workers changes. The training is started again until it has
come to its end. Then

- the final weights and optimizer are those of the same training without faults, bit for
  bit with as many workers, else within BOUND;
- in each epoch every sample was trained on once;
- a worker that was stopped for too long has been named by another;
- where a disk failed all workers have warned of the same, and named its worker alone;
- no start has lasted for half of `timeout_seconds`;
- nothing is left: no process, no half-written file, no part of a save that failed.

Workers are forked from this process, which has imported TensorFlow and used nothing of
it: real processes, without the seconds of the import.
"""

import argparse
import atexit
import dataclasses
import json
import os
import pathlib
import random
import re
import secrets
import shutil
import signal
import sys
import time
import traceback

import numpy as np

from tests.support.resumed_training import (
    DISK_ERRORS,
    DISK_POINTS,
    ROWS,
    SAMPLES,
    Options,
    main,
)
from tests.support.workers import free_port
from tfdp.checkpoint.manifest import MANIFEST_NAME, folders_newest_first

#: Only there to end a hang.
LONGEST_SECONDS = 900
MOST_STARTS = 8
# Of three replicas each has a third of the samples, in float32: 3e-8 of a gradient near
# 1, times a rate of 0.5 with momentum, in 24 steps. Two replicas differ by round-off of
# float64 only. A sample too many or too few moves weights by 1e-4.
BOUND = 1e-6
# Of those whose stops are to be too long, and how long these are: on a busy machine it
# takes some time until the others look.
SILENCE_SECONDS, LONG_STOP_SECONDS = 5.0, 20.0
TRAININGS = {
    "adam": {},
    "arrays": {"data": "arrays"},
    "parameters": {"shard": "parameters"},
    "everything": {
        "optimizer": "lars",
        "shard": "parameters",
        "accumulate": 2,
        "wire_dtype": "bfloat16",
    },
    "resized": {"optimizer": "sgd", "dtype": "float64", "dropout": 0.0},
    "resized-parameters": {
        "optimizer": "sgd",
        "dtype": "float64",
        "dropout": 0.0,
        "shard": "parameters",
    },
}
#: Those that no plan draws: they need packages that need not be there.
MORE_TRAININGS = {
    "grain": {"data": "grain"},
    "grain-shards": {"data": "grain-shards", "shard": "parameters"},
}
#: Not drawn either: which host takes a row differs after a restart, so that numbers
#: differ by round-off.
BALANCED = {"balanced": TRAININGS["resized"] | {"balance": "speed"}}


@dataclasses.dataclass
class Plan:
    """What is trained and what goes wrong.

    Args:
      number: of the plan.
      training: one of TRAININGS, MORE_TRAININGS or BALANCED.
      workers: of each start; the last for all that follow.
      faults: of each start; later ones have none.
      damage: before each start: None, "byte" or "half".
      silence_seconds: after which the others take a stopped worker for lost.
      disks: of each start, the disk that fails for a while; None: none does.
    """

    number: int
    training: str
    workers: list[int]
    faults: list[dict]
    damage: list[str | None]
    silence_seconds: float = 15.0
    disks: list[dict | None] = dataclasses.field(default_factory=list)


def draw(seed, number):
    """The plan of that number."""
    chance = random.Random(f"{seed} {number}")
    training = chance.choice(list(TRAININGS))
    starts = chance.choice([1, 1, 2, 3])
    workers = [2] * (starts + 1)
    if training.startswith("resized"):
        workers = [chance.choice([1, 2, 3]) for _ in range(starts + 1)]
    faults = []
    for start in range(starts):
        where = chance.choice(
            [*("within", "within", "after", "saving", "committing"), "restoring"]
        )
        how = chance.choice(
            {
                "within": ["kill", "kill", "stop", "term"],
                "after": ["kill", "raise", "stop", "term"],
                "saving": ["kill", "full"],
                "committing": ["kill"],
                "restoring": ["kill", "raise"],
            }[where]
        )
        rank = chance.randrange(workers[start])
        faults.append(
            {
                "where": where,
                "how": how,
                "rank": 0 if where == "committing" else rank,
                "number": 1 if where == "restoring" else chance.randint(1, 9),
                "seconds": 3.0 if how == "stop" else chance.random() * 0.05,
            }
        )
        if where in ("saving", "committing", "restoring"):
            faults[-1]["seconds"] = chance.choice([0.0, 1.0])
    damage = [None] + [
        chance.choice([None, None, "byte", "half"]) for _ in range(starts)
    ]
    silence_seconds = make_stops_long(faults, random.Random(f"{seed} {number} long"))
    disks = draw_disks(workers, random.Random(f"{seed} {number} disk"))
    return Plan(number, training, workers, faults, damage, silence_seconds, disks)


def draw_disks(workers, chance):
    """Draws whose disk fails in each start, and where in a save."""
    disks = []
    for count in workers:
        point = chance.choice(list(DISK_POINTS))
        how = chance.choice(DISK_POINTS[point])
        rank = chance.randrange(count) if point.endswith("the part") else 0
        times = chance.choice([1, 1, 2, 4])
        disk = {"point": point, "how": how, "rank": rank, "times": times}
        disk["number"] = chance.randint(1, 8)
        is_drawn = chance.random() < 0.7 and (how != "not shared" or count > 1)
        disks.append(disk if is_drawn else None)
    return disks


def make_stops_long(faults, chance):
    """Draws which stops are too long; how long another one may be silent."""
    silence_seconds = 15.0
    for fault in faults:
        may_be = fault["how"] == "stop" or fault["where"] in ("saving", "restoring")
        if may_be and chance.random() < 0.5:
            fault["how"] = chance.choice(["stop", "stop and kill"])
            fault["stop_seconds"] = LONG_STOP_SECONDS
            fault["seconds"] = min(fault["seconds"], 1.0)
            silence_seconds = SILENCE_SECONDS
        elif fault["how"] == "stop":
            # No shorter one is to be too long beside it.
            fault["stop_seconds"] = 3.0
    return silence_seconds


def fork_worker(options, environment, log):
    """The process number of a worker."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        os.setsid()
        target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.environ.update(environment)
        main(json.dumps(dataclasses.asdict(options)))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def run_workers(count, options, log):
    """Their exit codes; a signal as its negative number."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "TFDP_WORKERS": str(count)}
    if count > 1:
        environment |= {
            "TFDP_COORDINATOR": f"127.0.0.1:{free_port()}",
            "TFDP_JOB_KEY": secrets.token_hex(16),
        }
    numbers = [
        fork_worker(options, environment | {"TFDP_RANK": str(rank)}, f"{log}.{rank}")
        for rank in range(count)
    ]
    left, codes = dict(enumerate(numbers)), [0] * count
    deadline = time.monotonic() + LONGEST_SECONDS
    while left:
        for rank, number in list(left.items()):
            found, status = os.waitpid(number, os.WNOHANG)
            if found:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del left[rank]
        if time.monotonic() > deadline:
            for number in left.values():
                os.killpg(number, signal.SIGKILL)
            raise TimeoutError(f"workers {sorted(left)} hang; see {log}")
        time.sleep(0.05)
    return codes


def damage_newest(folder, how, chance):
    """Damages a file of the newest whole checkpoint, where there is one before it."""
    found = folders_newest_first(pathlib.Path(folder))
    whole = [
        checkpoint for checkpoint in found if (checkpoint / MANIFEST_NAME).exists()
    ]
    for checkpoint in whole[:1] if len(whole) > 1 else ():
        path = chance.choice(sorted(checkpoint.iterdir()))
        data = bytearray(path.read_bytes())
        if how == "half":
            data = data[: len(data) // 2]
        elif data:
            data[chance.randrange(len(data))] ^= 1 + chance.randrange(255)
        path.write_bytes(bytes(data))
        return path
    return None


def options_of(training):
    return (TRAININGS | MORE_TRAININGS | BALANCED)[training]


def numbers_of(result, rank):
    with np.load(f"{result}.{rank}.npz") as file:
        return dict(file)


def reference(training, workers, folder, known):
    """The numbers of the training without faults, made once."""
    if (training, workers) not in known:
        result = folder / f"reference-{training}-{workers}"
        options = Options(f"{result}.checkpoints", str(result), **options_of(training))
        codes = run_workers(workers, options, f"{result}.log")
        if any(codes):
            raise RuntimeError(f"the reference of {training} failed: {codes}")
        known[training, workers] = numbers_of(result, 0)
    return known[training, workers]


def check_samples(result, epochs):
    """Every sample once in each epoch, and every step the same whenever it ran."""
    steps = {}
    for path in pathlib.Path(result).parent.glob(
        f"{pathlib.Path(result).name}.*.samples"
    ):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            place = (said["epoch"], said["batch"])
            if steps.setdefault(place, said["samples"]) != said["samples"]:
                raise ValueError(
                    f"{place} was trained on other samples after a restart"
                )
    for epoch in range(epochs):
        seen = sorted(
            s for (e, _), samples in steps.items() if e == epoch for s in samples
        )
        if seen != list(range(SAMPLES)):
            raise ValueError(f"epoch {epoch} has not every sample once")
    if len(steps) != epochs * SAMPLES // ROWS:
        raise ValueError(f"{len(steps)} steps")


def check_names(fault, codes, log):
    """The others end, and one of them says who is stopped."""
    rank = fault["rank"]
    said = {other: pathlib.Path(f"{log}.{other}") for other in range(len(codes))}
    said = {other: path.read_text(errors="replace") for other, path in said.items()}
    others = [codes[other] for other in said if other != rank]
    if not others or f"fault: {fault}" not in said.pop(rank):
        return
    if fault["where"] == "within" and not any(others):
        return  # it came late, and the training had ended
    if not all(others) or not any(
        f"worker {rank} was silent" in text for text in said.values()
    ):
        raise ValueError(f"worker {rank} was stopped, and nobody says so; see {log}")


def words_of(disk):
    """What all workers say of a disk that fails."""
    rank, point = disk["rank"], disk["point"]
    if disk["how"] == "not shared":
        # Worker 0 cannot know whose directory is the wrong one, and says what it sees.
        seen = rank or 1
        return f"worker {seen} has written its part, but worker 0 does not find it at"
    cause = f"(OSError: [Errno {DISK_ERRORS[disk['how']][0]}]"
    if point.endswith("the part"):
        return f"worker {rank} could not write its part {cause}"
    if point == "delete":
        return "is whole, but worker 0 could not delete step-"
    is_whole = "is whole, but " if point == "commit" else "was not written: "
    return f"{is_whole}worker 0 could not finish it {cause}"


def check_disk(disk, workers, log):
    """All have warned of the same, once for each save, and of the right worker."""
    texts = [
        pathlib.Path(f"{log}.{r}").read_text(errors="replace") for r in range(workers)
    ]
    warned = [
        [line for line in text.splitlines() if "CheckpointWarning: The check" in line]
        for text in texts
    ]
    warned = [[line.partition("Warning: ")[2] for line in lines] for lines in warned]
    struck = texts[disk["rank"]].count(f"fault: {disk}")
    said = {tuple(lines) for lines in warned}
    lines = list(said)[0]
    # What could not be deleted is tried again, without a word.
    is_enough = len(lines) == struck
    if disk["point"] == "delete":
        is_enough = bool(lines) == bool(struck)
    blamed = set(re.findall(r"worker (\d+) could not", " ".join(lines)))
    words = words_of(disk)
    if (
        len(said) > 1
        or not is_enough
        or not all(words in line for line in lines)
        or blamed - {str(disk["rank"])}
    ):
        raise ValueError(f"{struck} times {words!r}, and what was said is {warned}")


def carry_out(plan, seed, folder, known):
    """Runs a plan; what came of it.

    Raises:
      Exception: it did not end as it must.
    """
    chance = random.Random(f"{seed} {plan.number} damage")
    result = folder / f"plan-{plan.number}"
    for path in folder.glob(f"{result.name}.*"):  # of an earlier run
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    checkpoints = f"{result}.checkpoints"
    said = []
    for start in range(MOST_STARTS):
        workers = plan.workers[min(start, len(plan.workers) - 1)]
        if start < len(plan.damage) and plan.damage[start]:
            damaged = damage_newest(checkpoints, plan.damage[start], chance)
            said.append(f"damaged {damaged.name if damaged else 'nothing'}")
        fault = plan.faults[start] if start < len(plan.faults) else None
        disk = plan.disks[start] if start < len(plan.disks) else None
        options = Options(
            *(checkpoints, str(result), start),
            fault=fault,
            disk=disk,
            silence_seconds=plan.silence_seconds,
            **options_of(plan.training),
        )
        began = time.monotonic()
        codes = run_workers(workers, options, f"{result}.{start}.log")
        seconds = time.monotonic() - began
        if seconds > options.timeout_seconds / 2:
            raise TimeoutError(f"start {start} took {seconds:.0f} s")
        said.append(f"{workers} workers ended with {codes}")
        if fault and fault.get("stop_seconds", 0.0) > plan.silence_seconds:
            check_names(fault, codes, f"{result}.{start}.log")
        if not any(codes):
            if disk and (fault is None or fault["how"] not in DISK_ERRORS):
                check_disk(disk, workers, f"{result}.{start}.log")
            break
    else:
        raise RuntimeError("it did not come to its end")
    found = numbers_of(result, 0)
    expected = reference(plan.training, plan.workers[0], folder, known)
    differences = {
        name: float(np.abs(found[name] - expected[name]).max(initial=0.0))
        for name in expected
        if not np.array_equal(found[name], expected[name])
    }
    largest = max(differences.values(), default=0.0)
    is_same = len(set(plan.workers)) == 1 and plan.training not in BALANCED
    if largest > (0.0 if is_same else BOUND):
        raise ValueError(f"numbers differ by {largest}: {differences}")
    check_samples(result, 3)
    left = [p for p in pathlib.Path(checkpoints).rglob(".writing-*")]
    left += pathlib.Path(checkpoints).parent.glob(f"{result.name}.checkpoints.of-*/*")
    # What could not be deleted goes before the next save, and there may be none.
    if disk is None or disk["point"] != "delete":
        left += [
            path
            for path in folders_newest_first(pathlib.Path(checkpoints))
            if not (path / MANIFEST_NAME).exists()
        ]
    if left:
        raise ValueError(f"left: {left}")
    return "; ".join([*said, f"largest difference {largest:g}"])


def run_plans(plans, seed, folder):
    """How many failed; prints each."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known, failed = {}, 0
    for plan in plans:
        began = time.monotonic()
        print(f"plan {json.dumps(dataclasses.asdict(plan))}", flush=True)
        try:
            print("  ", carry_out(plan, seed, folder, known), end="")
        except Exception as error:
            failed += 1
            print(f"   FAILED {type(error).__name__}: {error}", end="")
        print(f" ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(plans)} plans, seed {seed}: {failed} failed", flush=True)
    return failed


def command():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default="20261122")
    parser.add_argument("--folder", default="out/faults")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.plans)
    plans = [draw(options.seed, number) for number in numbers]
    return 1 if run_plans(plans, options.seed, options.folder) else 0


if __name__ == "__main__":
    sys.exit(command())
