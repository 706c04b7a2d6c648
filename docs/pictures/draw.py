"""Draws the pictures of figures from the tables of benchmarks/figures.md.

python docs/pictures/draw.py

A test holds the pictures against the tables: who changes a table draws again.
"""

from __future__ import annotations

import html
import math
import pathlib
import re
from collections.abc import Sequence

FOLDER = pathlib.Path(__file__).parent
TABLES = FOLDER.parents[1] / "benchmarks" / "figures.md"
#: Seen as different by people who do not see red and green as different.
COLORS = ("#999999", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2")
INK, GRID = "#333333", "#dddddd"
#: Of the plotted area within a picture.
LEFT, TOP, WIDTH, HEIGHT = 62, 58, 560, 230

Bars = dict[str, dict[str, float]]  # group -> name -> figure


def rows_under(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose first line begins with `header`.

    Raises:
      LookupError: when the page has no such table.
    """
    lines = page.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(header):
            body = lines[number + 2 :]
            end = next((i for i, row in enumerate(body) if not row.startswith("|")), 0)
            return [
                [cell.strip() for cell in row.strip("|").split("|")]
                for row in body[: end or None]
            ]
    raise LookupError(f"no table begins with {header!r}")


def first_number(cell: str) -> float:
    """The figure of a cell such as `1,208 (1.000)`."""
    return float(re.match(r"[\d.,]+", cell).group().replace(",", ""))


class Picture:
    """A drawing that grows line by line."""

    def __init__(self, title: str, note: str, height: int):
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" '
            f'font-size="12" width="640" height="{height}" '
            f'viewBox="0 0 640 {height}">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="640" height="{height}" fill="#ffffff"/>',
        ]
        self.text(12, 20, title, size=14, weight="bold")
        self.text(12, 37, note, size=11)

    def text(self, x, y, words, *, anchor="start", size=12, weight="normal"):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}" fill="{INK}">{html.escape(words)}</text>'
        )

    def line(self, x1, y1, x2, y2, color=GRID):
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{color}"/>'
        )

    def bar(self, x, y, width, height, color):
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" fill="{color}"/>'
        )

    def legend(self, names: Sequence[str], colors: Sequence[str]):
        x, y = LEFT, TOP + HEIGHT + 42
        for name, color in zip(names, colors, strict=False):
            if x + 26 + 6.6 * len(name) > 630:
                x, y = LEFT, y + 18
            self.bar(x, y - 10, 12, 12, color)
            self.text(x + 17, y, name)
            x += 36 + 6.6 * len(name)

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def draw_bars(title: str, note: str, groups: Bars, ticks: Sequence[float]) -> str:
    """Bars side by side, with the figure above each one."""
    picture = Picture(title, note, TOP + HEIGHT + 70)
    most = ticks[-1]
    for tick in ticks:
        y = TOP + HEIGHT * (1 - tick / most)
        picture.line(LEFT, y, LEFT + WIDTH, y)
        picture.text(LEFT - 6, y + 4, f"{tick:,g}", anchor="end")
    names = list(next(iter(groups.values())))
    step = WIDTH / len(groups)
    width = step * 0.86 / len(names)
    for place, (group, figures) in enumerate(groups.items()):
        left = LEFT + place * step + step * 0.07
        for number, (name, figure) in enumerate(figures.items()):
            height = HEIGHT * figure / most
            x, y = left + number * width, TOP + HEIGHT - height
            picture.bar(x + 1, y, width - 2, height, COLORS[names.index(name)])
            middle = x + width / 2
            picture.text(middle, y - 4, f"{figure:,g}", anchor="middle", size=10)
        picture.text(left + step * 0.43, TOP + HEIGHT + 18, group, anchor="middle")
    picture.legend(names, COLORS)
    return str(picture)


def draw_curves(
    title: str, note: str, curves: dict[str, dict[int, float]], ticks: Sequence[float]
) -> str:
    """Lines over numbers of processes, both axes in powers."""
    picture = Picture(title, note, TOP + HEIGHT + 70)
    numbers = sorted({number for curve in curves.values() for number in curve})
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def place(number: float, figure: float) -> tuple[float, float]:
        across = math.log(number / numbers[0]) / math.log(numbers[-1] / numbers[0])
        up = (math.log(figure) - low) / (high - low)
        return LEFT + 20 + (WIDTH - 40) * across, TOP + HEIGHT * (1 - up)

    for tick in ticks:
        y = place(numbers[0], tick)[1]
        picture.line(LEFT, y, LEFT + WIDTH, y)
        picture.text(LEFT - 6, y + 4, f"{tick:,g}", anchor="end")
    for number in numbers:
        x = place(number, ticks[0])[0]
        picture.text(x, TOP + HEIGHT + 18, str(number), anchor="middle")
    colors = (COLORS[4], COLORS[5])
    for curve, color in zip(curves.values(), colors, strict=True):
        points = [place(number, figure) for number, figure in sorted(curve.items())]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        picture.parts.append(
            f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        picture.parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'
            for x, y in points
        ]
    picture.legend(list(curves), colors)
    return str(picture)


def memory(page: str) -> str:
    """What a replica holds at rest, by stage."""
    groups: Bars = {}
    for count, shard, _, _, at_rest, _ in rows_under(page, "| N | shard |"):
        name = shard.replace(", `remat`", " with remat")
        group = groups.setdefault(f"{count} replicas", {})
        group[name] = first_number(at_rest)
    return draw_bars(
        "What a replica holds at rest, MB, by shard=",
        "Adam on 100.6 million float32 weights; logical CPUs, measured",
        groups,
        (0, 400, 800, 1200),
    )


def two_workers(page: str) -> str:
    """How much faster two processes train than one, in parts of twice."""
    header = "| arm | `train-mlp` | efficiency |"
    wanted = ("stock-multi-worker", "torch-gloo (DDP)", "tfdp-sockets", "tfdp-mpi")
    rows = {row[0]: row for row in rows_under(page, header)}
    groups = {
        title: {arm: first_number(rows[arm][column]) for arm in wanted}
        for title, column in (("dense network, 20M", 2), ("CNN, 1.2M", 5))
    }
    return draw_bars(
        "Training by two processes: efficiency",
        "images a second over twice those of one process (of PyTorch: of its own)",
        groups,
        (0, 0.25, 0.5, 0.75, 1),
    )


def small_sums(page: str) -> str:
    """Processor time of a small sum over many processes."""
    curves: dict[str, dict[int, float]] = {"a ring": {}, "in few rounds": {}}
    for row in rows_under(page, "| processes | what | rounds |"):
        if row[1] == "sum of 4 kB":
            for curve, cell in zip(curves.values(), row[5:7], strict=True):
                curve[int(row[0])] = first_number(cell)
    return draw_curves(
        "A sum of 4 kB over many processes: processor time, ms",
        "of all processes together, on two cores; a busy machine",
        curves,
        (0.1, 1, 10, 100, 1000),
    )


PICTURES = {
    "memory.svg": memory,
    "two-workers.svg": two_workers,
    "small-sums.svg": small_sums,
}


def main() -> None:
    """Writes all of them."""
    page = TABLES.read_text("utf-8")
    for name, draw in PICTURES.items():
        FOLDER.joinpath(name).write_text(draw(page), "utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
