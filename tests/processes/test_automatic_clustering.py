"""XLA's automatic clustering, of the whole process: steps that exchange end as ever."""

from tests.support.fresh_python import run_program

# Several layers, so that the gradients are sums of their own, and a few updates.
PROGRAM = """
import tfdp
tfdp.quiet()
tfdp.use_virtual_devices(2)
import keras
import numpy as np
import tensorflow as tf

tf.config.optimizer.set_jit("autoclustering")
x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")


def trained(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, shuffle=False)
    return model.get_weights()


expected = trained(tf.distribute.get_strategy())
for engine in ("in_process", "tensorflow"):
    communication = tfdp.Communication(engine=engine)
    found = trained(
        tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], communication=communication)
    )
    for one, several in zip(expected, found, strict=True):
        # Adam divides by the root of a gradient's square: six steps of at most 0.1,
        # each off by what rounding (1e-5) does to a gradient of a hundredth.
        np.testing.assert_allclose(several, one, rtol=0, atol=6 * 0.1 * 1e-3)
    print(engine, "trained")
"""


def test_steps_of_several_replicas_end_under_automatic_clustering():
    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"
    done = run_program(PROGRAM, environment={"TF_XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["in_process", "trained", "tensorflow", "trained"]
