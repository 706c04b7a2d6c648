"""A training with the callbacks that write files, on several hosts.

python -m tests.support.host_files FOLDER EPOCHS SHARD
"""

import pathlib
import sys

import keras
import numpy as np

import tfdp
from tests.support.parity import classification_data, dense_model


def compiled_model():
    keras.utils.set_random_seed(3)
    model = dense_model()
    model.compile(
        keras.optimizers.SGD(0.05, 0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def main(folder, epochs, shard):
    strategy = tfdp.MultiHostDataParallelStrategy(shard=shard, shard_min_bytes=0)
    with strategy.scope():
        model = compiled_model()
    x, y = classification_data(48)
    history = model.fit(
        x,
        y,
        batch_size=24,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.BackupAndRestore(
                folder / "backup", delete_checkpoint=False
            ),
            keras.callbacks.ModelCheckpoint(folder / "model.keras"),
            keras.callbacks.CSVLogger(folder / "log.csv", append=True),
            keras.callbacks.TensorBoard(folder / "board", histogram_freq=1),
        ],
    )
    checkpoint = tfdp.checkpoint.Checkpoint(folder / "checkpoints")
    checkpoint.save(model, step=epochs)
    checkpoint.wait()
    np.savez(folder / f"weights.{strategy.cluster.rank}.npz", *model.get_weights())
    model.export(folder / f"served.{strategy.cluster.rank}", verbose=False)
    print("epochs", len(history.epoch), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
