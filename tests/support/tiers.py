"""Which rows each tier of the tests runs, by how long people wait.

quick  what is pure, and the rows marked `quick`
test   of every test function a fixed sample of its rows, of all other rows one in 24,
       others at each commit, and what imports a changed module; tests/planted_faults.py
       shows that this finds what it should
rest   what `test` leaves out, the rows marked `slow` too
all    everything: what `test` runs, and the rest

`tests/durations.json` holds what each row took; tests/all_rows.py writes it anew. A row
that it does not hold takes no time worth speaking of, or is new: it runs.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import time
import zlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

REPOSITORY = pathlib.Path(__file__).parents[2]
DURATIONS = REPOSITORY / "tests" / "durations.json"
TIERS = ("quick", "test", "rest", "all")
#: What the rows of one test function may take together, in the tier `test`; the mark
#: `worth_seconds` gives another number.
ROWS_SECONDS = 1.5
#: The share of it that the fixed sample has. The rest is for the rows of the round.
FIXED_SHARE = 0.2
#: After so many commits every row that is not marked slow has run.
ROUNDS = 24
#: What the rows that import a changed module may take beyond the two samples.
AFFECTED_SECONDS = 60.0
#: What the rows of tools may take together, where no tool has changed.
TOOLS_SECONDS = 10.0
#: What the rows of a function marked `quick` may take together, in that tier.
TOUR_SECONDS = 6.0
#: What a single row may take where none fits.
QUICKEST_ROW_SECONDS = 2.5
#: Shorter ones are not written down.
LEAST_SECONDS = 0.1
#: Names the round; see `round_of_commit`.
SEED_VARIABLE = "TFDP_TEST_SEED"
MAIN_BRANCHES = ("origin/HEAD", "origin/main", "main", "origin/master", "master")

#: Rooms of tools: no training imports them.
TOOL_ROOMS = frozenset({"tools"})
#: Tables whose fixed samples have all of what they are worth.
WHOLE_SHARE = (
    *("test_conformance.py", "test_defects.py", "test_generator.py"),
    *("test_living_meetings.py", "test_framework_contract.py"),
    "test_exchange_faults.py",
)
#: How the names of their tests begin.
TOOL_TESTS = (
    *("test_autotune", "test_bench", "test_check_any", "test_check_command"),
    *("test_check_parity", "test_check_report", "test_check_target"),
    *("test_plan_command", "test_planning"),
    *("test_report", "test_run_record", "test_run_report", "test_selftest"),
    *("test_simulat", "test_tune", "test_tuning"),
)


def read_durations(path=DURATIONS) -> dict[str, float]:
    """Seconds by the row's name, `tests/pure/test_x.py::test_y[z]`."""
    by_file = json.loads(path.read_text("utf-8"))
    return {
        f"{file}::{row}": seconds
        for file, rows in by_file.items()
        for row, seconds in rows.items()
    }


def write_durations(seconds: dict[str, float], path=DURATIONS) -> None:
    """Writes what `read_durations` reads, a line for each row that takes time."""
    by_file: dict[str, dict[str, float]] = {}
    for name in sorted(seconds):
        if seconds[name] >= LEAST_SECONDS:
            file, _, row = name.partition("::")
            by_file.setdefault(file, {})[row] = round(seconds[name], 1)
    path.write_text(json.dumps(by_file, indent=0) + "\n", "utf-8")


def git(*arguments: str) -> str:
    """What git prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def round_of_commit() -> int:
    """The number by which the tier `test` draws: that of the commit in its history.

    Hashes alone promise nothing: 24 of them leave a third of all rows out. The numbers
    of 24 commits in a row cover all. A clone without history draws by the
    hash, files without git by the day. TFDP_TEST_SEED overrides them.
    """
    if os.environ.get(SEED_VARIABLE):
        return int(os.environ[SEED_VARIABLE])
    commit = git("rev-parse", "HEAD")
    if not commit:
        return int(time.time()) // 86400
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(commit[:8], 16)
    return int(git("rev-list", "--count", "--first-parent", "HEAD"))


def changed_files() -> set[str]:
    """Python files that this branch has changed, by their paths in the repository.

    On the main branch: that the last commit has changed. Those that are not committed
    belong to both.
    """
    main = next(filter(None, (git("rev-parse", name) for name in MAIN_BRANCHES)), "")
    base = main and git("merge-base", "HEAD", main)
    if not base or base == git("rev-parse", "HEAD"):
        base = git("rev-parse", "HEAD~1") or "HEAD"
    lines = git("diff", "--name-only", base, "--", "*.py").splitlines()
    lines += git(
        "ls-files", "--others", "--exclude-standard", "--", "*.py"
    ).splitlines()
    return set(lines)


def is_of_tools(name: str) -> bool:
    """Whether a row, or its file, tests a tool."""
    return file_name(name).startswith(TOOL_TESTS)


def file_name(name: str) -> str:
    """Of a row's name, or of a path, the last part of the path."""
    return name.partition("::")[0].rpartition("/")[2]


def has_changed_tools(changed: Iterable[str]) -> bool:
    """Whether a file of a tool is among those."""
    rooms = (pathlib.PurePosixPath(path).parts for path in changed)
    return any(
        parts[0] == "benchmarks" or (parts[0] == "tfdp" and parts[1] in TOOL_ROOMS)
        for parts in rooms
    )


def by_chance(name: str) -> int:
    """An order of rows, the same every time: neighbours in a table differ little."""
    return zlib.crc32(name.encode())


def rows_that_fit(
    names: Iterable[str],
    seconds: Mapping[str, float],
    worth: Mapping[str, float] = MappingProxyType({}),
    share: float = 1.0,
) -> set[str]:
    """Of each test function a sample of its rows, the same every time.

    As many as fit together in what the function is worth; where none fits, the
    quickest, if it takes no more than QUICKEST_ROW_SECONDS. Both count by the share.

    Args:
      names: of all rows.
      seconds: what rows took; see `read_durations`.
      worth: what the function of a row is worth, where that is not ROWS_SECONDS.
      share: of both that is used; all of it for the tables in WHOLE_SHARE.
    """
    functions: dict[str, list[str]] = {}
    for name in names:
        functions.setdefault(name.partition("[")[0], []).append(name)
    fitting = set()
    for rows in functions.values():
        part = 1.0 if file_name(rows[0]).startswith(WHOLE_SHARE) else share
        left = part * max(worth.get(row, ROWS_SECONDS) for row in rows)
        sample = take(sorted(rows, key=by_chance), seconds, left)
        quickest = min(rows, key=lambda row: (seconds.get(row, 0.0), row))
        if not sample and seconds.get(quickest, 0.0) <= part * QUICKEST_ROW_SECONDS:
            sample.append(quickest)
        fitting.update(sample)
    return fitting


def take(names: Iterable[str], seconds: Mapping[str, float], left: float) -> list[str]:
    """Those that fit together in the seconds that are left, the first ones first."""
    taken = []
    for name in names:
        if seconds.get(name, 0.0) <= left:
            taken.append(name)
            left -= seconds.get(name, 0.0)
    return taken


@dataclasses.dataclass(frozen=True)
class Draw:
    """What the tier `test` draws its rows by.

    Args:
      number: of the round; 24 that follow each other cover every row.
      nearness: from the file of a test to the number of imports between it and a
        changed module.
      tools: whether a tool has changed.
    """

    number: int
    nearness: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tools: bool = False

    def rows(
        self,
        names: Iterable[str],
        seconds: Mapping[str, float],
        worth: Mapping[str, float] = MappingProxyType({}),
    ) -> set[str]:
        """The rows that run, of those names; see `rows_that_fit`."""
        names = list(names)
        tools = [] if self.tools else [name for name in names if is_of_tools(name)]
        core = list(set(names).difference(tools))
        chosen = rows_that_fit(core, seconds, worth, FIXED_SHARE)
        chosen.update(name for name in core if self.is_due(name))
        chosen.update(self._smoke(tools, seconds))
        near = [name for name in names if name.partition("::")[0] in self.nearness]
        near.sort(key=lambda name: (self.distance(name), by_chance(name)))
        more = (name for name in near if name not in chosen)
        return chosen | set(take(more, seconds, AFFECTED_SECONDS))

    def is_due(self, name: str) -> bool:
        """Whether the round has this row, besides the fixed sample."""
        return (by_chance(name) // 7 - self.number) % ROUNDS == 0

    def distance(self, name: str) -> float:
        """How many imports the row's file is from a change; infinite: not affected."""
        return self.nearness.get(name.partition("::")[0], float("inf"))

    def _smoke(self, tools: list[str], seconds: Mapping[str, float]) -> list[str]:
        """Of each function the quickest row, as many as fit, others in each round."""
        quickest: dict[str, str] = {}
        for name in sorted(tools, key=lambda name: (seconds.get(name, 0.0), name)):
            quickest.setdefault(name.partition("[")[0], name)
        at_once = [name for name in tools if name not in seconds]
        longer = [name for name in quickest.values() if name in seconds]
        longer.sort(key=lambda name: zlib.crc32(f"{self.number} {name}".encode()))
        return at_once + take(longer, seconds, TOOLS_SECONDS)

    def __str__(self) -> str:
        tools = (
            "the tools' rows as all others" if self.tools else "few of the tools' rows"
        )
        return (
            f"rows drawn by {SEED_VARIABLE}={self.number}; {len(self.nearness)} files "
            f"import what has changed; {tools}"
        )
