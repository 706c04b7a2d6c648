"""The table of docs/notes/planned-memory.md: each case in a fresh process, in turn.

    python -m tests.planning --out out/planning.jsonl --minutes 30
    python -m tests.planning --out out/planning.jsonl --rounds 3 --jobs 2
    python -m tests.planning --show out/planning.jsonl

Cases are drawn at random, always in the same order; with `--rounds` they are those of
`tests.planning.sample`. Those that the file holds are left out, so a run goes on where
it was stopped.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from os import environ

from benchmarks.memory import ENVIRONMENT
from tests.planning.case import Case
from tests.planning.hub import HUB_MODELS
from tests.planning.models import MODELS
from tests.planning.sample import ROWS, sample

SECONDS_OF_CASE = 420
# Traced in seconds.
QUICK = ("BERTMini", "MobileNet", "MobileNetV3Small", "VGG16")


def all_cases():
    """Each model once on one replica; then the quick models; then all the others."""
    cases = [
        Case(model, rows, replicas, stage, remat)
        for model, rows, replicas, stage, remat in itertools.product(
            MODELS, ROWS, (1, 2, 4), range(4), (False, True)
        )
        if (replicas > 1 or stage == 0)
        # 124 million weights on one replica only: 16 bytes each on every other one.
        and not (model == "GPT2Small" and replicas > 1)
    ]
    random.Random(17).shuffle(cases)
    first = [Case(model, 8, 1, 0, False) for model in MODELS]
    quick = [case for case in cases if case.model in QUICK]
    return list(dict.fromkeys([*first, *quick, *cases]))


def run(path, cases, minutes, jobs, seconds):
    """Measures and plans, `jobs` cases at a time, those that `path` does not hold."""
    done = {json.dumps(_key(row)) for row in read(path)}
    end = time.monotonic() + 60 * minutes
    lock = threading.Lock()

    def one(case):
        if time.monotonic() > end or json.dumps(dataclasses.asdict(case)) in done:
            return
        row = run_case(case, seconds)
        with lock:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(line_of(row), flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, cases))


def run_case(case, seconds=SECONDS_OF_CASE):
    found = dataclasses.asdict(case)
    with tempfile.TemporaryDirectory(prefix="tfdp-planning-") as folder:
        # In which order ops run changes from step to step, and from process to process.
        for number, what in enumerate(("measure", "measure", "predict")):
            result = pathlib.Path(folder, f"{number}.json")
            try:
                done = subprocess.run(
                    _command(case, what, result),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=seconds,
                    env={**environ, **ENVIRONMENT},
                )
            except subprocess.TimeoutExpired:
                return {**found, "failed": f"{what}: {seconds} s"}
            if done.returncode or not result.exists():
                last = done.stdout.strip().splitlines()[-1:]
                return {**found, "failed": f"{what}: {last}"}
            new = json.loads(result.read_text("utf-8"))
            if "measured" in new and found.get("measured", 0) > new["measured"]:
                new = {**new, "measured": found["measured"], "added": found["added"]}
            found |= new
    return found


def _command(case, what, result):
    request = json.dumps(dataclasses.asdict(case))
    words = ["-m", "tests.planning.case", what, request, str(result)]
    if what == "measure" and case.hosts > 1:
        words = ["-m", "tfdp", "launch", "--workers", str(case.hosts), *words]
    return [sys.executable, *words]


def _key(row):
    return {
        field.name: row.get(field.name, field.default)
        for field in dataclasses.fields(Case)
    }


def read(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def error_of(row):
    return row["predicted"] / row["measured"] - 1


def line_of(row):
    case = (
        f"{row['model']:<17} {row['local_rows']:>3} rows {row['replicas']} replicas "
        f"stage {row['stage']} {'remat' if row['remat'] else '     '} "
        f"{row.get('hosts', 1)} hosts {row.get('communication', 'plain')}"
    )
    if "failed" in row:
        return f"{case} failed: {row['failed']}"
    added = max(row["added"])
    own = (row["predicted"] - row["stored"]) / added - 1
    return (
        f"{case} measured {row['measured'] / 1e6:8.1f} MB predicted "
        f"{row['predicted'] / 1e6:8.1f} {100 * error_of(row):+6.1f}% "
        f"(of the step's own {added / 1e6:.1f} MB {100 * own:+.0f}%) "
        f"in {row['seconds']:.0f} s"
    )


def show(path):
    rows = read(path)
    good = [row for row in rows if "failed" not in row]
    for row in rows:
        print(line_of(row))
    unknown = [row for row in good if not row.get("is_known", True)]
    summary("said to be not known", unknown)
    good = [row for row in good if row not in unknown]
    summary("all others", good)
    for name in (*MODELS, *HUB_MODELS):
        summary(name, [row for row in good if row["model"] == name])
    for key in ("stage", "replicas", "remat", "local_rows"):
        for value in sorted({row[key] for row in good}):
            summary(f"{key} {value}", [row for row in good if row[key] == value])


def summary(name, rows):
    if not rows:
        return
    errors = [error_of(row) for row in rows]
    sizes = sorted(map(abs, errors))
    short = sum(row["needed"] < row["measured"] for row in rows)
    print(
        f"{name:<20} {len(rows):>3} cases  median "
        f"{100 * statistics.median(sizes):4.1f}%  "
        f"worst {100 * min(errors):+.1f}% {100 * max(errors):+.1f}%  within 10%: "
        f"{sum(size <= 0.1 for size in sizes)}  measured above peak + margin: {short}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, help="a sample of so many rounds")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--seconds", type=int, default=SECONDS_OF_CASE)
    parser.add_argument("--show", type=pathlib.Path)
    options = parser.parse_args()
    if options.out:
        cases = all_cases() if options.rounds is None else sample(options.rounds)
        run(options.out, cases, options.minutes, options.jobs, options.seconds)
    if options.show:
        show(options.show)


if __name__ == "__main__":
    main()
