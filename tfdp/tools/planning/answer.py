"""The result of `tfdp plan`: as text tables, as JSON, and as an HTML page."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from tfdp.tools.planning.memory_plan import MemoryPlan
from tfdp.tools.planning.ways import Way
from tfdp.tools.report.html_page import TABLE_STYLE, html_page, html_table
from tfdp.tools.report.plots import draw_bars
from tfdp.tools.report.text import format_table

WAY_TITLES = (
    *("way to need less", "peak", "with margin", "fits"),
    *("more FLOPs", "sent in a step"),
)
# Replicas on both need the same.
PLACE = "(GPU or CPU)"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A plan (`plan`), the largest batch that fits, and settings that need less."""

    model: str
    plan: MemoryPlan
    largest: MemoryPlan | None
    ways: Sequence[Way]

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        plan = self.plan
        of = f"a replica of {plan.replicas}" if plan.replicas > 1 else "one replica"
        text = (
            f"{self.model}: {of} {PLACE} with {plan.local_rows} rows needs "
            f"{_size(plan.peak_bytes)} at the peak of a step"
        )
        if plan.memory_bytes is None:
            return f"{text}."
        given = _size(plan.memory_bytes)
        if not plan.is_known:
            return f"{text}, perhaps much more: whether it fits in {given} is unknown."
        text += (
            f", and {_size(plan.needed_bytes)} with the margin that a prediction needs"
        )
        if plan.fits:
            spare = 1 - plan.needed_bytes / plan.memory_bytes
            return f"{text}. It fits in {given}, with {spare:.0%} to spare."
        return f"{text}. It does not fit in {given}."

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None: no memory was given."""
        return self.plan.fits

    def part_rows(self) -> list[tuple[str, str, str]]:
        """(part, size, share), in the order of COLOURS."""
        plan = self.plan
        return [
            (part, _size(plan.parts[part]), f"{share:.0%}")
            for part in COLOURS
            if (share := plan.parts.get(part, 0) / max(plan.peak_bytes, 1)) >= 0.0005
        ]

    def way_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                way.name,
                _size(way.peak_bytes),
                _size(way.needed_bytes),
                "yes" if way.fits else "no",
                # Not -0%.
                f"{round(way.more_flops, 2) + 0.0:+.0%}",
                _size(way.sent_bytes),
            )
            for way in self.ways
        ]

    def fact_rows(self) -> list[tuple[str, str]]:
        plan = self.plan
        rows = [
            ("peak with its margin", _size(plan.needed_bytes)),
            ("FLOPs of a replica in a step", f"{plan.flops:.3g}"),
            ("sent by a replica in a step", _size(plan.sent_bytes)),
            ("shard", plan.shard + _remat_text(plan.remat)),
        ]
        if plan.all_rows_bytes:
            title = "received from other replicas for losses and metrics"
            rows.append((title, _size(plan.all_rows_bytes)))
        if plan.host_parts:
            rows.append(("of the host's memory, by a replica", _size(plan.host_bytes)))
        notes = list(plan.notes)
        if self.largest is not None:
            size = _size(self.largest.peak_bytes)
            text = f"{_at_least(self.largest)} rows for each replica ({size})"
            rows.append(("largest batch that fits", text))
            if self.largest.larger_may_fit:
                notes.append(
                    f"whether more than {self.largest.local_rows} rows fit: no larger "
                    "batch was tried"
                )
        return [*rows, *(("not known", note) for note in notes)]

    def print(self) -> None:
        print(self.sentence)
        for titles, rows, left in (
            (("part", "bytes", "share"), self.part_rows(), (0,)),
            (("besides", ""), self.fact_rows(), (0, 1)),
            (WAY_TITLES, self.way_rows(), (0,)),
        ):
            if rows:
                print()
                print(format_table([titles, *rows], left))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "plan": self.plan.to_json(),
            "largest": None if self.largest is None else self.largest.to_json(),
            "ways": [dataclasses.asdict(way) for way in self.ways],
        }

    def page(self) -> str:
        """An HTML page: bars and tables, no script, no other file."""
        bars = [_bar(f"{self.plan.local_rows} rows", self.plan)]
        if self.largest is not None:
            name = f"{_at_least(self.largest)} rows, the most that fit"
            bars.append(_bar(name, self.largest))
        tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
            ("Memory by part", ("part", "bytes", "share"), self.part_rows()),
            ("Besides", ("", ""), self.fact_rows()),
            ("Ways to need less", WAY_TITLES, self.way_rows()),
        ]
        shown = {part for *_, parts in bars for part in parts}
        colours = {part: colour for part, colour in COLOURS.items() if part in shown}
        limit = None
        if self.plan.memory_bytes is not None:
            memory_mb = self.plan.memory_bytes / 1e6
            limit = f"memory: {memory_mb:,.0f} MB", memory_mb
        return html_page(
            f"tfdp plan: {self.model}",
            f"<p>{html.escape(self.sentence)}</p>",
            draw_bars("Memory of a replica", bars, colours, "MB", limit=limit),
            *(html_table(*table) for table in tables if table[2]),
            style=TABLE_STYLE,
        )


def _bar(name: str, plan: MemoryPlan) -> tuple[str, str, dict[str, float]]:
    parts = {part: size_bytes / 1e6 for part, size_bytes in plan.parts.items()}
    return name, _size(plan.peak_bytes), parts


def _at_least(plan: MemoryPlan) -> str:
    return f"{'at least ' if plan.larger_may_fit else ''}{plan.local_rows}"


def _remat_text(remat: bool | str) -> str:
    if not remat:
        return ""
    policy = f'(policy="{remat}")' if isinstance(remat, str) else ""
    return f", with tfdp.remat{policy}"


def _size(size_bytes: int) -> str:
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:,.1f} kB"
    return f"{size_bytes / 1e6:,.1f} MB"


# Drawn in this order: what stays in memory first, what comes and goes last.
COLOURS = {
    "weights": "#1f5fa8",
    "slots": "#7a4fa0",
    "state": "#555555",
    "batch": "#d9a521",
    "activations": "#9dbbdb",
    "gradients": "#c2571a",
    "exchange": "#2f7d4f",
    "update": "#b07aa1",
    "scratch": "#bbbbbb",
}
