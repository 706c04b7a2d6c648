#!/usr/bin/env bash
# Orbax 0.12.8: one NaN among the metrics, and CheckpointManager(max_to_keep=2, best_fn=...) deletes
# the best checkpoint and calls another one the best.
#
# Checkpoints are sorted by the metric, and NaN compares false with everything, so the order is no
# order from the NaN on. Of the accuracies 0.3, 0.1, 0.2, NaN, 0.25 the steps 4 (NaN) and 5 are
# kept, and step 1 is gone. Without the NaN, the steps 1 and 5 are kept. A good guess would be that
# a NaN counts as the worst, since it is for a training that broke that one keeps the best.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "orbax-checkpoint==0.12.8" "jax==0.10.2" "jaxlib==0.10.2"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import logging
import math
import tempfile
from importlib.metadata import version

import numpy as np
import orbax.checkpoint as ocp

logging.disable(logging.WARNING)


def kept(accuracies):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_fn=lambda metrics: metrics["accuracy"], enable_async_checkpointing=False
    )
    with tempfile.TemporaryDirectory() as folder:
        with ocp.CheckpointManager(folder, options=options) as manager:
            for step, accuracy in enumerate(accuracies, 1):
                state = ocp.args.StandardSave({"weight": np.ones(1)})
                manager.save(step, args=state, metrics={"accuracy": accuracy})
            return list(manager.all_steps()), manager.best_step()


print("orbax-checkpoint", version("orbax-checkpoint"))
for accuracies in ([0.3, 0.1, 0.2, 0.15, 0.25], [0.3, 0.1, 0.2, math.nan, 0.25]):
    steps, best = kept(accuracies)
    print("accuracies", accuracies, "kept", steps, "best", best)
    if (steps, best) != (([4, 5], 5) if math.isnan(accuracies[3]) else ([1, 5], 1)):
        raise SystemExit("changed")
PYTHON
