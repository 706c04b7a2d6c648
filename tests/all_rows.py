"""Runs every row of every test, file by file, and goes on where it was stopped.

python -m tests.all_rows                 all of it; hours on two cores
python -m tests.all_rows --tier rest     what `make test` leaves out
python -m tests.all_rows --part 2/4      the second quarter, for four machines
python -m tests.all_rows --record        also writes tests/durations.json anew

Each file's result is kept under `out/test-all/COMMIT-TIER/`: a second run does what is
not there yet. The last line is made for docs/notes/versions.md.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from tests.support import tiers

REPOSITORY = pathlib.Path(__file__).parents[1]
#: Tables that take longer than everything else together, cut into so many pieces.
PIECES = {
    "tests/devices/test_conformance.py": 40,
    "tests/devices/test_damaged_files.py": 7,
    "tests/devices/test_losses_exact.py": 8,
    "tests/devices/test_metrics_exact.py": 4,
    "tests/devices/test_sharding.py": 4,
}
#: These start processes of their own, which have deadlines: one file of them at a time.
ALONE = ("tests/processes", "tests/network")
OUTCOMES = ("failure", "error", "skipped")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file, or a part of its rows that stand together.

    Args:
      number: of this part, of 1 to `of`.
      tier: whose rows; see `tests/support/tiers.py`.
    """

    file: str
    number: int = 1
    of: int = 1
    tier: str = "all"

    @property
    def is_alone(self) -> bool:
        return self.file.startswith(ALONE)

    def __str__(self) -> str:
        return self.file + (f" {self.number}/{self.of}" if self.of > 1 else "")

    def result(self, folder: pathlib.Path) -> pathlib.Path:
        name = self.file.replace("/", ".").removesuffix(".py")
        return folder / f"{name}.{self.number}-{self.of}.xml"

    def run(self, folder: pathlib.Path) -> int:
        """Runs the rows; the result appears under its name when all have ended.

        Returns:
          What pytest ended with.
        """
        result = self.result(folder)
        unfinished = result.with_suffix(".unfinished")
        command = [
            *(sys.executable, "-m", "pytest", self.file, "--tier", self.tier),
            *("--piece", f"{self.number}/{self.of}", f"--junitxml={unfinished}"),
            *("-q", "--tb=short", "-p", "no:cacheprovider"),
        ]
        with open(result.with_suffix(".txt"), "w") as output:
            done = subprocess.run(
                command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT
            )
        # 0: passed; 1: some failed; 5: no row, as may be in a piece of a file, and
        # where `make test` runs all. Else it was broken off, or the file could not be
        # read: no result, so it runs again.
        may_be_empty = self.of > 1 or self.tier == "rest"
        if done.returncode in (0, 1) or (done.returncode == 5 and may_be_empty):
            unfinished.replace(result)
        return done.returncode


def all_pieces(tier: str = "all") -> list[Piece]:
    files = sorted(REPOSITORY.joinpath("tests").rglob("test_*.py"))
    names = [path.relative_to(REPOSITORY).as_posix() for path in files]
    return [
        Piece(name, number, PIECES.get(name, 1), tier)
        for name in names
        for number in range(1, PIECES.get(name, 1) + 1)
    ]


@dataclasses.dataclass
class Total:
    """What some pieces gave."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, result: pathlib.Path) -> None:
        """Adds a result file of pytest."""
        for case in ElementTree.parse(result).getroot().iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            name = f"{file}::{case.get('name')}"
            ended = [outcome for outcome in OUTCOMES if case.find(outcome) is not None]
            if not ended:
                self.passed += 1
                self.seconds[name] = float(case.get("time", 0))
            elif ended == ["skipped"]:
                self.skipped += 1
            else:
                self.failed.append(name)

    def __str__(self) -> str:
        text = f"{self.passed:,} passed, {self.skipped:,} skipped"
        return f"{text}, {len(self.failed)} failed" + "".join(
            f"\n  FAILED {name}" for name in self.failed
        )


def total_of(pieces: list[Piece], folder: pathlib.Path) -> Total:
    """What the pieces gave; one without a result has failed."""
    total = Total()
    for piece in pieces:
        if piece.result(folder).exists():
            total.add(piece.result(folder))
        else:
            total.failed.append(f"{piece}: no result")
    return total


def run_all(
    pools: list[tuple[list[Piece], int]], folder: pathlib.Path
) -> Iterator[tuple[Piece, int]]:
    """Runs groups of pieces at a time, each as many at a time as stands beside it.

    Yields:
      Each piece that has ended, and what pytest ended with.
    """
    with contextlib.ExitStack() as stack:
        running = {}
        for group, jobs in pools:
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(jobs))
            running |= {pool.submit(piece.run, folder): piece for piece in group}
        for future in concurrent.futures.as_completed(running):
            yield running[future], future.result()


def commit() -> str:
    """The commit that is checked out; another name where something was changed."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True
        )
        return done.stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    if head and not git("status", "--porcelain"):
        return head
    # Nobody knows what will be changed next: such a result is never used again.
    return f"{head or 'unknown'}-changed-{time.time_ns()}"


def main(arguments=None) -> int:
    """0: every row that ran has passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.all_rows")
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--tier", choices=("rest", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"--part must be K/N with K from 1 to N. Received: {options.part}")
    checked_out = commit()
    folder = REPOSITORY / "out" / "test-all" / f"{checked_out}-{options.tier}"
    folder.mkdir(parents=True, exist_ok=True)
    pieces = all_pieces(options.tier)[part - 1 :: parts]
    began = time.monotonic()
    left = [piece for piece in pieces if not piece.result(folder).exists()]
    print(f"{len(pieces)} pieces, {len(pieces) - len(left)} of them done; {folder}")
    alone = [piece for piece in left if piece.is_alone]
    first = [piece for piece in left if not piece.is_alone and piece.number == 1]
    tables = [piece for piece in left if not piece.is_alone and piece.number > 1]
    # What starts processes mostly waits for them. Something of every file comes before
    # tables that take longer than all others.
    beside = max(options.jobs - 1, 1) if alone else options.jobs
    for pools in ([(alone, 1), (first, beside)], [(tables, options.jobs)]):
        for piece, code in run_all(pools, folder):
            minutes = (time.monotonic() - began) / 60
            own = f"{total_of([piece], folder)} (pytest ended with {code})"
            print(f"{minutes:6.1f} min  {piece}: {own}", flush=True)
    total = total_of(pieces, folder)
    if options.record:
        tiers.write_durations({**tiers.read_durations(), **total.seconds})
    today = datetime.date.today().isoformat()
    which = "every row" if options.tier == "all" else "what `make test` leaves out"
    print(f"{today}: {which} of {checked_out}, part {options.part}: {total}")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
