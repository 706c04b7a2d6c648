"""The result of a parity check: plain data, a table to read, JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from tfdp.files.checked_json import finite
from tfdp.tools.report.text import format_table
from tfdp.tools.testing.rounding import excess

# A bound above this share of a variable's movement would hide a wrong step.
LARGEST_TELLING_SHARE = 0.1

# A choice of the model, not an error.
INTENDED = "batch normalization per replica"
# Rounding hides everything else.
HIDDEN_BY_ROUNDING = "nothing to tell by"
# No rounding that N replicas add: one device is wrong, too.
LOST_SUMS = "a kernel that adds in half precision"
# Draws that differ by design hide everything else, too.
HIDDEN_BY_DRAWS = "random layers"

# Of more the table shows the worst.
MOST_EXCEEDING = 8

HOLDS, EXCEEDS, TOO_SMALL = "holds", "exceeds", "too small to tell"


@dataclasses.dataclass(frozen=True)
class VariableRow:
    """One variable: its distance between N replicas and one device, and the bound.

    `largest_difference` and `bound` are those of the step with the largest ratio.

    Args:
      path: the variable's path, layer names first.
      shape: its shape.
      trainable: whether the optimizer updates it.
      largest_difference: largest magnitude, over its elements and all replicas.
      bound: the effect of rounding; see `tfdp.tools.testing.rounding`.
      movement: largest distance on one device from the initial value.
      step: the step of `largest_difference` and `bound`, from 1.
      first_step_over: the first step that exceeds the bound; None: never.
      update_ratio: length of the first update on N replicas over that on one device;
        None: it did not move.
    """

    path: str
    shape: tuple[int, ...]
    trainable: bool
    largest_difference: float
    bound: float
    movement: float
    step: int
    first_step_over: int | None
    update_ratio: float | None

    @property
    def ratio(self) -> float:
        """Difference over bound; rounding does not explain a ratio above 1."""
        return excess(self.largest_difference, self.bound)

    @property
    def verdict(self) -> str:
        """ "holds", "exceeds" or "too small to tell"."""
        if self.first_step_over is not None:
            return EXCEEDS
        if self.movement and self.bound > LARGEST_TELLING_SHARE * self.movement:
            return TOO_SMALL
        return HOLDS

    @property
    def is_still(self) -> bool:
        """Whether it is frozen, and keeps its value on each side."""
        return not (self.trainable or self.movement or self.largest_difference)

    @property
    def tells(self) -> bool:
        """Whether the variable moved, and far enough for a wrong step to show."""
        return bool(self.movement) and self.verdict != TOO_SMALL


def are_conclusive(rows: Sequence[VariableRow]) -> bool:
    """Whether half of the trained variables moved far enough to show errors.

    Some never do: a bias before a normalization has no gradient but rounding.
    """
    moved = [row for row in rows if row.trainable and row.movement]
    return bool(moved) and 2 * sum(row.tells for row in moved) >= len(moved)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A known cause with its evidence.

    Args:
      cause: its short name, the same in every version.
      where: the layers, options or batches that it concerns.
      evidence: what showed it.
      why: what happens.
      instead: what to write instead.
    """

    cause: str
    where: tuple[str, ...]
    evidence: str
    why: str
    instead: str

    def __str__(self) -> str:
        places = f": {', '.join(self.where)}" if self.where else ""
        parts = {"found by": self.evidence, "why": self.why, "instead": self.instead}
        lines = [f"cause: {self.cause}{places}"]
        lines += [_wrapped(f"{name}: ", text) for name, text in parts.items() if text]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`. `print(report)` is the table; of many rows that
    exceed their bounds it has the worst.

    Args:
      model: the model's name.
      strategy: the class of the strategy.
      replicas: number of replicas.
      steps: training steps.
      batch_rows: rows of each global batch.
      seed: of `build` and the order of rows.
      rows: one per variable, in the model's order.
      causes: the known causes of a failure.
      notes: changes that the check made to the model.
      loss_one_device: the loss that `fit` reported; None: there is none.
      loss_replicas: the same on N replicas.
      error: what training under the strategy raised; None: nothing.
    """

    model: str
    strategy: str
    replicas: int
    steps: int
    batch_rows: tuple[int, ...]
    seed: int
    rows: tuple[VariableRow, ...]
    causes: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    loss_one_device: float | None = None
    loss_replicas: float | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every variable holds, and enough are conclusive."""
        is_lost = any(finding.cause == LOST_SUMS for finding in self.causes)
        holds = self.error is None and not self.exceeding and not is_lost
        return holds and are_conclusive(self.rows)

    @property
    def inconclusive(self) -> bool:
        """Whether a wrong step would not show: bounds are wide, or draws differ."""
        known = {finding.cause for finding in self.causes}
        if self.error is None and known == {HIDDEN_BY_DRAWS}:
            return True
        known -= {HIDDEN_BY_ROUNDING}
        return not (self.ok or self.error or self.exceeding or known)

    @property
    def is_intended(self) -> bool:
        """Whether the only cause is batch normalization per replica, by design."""
        names = {finding.cause for finding in self.causes}
        return self.error is None and names == {INTENDED}

    @property
    def exceeding(self) -> tuple[VariableRow, ...]:
        """The rows that rounding does not explain."""
        return tuple(row for row in self.rows if row.verdict == EXCEEDS)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`; numbers that are not finite become strings."""
        plain = dataclasses.asdict(self)
        for name in ("ok", "inconclusive", "is_intended"):
            plain[name] = getattr(self, name)
        for row, derived in zip(plain["rows"], self.rows, strict=True):
            row |= {"ratio": derived.ratio, "verdict": derived.verdict}
        return dict(finite(plain))

    def __str__(self) -> str:
        blocks = ["\n".join(self._heading())]
        moving = [row for row in self.rows if not row.is_still]
        worst = sorted(self.exceeding, key=lambda row: -row.ratio)[:MOST_EXCEEDING]
        shown = [row for row in moving if row.verdict != EXCEEDS or row in worst]
        if shown:
            rows = [TITLES, *map(_cells, shown)]
            table = format_table(rows, left=(0, len(TITLES) - 1))
            if left_out := len(moving) - len(shown):
                table += (
                    f"\n{left_out} more exceed their bounds: all are in to_json(), "
                    "which `tfdp check --json PATH` writes"
                )
            if still := len(self.rows) - len(moving):
                table += f"\n{still} more, which are not trained, keep their values"
            blocks.append(table)
        causes = [str(finding) for finding in self.causes]
        # Ends with what counts: the cause of a failure, or that there is none.
        summary = [self._summary()]
        blocks += [*causes, *summary] if self.is_intended else [*summary, *causes]
        return "\n\n".join(blocks)

    def _heading(self) -> list[str]:
        rows = ", ".join(map(str, self.batch_rows))
        lines = [
            f"parity of {self.model}: {self.replicas} replicas of {self.strategy} "
            f"against one device, {self.steps} steps, global batches of {rows} rows, "
            f"seed {self.seed}"
        ]
        if self.loss_one_device is not None and self.loss_replicas is not None:
            lines.append(
                f"loss that fit reports: {self.loss_one_device:.6g} on one device, "
                f"{self.loss_replicas:.6g} on {self.replicas} replicas"
            )
        return lines + [_wrapped("note: ", note) for note in self.notes]

    def _summary(self) -> str:
        if self.error is not None:
            return f"FAILS: training under the strategy raised {self.error}"
        total = len(self.rows)
        over = (
            f"{len(self.exceeding)} of {total} variables differ by more than rounding"
        )
        over += " explains"
        if self.is_intended:
            return (
                f"HOLDS, but for batch normalization (intended): {over}, because each "
                "replica normalizes its own rows; with these layers frozen all hold"
            )
        if (
            self.inconclusive
            and self.causes
            and self.causes[0].cause == HIDDEN_BY_DRAWS
        ):
            return (
                "INCONCLUSIVE: random numbers differ between one device and the "
                "replicas by design, which would hide a wrong step"
            )
        if self.exceeding:
            worst = max(self.exceeding, key=lambda row: row.ratio)
            times = f"{worst.ratio:.1e} times the bound"
            return f"FAILS: {over}; the worst, {times}: {worst.path}"
        if self.inconclusive:
            return (
                "INCONCLUSIVE: most variables moved by less than ten times what "
                "rounding explains, which would hide a wrong step"
            )
        if any(finding.cause == LOST_SUMS for finding in self.causes):
            return (
                "FAILS: in half precision weights move less than 4/5 as far as in "
                "float32, on one device too"
            )
        if not self.ok:
            return "FAILS: rounding moves most variables about as far as training does"
        largest = max(row.ratio for row in self.rows)
        silent = sum(row.verdict == TOO_SMALL for row in self.rows)
        return (
            f"HOLDS: all {total} variables are within what rounding explains; the "
            f"largest difference is {largest:.2f} of its bound"
            + (f"; {silent} moved too little to be conclusive" if silent else "")
        )


TITLES = ("variable", "shape", "difference", "bound", "ratio", "first update", "")


def _cells(row: VariableRow) -> tuple[str, ...]:
    verdict = row.verdict
    if row.first_step_over is not None:
        verdict = f"EXCEEDS from step {row.first_step_over}"
    return (
        row.path,
        str(row.shape),
        f"{row.largest_difference:.1e}",
        f"{row.bound:.1e}",
        f"{row.ratio:.2f}" if row.ratio < 1000 else f"{row.ratio:.1e}",
        "" if row.update_ratio is None else f"x {row.update_ratio:.4g}",
        verdict,
    )


def _wrapped(label: str, text: str) -> str:
    indent = " " * len(label)
    return textwrap.fill(text, 88, initial_indent=label, subsequent_indent=indent)
