"""Trainings with `layout=` on several hosts, each with all the parts of a weight.

    python -m tests.support.grid_hosts FOLDER DATA MODEL SHARD ENGINE NAME...

Every worker writes what each training gives to FOLDER/NAME.RANK.npz. DATA and MODEL are
the sizes of the mesh.
"""

import os
import pathlib
import sys

import keras
import numpy as np

import tfdp
from tests.support.grids import MLP_RULES, blocks_of, layout_of, mlp, rows_of, trained
from tfdp.exchange import over_collectives

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "global": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
    "LAMB": lambda: tfdp.optimizers.LAMB(0.01),
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, clipnorm=0.05, gradient_accumulation_steps=2
    ),
}
#: By rows: 48 divide, and 14 leave replicas without one.
ROWS = (48, 14)
#: By name: an optimizer, and rows in batches of 12.
TRAININGS = {f"{name}-{rows}": (name, rows) for name in OPTIMIZERS for rows in ROWS}


def train(strategy, name, **options):
    optimizer, rows = TRAININGS[name]
    data = rows_of(rows)
    return trained(strategy, optimizer=OPTIMIZERS[optimizer], data=data, **options)


def main(folder, data, model, shard, engine, *names):
    if engine == "tensorflow":  # for the small models here, too
        over_collectives.SMALLEST_BYTES = 0
    strategy = tfdp.MultiHostDataParallelStrategy(
        layout=layout_of((int(data), int(model)), MLP_RULES),
        shard=shard,
        shard_min_bytes=0,
        communication=tfdp.Communication(engine=engine),
    )
    rank = strategy.cluster.rank
    for name in names:
        trained_model, losses = train(strategy, name)
        blocks = blocks_of(trained_model.get_layer("up").kernel)
        weights = {f"weight{i}": w for i, w in enumerate(trained_model.get_weights())}
        path = pathlib.Path(folder) / f"{name}.{rank}.npz"
        np.savez(path, **weights, losses=losses, blocks=blocks)
        keras.utils.clear_session()
        print(name, flush=True)


def refusals():
    """What each worker is told of a mesh that crosses hosts, and of other rules."""
    rank = os.environ["TFDP_RANK"]
    # A data axis that a weight is cut along, and groups that cross hosts.
    strategy = tfdp.MultiHostDataParallelStrategy(
        layout=layout_of((2, 2), {"up/kernel": ("data", None)})
    )
    try:
        with strategy.scope():
            mlp()
    except tfdp.errors.ConfigurationError as error:
        print("data axis:", " ".join(str(error).split()), flush=True)
    strategy.close()
    other = {"up/kernel": (None, "model") if rank == "0" else ("model", None)}
    layout = layout_of((1, 4), MLP_RULES) if "crossing" in sys.argv else None
    try:
        tfdp.MultiHostDataParallelStrategy(layout=layout or layout_of((2, 2), other))
    except tfdp.errors.ConfigurationError as error:
        print("mesh:", " ".join(str(error).split()), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "refusals":
        refusals()
    else:
        main(*sys.argv[1:])
