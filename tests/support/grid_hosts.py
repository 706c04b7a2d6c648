"""Trainings with `layout=` on several hosts, each with all the parts of a weight.

    python -m tests.support.grid_hosts FOLDER DATA MODEL SHARD ENGINE NAME...
    python -m tests.support.grid_hosts refusals [crossing]
    python -m tests.support.grid_hosts files FOLDER

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
    "AdamW": lambda: keras.optimizers.AdamW(
        0.01, epsilon=1e-3, weight_decay=0.01, global_clipnorm=0.1
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


class Plant(keras.callbacks.Callback):
    """Changes one block on the second host."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and os.environ["TFDP_RANK"] == "1":
            copy = self.model.get_layer("up").kernel.value.values[1]
            copy.assign(copy + 1e-3)


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return {f"v{place}": v.numpy() for place, v in enumerate(variables)}


def files(folder):
    """Reads a checkpoint of one device, trains, and writes files of each kind."""
    strategy = tfdp.MultiHostDataParallelStrategy(layout=layout_of((2, 2), MLP_RULES))
    rank, folder = strategy.cluster.rank, pathlib.Path(folder)

    def compiled():
        with strategy.scope():
            return built(mlp())

    model = compiled()
    assert tfdp.checkpoint.Checkpoint(folder / "of one").restore(model).step == 1
    np.savez(folder / f"read.{rank}.npz", **state_of(model))
    check = tfdp.callbacks.ReplicaCheck(1)
    fit(model, check)
    print("compared", check.checks, len(check.drifts), flush=True)
    np.savez(folder / f"trained.{rank}.npz", **state_of(model))
    model.save(folder / f"model.{rank}.keras")
    if rank == 0:  # each host has all parts: one alone waits for nobody
        model.save(folder / "alone.keras")
    model.export(folder / f"served.{rank}", verbose=False)
    files = tfdp.checkpoint.Checkpoint(folder / "of hosts")
    files.save(model, step=4)
    files.wait()
    other = compiled()
    assert files.restore(other).step == 4
    np.savez(folder / f"restored.{rank}.npz", **state_of(other))
    try:
        fit(other, Plant(), tfdp.callbacks.ReplicaCheck(1))
    except tfdp.errors.ReplicaDriftError as error:
        print("drifted:", " ".join(str(error).split()), flush=True)

    goes_on(compiled, folder, rank)


def goes_on(compiled, folder, rank):
    """Stops after two epochs, and goes on from what only the first host has written."""

    def train(epochs):
        model = compiled()
        backup = keras.callbacks.BackupAndRestore(
            folder / "backup", delete_checkpoint=False
        )
        best = keras.callbacks.ModelCheckpoint(folder / "newest.keras")
        fit(model, backup, best, epochs=epochs)
        return model

    train(2)
    model = train(4)
    without = compiled()
    fit(without, epochs=4)
    np.savez(folder / f"without.{rank}.npz", **state_of(without))
    np.savez(folder / f"backup.{rank}.npz", **state_of(model))


def built(model):
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, *callbacks, **options):
    x, y = rows_of(36)
    options |= {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    model.fit(x, y, batch_size=12, **options)


if __name__ == "__main__":
    if sys.argv[1] == "files":
        files(sys.argv[2])
    elif sys.argv[1] == "refusals":
        refusals()
    else:
        main(*sys.argv[1:])
