"""Which rows each tier of the tests runs, by how long people wait.

quick  what is pure, and the rows marked `quick`
test   every test function that is not long, of a table a sample
rest   what `test` leaves out, the rows marked `slow` too
all    everything: what `test` runs, and the rest

`tests/durations.json` holds what each row took; tests/all_rows.py writes it anew. A row
that it does not hold takes no time worth speaking of, or is new: it runs.
"""

import json
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

DURATIONS = pathlib.Path(__file__).parents[1] / "durations.json"
TIERS = ("quick", "test", "rest", "all")
#: What the rows of one test function may take together, in the tier `test`; the mark
#: `worth_seconds` says another number.
ROWS_SECONDS = 1.5
#: What the rows of a function marked `quick` may take together, in that tier.
TOUR_SECONDS = 6.0
#: What a single row may take where none fits.
QUICKEST_ROW_SECONDS = 3.0
#: Shorter ones are not written down.
LEAST_SECONDS = 0.1


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


def rows_that_fit(
    names: Iterable[str],
    seconds: Mapping[str, float],
    worth: Mapping[str, float] = MappingProxyType({}),
) -> set[str]:
    """The rows that the tier `test` runs.

    Of each test function a sample of the rows, the same every time, as many as fit
    together in what it is worth; where none fits, the quickest, if it takes no more
    than QUICKEST_ROW_SECONDS.

    Args:
      names: of all rows.
      seconds: what rows took; see `read_durations`.
      worth: what the function of a row is worth, where that is not ROWS_SECONDS.
    """
    functions: dict[str, list[str]] = {}
    for name in names:
        functions.setdefault(name.partition("[")[0], []).append(name)
    fitting = set()
    for rows in functions.values():
        left = max(worth.get(row, ROWS_SECONDS) for row in rows)
        sample = []
        for row in sorted(rows, key=lambda row: zlib.crc32(row.encode())):
            if seconds.get(row, 0.0) <= left:
                sample.append(row)
                left -= seconds.get(row, 0.0)
        quickest = min(rows, key=lambda row: seconds.get(row, 0.0))
        if not sample and seconds.get(quickest, 0.0) <= QUICKEST_ROW_SECONDS:
            sample.append(quickest)
        fitting.update(sample)
    return fitting
