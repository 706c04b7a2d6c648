"""A training with the callbacks that write files, on several hosts.

python -m tests.support.host_files FOLDER EPOCHS
"""

import pathlib
import sys

import keras
import numpy as np

import tfdp
from tests.support.parity import classification_data, dense_model


def main(folder, epochs):
    strategy = tfdp.MultiHostDataParallelStrategy()
    with strategy.scope():
        model = dense_model()
        model.compile(
            keras.optimizers.SGD(0.05, 0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x, y = classification_data(48)
    history = model.fit(
        x,
        y,
        batch_size=24,
        epochs=epochs,
        verbose=0,
        callbacks=[
            keras.callbacks.BackupAndRestore(
                folder / "backup", delete_checkpoint=False
            ),
            keras.callbacks.ModelCheckpoint(folder / "model.keras"),
            keras.callbacks.CSVLogger(folder / "log.csv", append=True),
        ],
    )
    np.savez(folder / f"weights.{strategy.cluster.rank}.npz", *model.get_weights())
    print("epochs", len(history.epoch), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
