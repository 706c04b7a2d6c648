"""Two hosts with a slow link: they exchange once in 20 updates (DiLoCo).

tfdp launch --workers 2 examples/cookbook/diloco.py
tfdp launch --hosts node1,node2 examples/cookbook/diloco.py
"""

import tfdp

tfdp.quiet()

import keras
import sklearn.datasets

BATCH, EPOCHS = 64, 5
FIRST_ROUND, EVERY = 20, 20  # in updates; five epochs of 28 end with a round

keras.utils.set_random_seed(1)
images, labels = sklearn.datasets.load_digits(return_X_y=True)
images, labels = images[:1792] / 16, labels[:1792]

strategy = tfdp.auto_strategy(cpu_devices=2)
with strategy.scope():
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = tfdp.DistributedOptimizer(
        keras.optimizers.AdamW(2e-3),
        # Plain updates first: rounds from random weights on learn more slowly.
        sync=tfdp.sync.DiLoCo(every=EVERY, start_step=FIRST_ROUND),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
model.fit(
    images,
    labels,
    batch_size=BATCH,
    epochs=EPOCHS,
    verbose=2,
    callbacks=[tfdp.callbacks.Traffic()],  # bytes of a step, in the logs
)
