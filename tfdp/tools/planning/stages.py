"""The table of `tfdp plan` for a model in stages of a pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.layers.segments import LayerRun, Segment, size_of
from tfdp.plan.stages import held_activations, idle_share
from tfdp.tools.report.text import format_bytes, format_table

TITLES = ("stage", "layers", "weights", "activations held", "sent on per step")


@dataclasses.dataclass(frozen=True)
class StageRow:
    """One stage, on one device: bytes, those of a step for all rows of a group."""

    first: str
    last: str
    weights_bytes: int
    held_bytes: int
    sent_bytes: int


@dataclasses.dataclass(frozen=True)
class StageTable:
    """The stages of a model, for `group_rows` rows of a group in `micro_batches`."""

    model: str
    rows: tuple[StageRow, ...]
    group_rows: int
    micro_batches: int

    @property
    def fits(self) -> None:
        """No memory is given for it."""

    @property
    def idle(self) -> float:
        """The part of a step in which a device waits, with stages of equal time."""
        return idle_share(len(self.rows), self.micro_batches)

    def print(self) -> None:
        cells = [
            (
                f"{place}",
                row.first if row.first == row.last else f"{row.first} to {row.last}",
                *map(format_bytes, (row.weights_bytes, row.held_bytes, row.sent_bytes)),
            )
            for place, row in enumerate(self.rows)
        ]
        print(f"{self.model}:\n\n{format_table([TITLES, *cells])}\n")
        print(
            f"{self.group_rows} rows of a group in {self.micro_batches} micro-batches: "
            f"each device is idle for {self.idle:.0%} of a step, with stages of equal "
            "time"
        )
        print(
            "activations: outputs of layers, in the order 1F1B; what layers keep "
            "within them, gradients and the optimizer's state are not counted"
        )

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "idle": self.idle}


def stage_table(
    name: str, runs: Sequence[LayerRun], parts: int, rows: int, replicas: int
) -> StageTable:
    """The table of `runs`, with `parts` micro-batches of each replica's rows."""
    stages = len(runs)
    if replicas % stages:
        raise ConfigurationError(
            f"The model has {stages} stages, for groups of as many replicas, and "
            f"{replicas} are planned. Give --replicas {stages}, or a multiple."
        )
    group_rows, count = -(-rows * stages // replicas), parts * stages
    made, counted = [], set[int]()
    for place, run in enumerate(runs):
        weights = [v for v in Segment(run).variables if id(v) not in counted]
        counted.update(map(id, weights))
        outputs = [tensor for node in run.nodes for tensor in node.gives]
        held = held_activations(stages, count, place) / count
        taken = _row_bytes(run.gives) if place < stages - 1 else 0
        made.append(
            StageRow(
                run.nodes[0].operation.name,
                run.nodes[-1].operation.name,
                sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in weights),
                round(_row_bytes(outputs) * group_rows * held),
                2 * taken * group_rows,  # and their gradients back
            )
        )
    return StageTable(name, tuple(made), group_rows, count)


def _row_bytes(tensors: Sequence[Any]) -> int:
    return int(sum(size_of(t) * tf.as_dtype(t.dtype).size for t in tensors))
