"""A model that keeps its optimizer where it likes, and a loop that calls it itself."""

import keras
import tensorflow as tf

from tests.support.parity import classification_data, dense_model

ROWS, BATCH = 53, 24  # 24, 24 and 5 rows
INFINITE_ROW = 23  # the last replica's, in the first batch


def data(is_infinite=True, rows=ROWS):
    x, y = classification_data(rows)
    if is_infinite:
        x[INFINITE_ROW] = float("inf")
    return x, y


def scaled(**options):
    """SGD in a loss scaler that must leave out a step at an infinity."""
    inner = keras.optimizers.SGD(0.05, **options)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


class Keeper(keras.Model):
    """Trains with an optimizer that stands in `place`.

    Args:
      place: "attribute", "list", "dictionary" or "nested".
      optimizer: the optimizer.
    """

    def __init__(self, place, optimizer):
        super().__init__()
        self.net = dense_model()
        self.place = place
        self.loss_function = keras.losses.SparseCategoricalCrossentropy(True)
        if place == "attribute":
            self.own_optimizer = optimizer
        elif place == "list":
            self.own_optimizers = [optimizer]
        elif place == "dictionary":
            self.own_optimizers = {"net": {"weights": optimizer}}
        else:
            self.net.compile(optimizer)
        self.built = True

    def find(self):
        if self.place == "attribute":
            return self.own_optimizer
        if self.place == "list":
            return self.own_optimizers[0]
        if self.place == "dictionary":
            return self.own_optimizers["net"]["weights"]
        return self.net.optimizer

    def call(self, x):
        return self.net(x)

    def train_step(self, batch):
        one_step(self.net, self.find(), self.loss_function, *batch)
        return {"one": tf.constant(1.0)}


def one_step(net, optimizer, loss_function, x, y):
    with tf.GradientTape() as tape:
        loss = loss_function(y, net(x, training=True))
        scaled_loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled_loss, net.trainable_variables)
    optimizer.apply(gradients, net.trainable_variables)
    return loss


def fit(strategy, place, make_optimizer, x, y, **options):
    """Fits a `Keeper`; its weights and what its optimizer counts."""
    with strategy.scope():
        model = Keeper(place, make_optimizer())
        model.compile(jit_compile=False, **options)
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return numbers_of(model.net, model.find())


def loop(strategy, make_optimizer, x, y):
    """The same by hand: only the function that the replicas run knows the optimizer."""
    with strategy.scope():
        net, optimizer = dense_model(), make_optimizer()
        loss_function = keras.losses.SparseCategoricalCrossentropy(True)

    @tf.function
    def step(batch):
        def replica_step(x, y):
            one_step(net, optimizer, loss_function, x, y)

        strategy.run(replica_step, args=batch)

    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(batches):
            step(batch)
    return numbers_of(net, optimizer)


def numbers_of(net, optimizer):
    numbers = {f"weight{i}": w.numpy() for i, w in enumerate(net.weights)}
    if hasattr(optimizer, "dynamic_scale"):
        numbers["scale"] = optimizer.dynamic_scale.numpy()
    return numbers | {"iterations": optimizer.iterations.numpy()}


def in_a_dictionary():
    """The numbers under the strategy of the open scope, for comparison over hosts."""
    strategy = tf.distribute.get_strategy()
    numbers = fit(strategy, "dictionary", lambda: scaled(global_clipnorm=0.1), *data())
    by_hand = loop(strategy, lambda: scaled(global_clipnorm=0.1), *data())
    return numbers | {f"loop {key}": value for key, value in by_hand.items()}
