"""LARS and LAMB where norms are zero and where number types are mixed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.optimizers import LAMB, LARS


@pytest.mark.parametrize("form", ["classic", "unscaled", "mlperf"])
def test_lars_zero_norms_take_a_plain_step(form):
    """Zero weights: lr * g. Zero update: nothing moves, and nothing becomes NaN."""
    zero, still = (keras.Variable(v, name="kernel") for v in ([0.0, 0.0], [3.0, 4.0]))
    optimizer = LARS(10.0, momentum=0.0, form=form)
    optimizer.apply([tf.constant([0.5, -1.0]), tf.zeros(2)], [zero, still])
    np.testing.assert_array_equal(zero.numpy(), [-5.0, 10.0])
    np.testing.assert_array_equal(still.numpy(), [3.0, 4.0])


def test_lars_with_zero_gradient_still_decays():
    """classic sees the norm of g + d w; mlperf that of g alone, so its ratio is 1."""
    results = {}
    for form in ("classic", "mlperf"):
        kernel = keras.Variable([3.0, 4.0], name="kernel")
        LARS(2.0, form=form, weight_decay=0.1, trust_coefficient=0.01).apply(
            [tf.zeros(2)], [kernel]
        )
        results[form] = kernel.numpy()
    # classic: 2 * 0.01 * 5 / (0.1 * 5) * 0.1 w = 0.02 w; mlperf: 2 * 1 * 0.1 w.
    np.testing.assert_allclose(results["classic"], [2.94, 3.92], rtol=1e-6)
    np.testing.assert_allclose(results["mlperf"], [2.4, 3.2], rtol=1e-6)


def test_lamb_zero_weights_take_an_adam_step():
    zero = keras.Variable([0.0, 0.0], name="kernel")
    LAMB(0.25, epsilon=0.0).apply([tf.constant([0.5, -1.0])], [zero])
    # Adam's first update is the sign of the gradient, to the rounding of 1 - b2.
    np.testing.assert_allclose(zero.numpy(), [-0.25, 0.25], rtol=1e-4)


def test_mlperf_epsilon_defaults_to_that_of_the_reference():
    assert LARS(form="mlperf").epsilon == 1e-7
    assert LARS(form="mlperf", epsilon=0.0).epsilon == 0.0
    assert LARS().epsilon == 0.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LARS(1.0, trust_coefficient=0.5, weight_decay=0.1),
        lambda: LAMB(0.5, weight_decay=0.1),
    ],
    ids=["lars", "lamb"],
)
def test_norms_of_half_precision_variables_are_float32(make, dtype):
    """256 weights of 40: their squares sum to 409,600, float16 ends at 65,504."""
    results = []
    for kind in (dtype, "float32"):
        kernel = keras.Variable(np.full((16, 16), 40.0), dtype=kind, name="kernel")
        gradient = tf.cast(tf.random.stateless_normal((16, 16), [1, 2]), kind)
        make().apply([gradient], [kernel])
        results.append(np.asarray(tf.cast(kernel.value, "float32")))
    # The gradient, the update and the weight are each rounded: 3 times half a unit in
    # the last place of numbers up to about 100 (update) and 130 (weight).
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(*results, rtol=0, atol=4 * unit * 130)
    assert np.abs(results[1] - 40.0).max() > 10


@pytest.mark.parametrize("variable_dtype", ["float32", "float64"])
@pytest.mark.parametrize("gradient_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("make", [LARS, LAMB], ids=["lars", "lamb"])
def test_a_gradient_may_have_another_dtype(make, gradient_dtype, variable_dtype):
    kernel = keras.Variable([[3.0, 4.0]], dtype=variable_dtype, name="kernel")
    expected = keras.Variable([[3.0, 4.0]], dtype=variable_dtype, name="kernel")
    # These numbers are exact in float16.
    gradient = tf.constant([[0.25, -0.5]], gradient_dtype)
    make(0.5).apply([gradient], [kernel])
    make(0.5).apply([tf.cast(gradient, variable_dtype)], [expected])
    assert kernel.dtype == variable_dtype
    np.testing.assert_array_equal(kernel.numpy(), expected.numpy())
