"""What `NaNGuard` found, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.step.finite_trace import Finding

__all__ = ["in_words"]

# A message names so many gradients of a replica.
MOST_NAMED = 3
WHAT = {
    "weight": "the weight",
    "input": "the input",
    "layer": "the output of layer",
}


def in_words(found: Sequence[Finding], places: Sequence[str], when: str) -> str:
    """What is not finite, where, and what to do."""
    by_rank: dict[int, list[Finding]] = {}
    for finding in found:
        by_rank.setdefault(finding.rank, []).append(finding)
    clauses = [
        f"{places[rank]}: {_in_order(findings)}" for rank, findings in by_rank.items()
    ]
    if not clauses:
        clauses = [
            "computed once more the batch was finite on every replica, so the cause "
            "is in its random draws, in XLA or in adding gradients up"
        ]
    return (
        f"A loss or a gradient is not finite {when}, which was left out: "
        f"{'; '.join(clauses)}. If it is the input, look at those rows; else a smaller "
        "learning rate, clipping or a loss that is defined everywhere helps. "
        "NaNGuard(on_nan='skip') goes on without such batches."
    )


def _in_order(findings: Sequence[Finding]) -> str:
    gradients = [finding for finding in findings if finding.kind == "gradient"]
    apart = ("gradient", "unknown")
    words = [_words(finding) for finding in findings if finding.kind not in apart]
    if gradients:
        named = ", ".join(finding.name for finding in gradients[:MOST_NAMED])
        more = len(gradients) - MOST_NAMED
        and_more = f" and {more} more" if more > 0 else ""
        words.append(f"the gradient of {named}{and_more}")
    clauses = ["first " + ", then ".join(words)] if words else []
    clauses += [
        f"more is not known, as the batch could not be computed again ({finding.name})"
        for finding in findings
        if finding.kind == "unknown"
    ]
    return ", ".join(clauses)


def _words(finding: Finding) -> str:
    if finding.kind == "loss":
        return "the loss"
    row = "" if finding.row is None else f", the first in row {finding.row}"
    return (
        f"{WHAT[finding.kind]} {finding.name} ({finding.nans} NaN and "
        f"{finding.infinities} infinite of {finding.numbers} numbers{row})"
    )
