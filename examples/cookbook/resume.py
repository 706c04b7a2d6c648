"""A training that goes on after a preemption, with the weights it would have had.

    sbatch examples/cookbook/resume.sbatch
    tfdp launch --workers 2 --max-restarts 3 examples/cookbook/resume.py

SIGTERM, which Slurm sends before a preemption and before the time limit, makes every
worker save after the same step and end with exit code 75: saved, start me again.
"""

import tfdp

tfdp.quiet()

import keras
import sklearn.datasets

keras.utils.set_random_seed(1)  # after a restart: the same order of the rows
images, labels = sklearn.datasets.load_digits(return_X_y=True)

strategy = tfdp.auto_strategy(cpu_devices=2)
with strategy.scope():
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
# A folder that all hosts share. `fit` goes on from the newest whole checkpoint in it.
checkpoint = tfdp.callbacks.Checkpoint("checkpoints", every_steps=50)
model.fit(
    images / 16,
    labels,
    batch_size=64,
    epochs=6,
    verbose=2,
    callbacks=[checkpoint],
)
