"""Models of a library, which computes the loss, as docs/own-losses.md wraps them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import ConfigurationError, LocalMeanWarning

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
X *= np.arange(1, 14, dtype="float32")[:, None] / 8  # no two rows of one size
ROWS = {"x": X, "y": X.sum(axis=1, keepdims=True)}


def no_loss(y, p):
    return 0.0


def mean_of_keras(y, p):
    return keras.ops.mean(keras.losses.mean_squared_error(y, p))


class Approximator(keras.Model):
    """A model in the form of BayesFlow's: a mean of its own, and a loss it is given."""

    def __init__(self, own=1.0, loss=no_loss):
        super().__init__()
        self.network = keras.layers.Dense(1)
        self.own, self.loss = own, loss

    def build(self, shapes):
        self.network.build(shapes["x"])

    def compute_metrics(self, x, y):
        p = self.network(x)
        loss = self.loss(y, p)
        if self.own:
            loss += self.own * keras.ops.mean(keras.ops.square(p - y))
        return {"loss": loss, "error": keras.ops.mean(keras.ops.abs(p - y))}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            metrics = self.compute_metrics(**data)
        variables = self.trainable_variables
        gradients = tape.gradient(metrics["loss"], variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.counted(metrics, data)

    def test_step(self, data):
        return self.counted(self.compute_metrics(**data), data)

    def counted(self, metrics, data):
        """Counts the numbers in metrics that are made at the first step."""
        rows = keras.ops.shape(data["x"])[0]
        for name, value in metrics.items():
            if name not in self.metrics_names:
                self._metrics.append(keras.metrics.Mean(name=name))
            metric = self.metrics[self.metrics_names.index(name)]
            metric.update_state(value, sample_weight=rows)
        return metrics


class OnReplicas(Approximator):
    def compute_metrics(self, *args, **kwargs):
        metrics = super().compute_metrics(*args, **kwargs)
        return {**metrics, "loss": tfdp.losses.local_mean(metrics["loss"])}


def trained(strategy, make):
    """Weights and history after two epochs of batches of 8 and 5 rows."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.05), jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(ROWS).batch(8)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
    return model.get_weights(), history


@pytest.mark.filterwarnings("error::tfdp.errors.LocalMeanWarning")
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "arguments",
    [(), (0.0, keras.losses.MeanSquaredError()), (0.3, mean_of_keras)],
    ids=["its own mean", "a loss of Keras", "both, as a function"],
)
def test_a_scaled_loss_of_a_library(arguments, replicas):
    """Rounding: four steps at rate 0.05 with gradients below 10, of 8 rows in float32:
    4 x 0.05 x 10 x 8 x 6e-8 = 1e-6. Twice the update moves a weight by 0.01 and more.
    """
    one, wanted = trained(
        tf.distribute.get_strategy(), lambda: Approximator(*arguments)
    )
    weights, history = trained(make_strategy(replicas), lambda: OnReplicas(*arguments))
    for weight, other in zip(weights, one, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=2e-6)
    for name, values in wanted.items():
        np.testing.assert_allclose(history[name], values, rtol=2e-5, err_msg=name)


def test_the_warning_names_the_page():
    with pytest.warns(LocalMeanWarning, match="library computes it, see docs/own-los"):
        trained(make_strategy(2), Approximator)


def test_a_part_that_is_scaled_already_is_refused_with_the_page():
    with pytest.raises(ConfigurationError, match="see docs/own-losses.md"):
        loss = keras.losses.MeanSquaredError()
        trained(make_strategy(2), lambda: OnReplicas(0.3, loss))
