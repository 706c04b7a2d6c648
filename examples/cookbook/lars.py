"""Batches of 4,096 with LARS: three peak learning rates, by their validation loss.

python examples/cookbook/lars.py
tfdp launch --workers 2 examples/cookbook/lars.py
"""

import tfdp

tfdp.quiet()

import keras
import numpy as np
import sklearn.datasets
import sklearn.model_selection

BATCH, EPOCHS, WARMUP_EPOCHS = 4096, 10, 1
# A step moves each variable by at most rate x TRUST times its norm, momentum aside.
TRUST = 1.2
PEAK_RATES = (0.0125, 0.05, 0.2)

digits, labels = sklearn.datasets.load_digits(return_X_y=True)
digits = np.pad(digits.reshape(-1, 8, 8) / 16, ((0, 0), (2, 2), (2, 2)))
digits, val_digits, labels, val_labels = sklearn.model_selection.train_test_split(
    digits.astype("float32"), labels, test_size=0.2, random_state=1
)
# Each training digit in nine places: 12,933 images, four steps per epoch.
shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
images = np.concatenate([np.roll(digits, shift, (1, 2)) for shift in shifts])
labels = np.tile(labels, len(shifts))
steps_per_epoch = -(-len(images) // BATCH)

strategy = tfdp.auto_strategy(cpu_devices=2)


def trained_with(peak_rate: float) -> tuple[keras.Model, float]:
    """The model, and its loss on digits that it was not trained on."""
    keras.utils.set_random_seed(1)  # the same start and order for each rate
    schedule = tfdp.schedules.PolynomialDecay(
        peak_rate,
        total_steps=EPOCHS * steps_per_epoch,
        warmup_steps=WARMUP_EPOCHS * steps_per_epoch,
    )
    with strategy.scope():
        layers = [keras.layers.Flatten(), keras.layers.Dense(128, "relu")]
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        model.compile(
            tfdp.optimizers.LARS(schedule, momentum=0.9, trust_coefficient=TRUST),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(images, labels, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    # Every worker evaluates: the numbers are those of all rows, and equal everywhere.
    loss, accuracy = model.evaluate(val_digits, val_labels, batch_size=512, verbose=0)
    if strategy.is_chief:
        print(f"peak rate {peak_rate}: loss {loss:.3f}, accuracy {accuracy:.1%}")
    return model, loss


trained = {rate: trained_with(rate) for rate in PEAK_RATES}
best_rate = min(trained, key=lambda rate: trained[rate][1])
model = trained[best_rate][0]
if strategy.is_chief:
    print(f"the best peak rate: {best_rate}")
