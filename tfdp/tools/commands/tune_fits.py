"""What `tfdp tune` asks of the planner, in a process of its own: what fits the memory.

`python -m tfdp.tools.commands.tune_fits ORDERS`, JSON. In the command's own process
TensorFlow would take the GPUs that the trials need.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.checked_json import parse_json
from tfdp.files.json_file import write_json
from tfdp.plan.shards import shard_stage
from tfdp.tools.commands.plan_model import load_model
from tfdp.tools.commands.tune_processes import run_module
from tfdp.tools.tune.space import Place

__all__ = ["Stored", "main", "what_fits"]

# Shard, remat, steps of accumulation: what decides the memory.
Stored = tuple[str, bool, int]
TIMEOUT_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class Orders:
    """What the process is told.

    Args:
      target: as `tfdp plan` takes it.
      rows: of the global batch.
      processes, replicas: how many, and of each.
      memory_bytes: of one replica.
      stored: what to look at.
      result_path: where the answer goes.
    """

    target: str
    rows: int
    processes: int
    replicas: int
    memory_bytes: int
    stored: list[list[Any]]
    result_path: str


def what_fits(
    target: str, place: Place, memory_bytes: int, stored: Sequence[Stored]
) -> dict[Stored, tuple[int, bool]]:
    """The bytes that a replica needs at its peak, and whether that fits.

    Args:
      target: as `tfdp plan` takes it.
      place: where it trains.
      memory_bytes: of one replica.
      stored: what to look at; what cannot be planned is not in the answer.

    Raises:
      TrialFailed: the model could not be planned.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-tune-") as folder:
        path = pathlib.Path(folder, "fits.json")
        orders = Orders(
            target,
            place.rows,
            place.processes,
            place.replicas,
            memory_bytes,
            [list(each) for each in stored],
            str(path),
        )
        words = json.dumps(dataclasses.asdict(orders))
        run_module(
            ["-m", "tfdp.tools.commands.tune_fits", words],
            TIMEOUT_SECONDS,
            CUDA_VISIBLE_DEVICES="",
        )
        said = parse_json(path.read_text("utf-8"))
    return {
        (shard, remat, steps): (peak_bytes, fits)
        for (shard, remat, steps), peak_bytes, fits in said
    }


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    orders = Orders(**json.loads(arguments[0]))
    write_json(orders.result_path, _answers(orders))


def _answers(orders: Orders) -> list[Any]:
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()

    from tfdp.tools.planning.memory_plan import needed_for
    from tfdp.tools.planning.planner import Planner, have_devices

    have_devices(orders.replicas)
    build, batch = load_model(orders.target, orders.rows)
    planner = Planner(
        build,
        batch,
        replicas=orders.replicas,
        hosts=orders.processes,
    )
    found: list[Any] = []
    for shard, remat, steps in orders.stored:
        rows = -(-planner.local_rows // steps)
        try:
            plan = planner.at(rows, shard=shard, remat=remat)
        except ConfigurationError:
            continue  # an optimizer that cannot be sharded, a layer not recomputed
        peak_bytes = plan.peak_bytes
        if steps > 1:
            # One more set of gradients, whole or a shard of it.
            parts = planner.replicas if shard_stage(shard) >= 2 else 1
            peak_bytes += plan.trainable_bytes // parts
        fits = plan.is_known and needed_for(peak_bytes) <= orders.memory_bytes
        found.append([[shard, remat, steps], peak_bytes, fits])
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
