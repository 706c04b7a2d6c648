"""A training loop without `fit`, on all devices and hosts.

python examples/cookbook/custom_loop.py
tfdp launch --workers 2 examples/cookbook/custom_loop.py
"""

import tfdp

tfdp.quiet()  # before Keras: without TensorFlow's start-up notes

import keras
import sklearn.datasets
import tensorflow as tf

keras.utils.set_random_seed(1)
images, labels = sklearn.datasets.load_digits(return_X_y=True)
images = (images / 16).astype("float32")

# (1) What has variables is made in the strategy's scope.
strategy = tfdp.auto_strategy(cpu_devices=2)
with strategy.scope():
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of_batch = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Of all rows: the loss in a replica is its share of the global batch's mean.
    mean_loss = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

# (2) Batches are global; each replica gets its part. The last one has 97 rows.
batches = tf.data.Dataset.from_tensor_slices((images, labels))
batches = batches.shuffle(len(images), seed=1).batch(100)
batches = strategy.experimental_distribute_dataset(batches)


# (3) The step of one replica, as on one device. `apply` sums the gradients.
def train_replica(images: tf.Tensor, labels: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_of_batch(labels, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    mean_loss.update_state(labels, logits)
    accuracy.update_state(labels, logits)


# (4) The step of all replicas is one graph.
@tf.function
def train_step(batch: tuple) -> None:
    strategy.run(train_replica, args=batch)


for epoch in range(3):
    for batch in batches:
        train_step(batch)
    # (5) Every worker reads the metrics: the result is a sum over all replicas.
    results = f"loss {float(mean_loss.result()):.4f}, "
    results += f"accuracy {float(accuracy.result()):.4f}"
    mean_loss.reset_state()
    accuracy.reset_state()
    if strategy.is_chief:
        print(f"epoch {epoch + 1}: {results}")
