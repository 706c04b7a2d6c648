"""A search with KerasTuner, each trial on all devices and workers.

    pip install keras-tuner tensorboard
    python examples/cookbook/tuner.py
    tfdp launch --workers 2 examples/cookbook/tuner.py

Every worker runs the same search: the seed and the values of the objective are the same
on all, so the trials are. Each worker has a folder of its own.
"""

import tfdp

tfdp.quiet()

import keras
import keras_tuner
import sklearn.datasets

keras.utils.set_random_seed(1)
images, labels = sklearn.datasets.load_digits(return_X_y=True)
images = images / 16


def build(values: keras_tuner.HyperParameters) -> keras.Model:
    units = values.Int("units", 16, 128, sampling="log")
    rate = values.Float("learning_rate", 1e-4, 1e-1, sampling="log")
    layers = [keras.layers.Dense(units, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


strategy = tfdp.auto_strategy(cpu_devices=2)
cluster = tfdp.find_cluster()  # None: there is one process
tuner = keras_tuner.RandomSearch(
    build,
    objective="val_loss",
    max_trials=3,
    seed=1,
    distribution_strategy=strategy,
    directory="trials",
    project_name=f"worker-{cluster.rank if cluster else 0}",
    overwrite=True,
)
tuner.search(
    images[:1500],
    labels[:1500],
    batch_size=100,
    epochs=2,
    validation_data=(images[1500:], labels[1500:]),
    verbose=0,
)
for trial in tuner.oracle.get_best_trials(3):
    found = ", ".join(f"{k} {v:.4g}" for k, v in trial.hyperparameters.values.items())
    if strategy.is_chief:
        print(f"validation loss {trial.score:.4f}: {found}")

model = tuner.hypermodel.build(tuner.get_best_hyperparameters()[0])
