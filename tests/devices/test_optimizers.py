"""LARS and LAMB against optax, against Keras, and against their equations in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.optimizers import LAMB, LARS

STEPS = 10


def real_model():
    """A small convolutional net with batch norm, beside an embedding, as one model."""
    image = keras.Input((8, 8, 3))
    word = keras.Input((4,), dtype="int32")
    x = keras.layers.Conv2D(8, 3, name="conv")(image)
    x = keras.layers.BatchNormalization(name="bn")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    y = keras.layers.Embedding(50, 6, name="embedding")(word)
    y = keras.layers.LayerNormalization(name="ln")(keras.layers.Flatten()(y))
    z = keras.layers.Dense(16, name="hidden")(keras.layers.Concatenate()([x, y]))
    return keras.Model([image, word], keras.layers.Dense(3, name="head")(z))


@pytest.fixture(scope="module")
def weights():
    """Path -> initial value. Biases and betas are zero: the zero-norm rules matter."""
    keras.utils.set_random_seed(1)
    return {v.path: v.numpy() for v in real_model().trainable_variables}


@pytest.fixture(scope="module")
def gradients(weights):
    """One gradient per step and variable, all different; one of them is all zero."""
    generator = np.random.default_rng(2)
    steps = []
    for step in range(STEPS):
        scale = 10.0 ** generator.uniform(-2, 0)
        values = [
            (scale * generator.standard_normal(value.shape)).astype("float32")
            for value in weights.values()
        ]
        if step == 3:
            values[0] = np.zeros_like(values[0])
        steps.append(values)
    return steps


def run_keras(optimizer, weights, gradients):
    """The values of all variables after the steps, with `optimizer`."""
    variables = [make_variable(path, value) for path, value in weights.items()]
    for values in gradients:
        optimizer.apply([tf.constant(value) for value in values], variables)
    return [variable.numpy() for variable in variables]


def make_variable(path, value):
    layer, name = path.split("/")
    with keras.name_scope(layer):
        variable = keras.Variable(value, name=name)
    assert variable.path == path
    return variable


def run_optax(transformation, weights, gradients):
    import jax.numpy as jnp
    import optax

    parameters = {path: jnp.asarray(value) for path, value in weights.items()}
    state = transformation.init(parameters)
    for values in gradients:
        tree = dict(zip(weights, map(jnp.asarray, values), strict=True))
        updates, state = transformation.update(tree, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return [np.asarray(parameters[path]) for path in weights]


def assert_equal_within_1e_6(ours, theirs, weights):
    """Largest difference at most 1e-6 of the largest weight of the variable.

    A step adds a few roundings of 2**-24 = 6e-8 to a value, and a norm over n terms
    about as many, since sums are made in a tree: 10 steps stay below 1e-6.
    """
    for path, a, b in zip(weights, ours, theirs, strict=True):
        scale = max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * scale, err_msg=path)


def in_last_part(path, names):
    return path.rsplit("/", 1)[-1] in names


def mask(excluded):
    return lambda tree: {path: not excluded(path) for path in tree}


def is_bias_or_norm(path):
    return in_last_part(path, ("bias", "beta", "gamma"))


def warmup(step):
    return 0.02 * (step + 1)


class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.02 * (keras.ops.cast(step, "float32") + 1)


# ours: arguments; theirs: name and arguments in optax.
OPTAX_TABLE = {
    "lars-everything": (
        lambda: LARS(
            1.0,
            weight_decay=1e-2,
            exclude_from_weight_decay=[],
            exclude_from_layer_adaptation=[],
        ),
        ("lars", {"learning_rate": 1.0, "weight_decay": 1e-2}),
    ),
    "lars-defaults": (
        lambda: LARS(0.5, weight_decay=1e-2),
        (
            "lars",
            {
                "learning_rate": 0.5,
                "weight_decay": 1e-2,
                "weight_decay_mask": mask(is_bias_or_norm),
                "trust_ratio_mask": mask(is_bias_or_norm),
            },
        ),
    ),
    "lars-two-lists": (
        lambda: LARS(
            0.5,
            weight_decay=1e-2,
            exclude_from_weight_decay=["^embedding/"],
            exclude_from_layer_adaptation=["bias$"],
        ),
        (
            "lars",
            {
                "learning_rate": 0.5,
                "weight_decay": 1e-2,
                "weight_decay_mask": mask(lambda path: path.startswith("embedding/")),
                "trust_ratio_mask": mask(lambda path: path.endswith("bias")),
            },
        ),
    ),
    "lars-nesterov-schedule-epsilon": (
        lambda: LARS(
            WarmupSchedule(), 0.8, 0.02, nesterov=True, epsilon=1e-3, weight_decay=0.1
        ),
        (
            "lars",
            {
                "learning_rate": warmup,
                "weight_decay": 0.1,
                "weight_decay_mask": mask(is_bias_or_norm),
                "trust_ratio_mask": mask(is_bias_or_norm),
                "trust_coefficient": 0.02,
                "momentum": 0.8,
                "nesterov": True,
                "eps": 1e-3,
            },
        ),
    ),
    "lamb-everything": (
        lambda: LAMB(
            0.01,
            weight_decay=0.1,
            exclude_from_weight_decay=[],
            exclude_from_layer_adaptation=[],
        ),
        ("lamb", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ),
    "lamb-no-decay": (
        lambda: LAMB(0.01, exclude_from_layer_adaptation=[]),
        ("lamb", {"learning_rate": 0.01}),
    ),
    "lamb-decay-mask": (
        lambda: LAMB(0.01, weight_decay=0.1, exclude_from_layer_adaptation=[]),
        (
            "lamb",
            {
                "learning_rate": 0.01,
                "weight_decay": 0.1,
                "mask": mask(is_bias_or_norm),
            },
        ),
    ),
    "lamb-schedule": (
        lambda: LAMB(
            WarmupSchedule(), 0.8, 0.95, epsilon=1e-3, exclude_from_layer_adaptation=[]
        ),
        ("lamb", {"learning_rate": warmup, "b1": 0.8, "b2": 0.95, "eps": 1e-3}),
    ),
}


@pytest.mark.parametrize("case", OPTAX_TABLE)
def test_equal_to_optax(case, weights, gradients):
    optax = pytest.importorskip("optax")
    ours, (name, arguments) = OPTAX_TABLE[case]
    result = run_keras(ours(), weights, gradients)
    expected = run_optax(getattr(optax, name)(**arguments), weights, gradients)
    assert_equal_within_1e_6(result, expected, weights)
    # The steps moved every variable by far more than the tolerance.
    for before, after in zip(weights.values(), expected, strict=True):
        assert np.abs(before - after).max() > 1e-4


def norm(value):
    return np.sqrt(np.sum(np.square(value)))


def lars_in_numpy(weights, gradients, *, form, lr, decay=0.05, eta=0.01, momentum=0.9):
    """The equations of `LARS` line by line, in float64, with the default exclusions."""
    values = [value.astype("float64") for value in weights.values()]
    velocities = [np.zeros_like(value) for value in values]
    epsilon = 1e-7 if form == "mlperf" else 0.0
    for step, gradient in enumerate(gradients):
        for i, path in enumerate(weights):
            w, g, v = values[i], gradient[i].astype("float64"), velocities[i]
            d = 0.0 if is_bias_or_norm(path) else decay
            if form == "mlperf":
                update_norm = norm(g)
                denominator = norm(g) + d * norm(w) + epsilon
            else:
                update_norm = denominator = norm(g + d * w)
            r = 1.0
            if not is_bias_or_norm(path) and norm(w) > 0 and update_norm > 0:
                r = eta * norm(w) / denominator
            if form == "unscaled":
                velocities[i] = momentum * v + (g + d * w)
                values[i] = w - lr(step) * r * velocities[i]
            else:
                velocities[i] = momentum * v + lr(step) * r * (g + d * w)
                values[i] = w - velocities[i]
    return values


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("form", ["classic", "unscaled", "mlperf"])
def test_lars_equals_its_equations(form, weights, gradients):
    optimizer = LARS(
        WarmupSchedule(), trust_coefficient=0.01, form=form, weight_decay=0.05
    )
    result = run_keras(optimizer, weights, gradients)
    expected = lars_in_numpy(weights, gradients, form=form, lr=warmup)
    assert_equal_within_1e_6(result, expected, weights)


def test_the_forms_of_lars_differ(weights, gradients):
    """So that the test above could tell one from another: 10 times the tolerance."""
    results = [
        lars_in_numpy(weights, gradients, form=form, lr=warmup)[0]
        for form in ("classic", "unscaled", "mlperf")
    ]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(results[i] - results[j]).max() > 1e-5


def test_classic_and_unscaled_agree_while_rate_times_ratio_is_constant():
    """Without adaptation and schedule the ratio is 1, inside the momentum or not."""
    results = []
    for form in ("classic", "unscaled"):
        variable = keras.Variable(np.linspace(-1, 1, 12).astype("float32"), name="v")
        optimizer = LARS(
            0.1, form=form, weight_decay=0.1, exclude_from_layer_adaptation=["v"]
        )
        for step in range(5):
            optimizer.apply([tf.cos(tf.range(12.0) + step)], [variable])
        results.append(variable.numpy())
    # Five steps, each a few roundings of values below 2: 5 * 4 * 2 * 2**-24.
    np.testing.assert_allclose(*results, rtol=0, atol=2.4e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["classic", "unscaled", "mlperf"])
def test_unadapted_lars_is_sgd(form, nesterov, weights, gradients):
    ours = LARS(0.1, form=form, nesterov=nesterov, exclude_from_layer_adaptation=["."])
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov)
    result = run_keras(ours, weights, gradients)
    assert_equal_within_1e_6(result, run_keras(sgd, weights, gradients), weights)


def lamb_in_numpy(weights, gradients, *, form, lr=0.01, decay=0.1, clip=1.0):
    """The equations of `LAMB` line by line, in float64, with the default exclusions."""
    values = [value.astype("float64") for value in weights.values()]
    first = [np.zeros_like(value) for value in values]
    second = [np.zeros_like(value) for value in values]
    for step, gradient in enumerate(gradients, start=1):
        gradient = [g.astype("float64") for g in gradient]
        if form == "nvlamb":
            total = np.sqrt(sum(np.sum(np.square(g)) for g in gradient))
            gradient = [g / max(1.0, total / clip) for g in gradient]
        for i, path in enumerate(weights):
            w, g = values[i], gradient[i]
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            u = first[i] / (1 - 0.9**step)
            u = u / (np.sqrt(second[i] / (1 - 0.999**step)) + 1e-6)
            r = 1.0
            if not is_bias_or_norm(path):
                u = u + decay * w
                if norm(w) > 0 and norm(u) > 0:
                    r = norm(w) / norm(u)
            values[i] = w - lr * r * u
    return values


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("form", ["paper", "nvlamb"])
def test_lamb_equals_its_equations(form, weights, gradients):
    result = run_keras(LAMB(0.01, form=form, weight_decay=0.1), weights, gradients)
    expected = lamb_in_numpy(weights, gradients, form=form)
    assert_equal_within_1e_6(result, expected, weights)


def test_the_forms_of_lamb_differ(weights, gradients):
    paper = lamb_in_numpy(weights, gradients, form="paper")[0]
    nvlamb = lamb_in_numpy(weights, gradients, form="nvlamb")[0]
    assert np.abs(paper - nvlamb).max() > 1e-5


@pytest.mark.parametrize("weight_decay", [None, 0.0, 0.1])
@pytest.mark.parametrize("learning_rate", [0.01, WarmupSchedule()])
def test_lamb_keras_is_keras_bit_for_bit(
    learning_rate, weight_decay, weights, gradients
):
    ours = LAMB(learning_rate, form="keras", weight_decay=weight_decay)
    theirs = keras.optimizers.Lamb(learning_rate, weight_decay=weight_decay)
    result = run_keras(ours, weights, gradients)
    for a, b in zip(result, run_keras(theirs, weights, gradients), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_lamb_keras_is_keras_bit_for_bit_in_fit():
    results = []
    for make in (lambda: LAMB(0.01, form="keras"), lambda: keras.optimizers.Lamb(0.01)):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(make(), loss="mse", jit_compile=False)
        generator = np.random.default_rng(4)
        x, y = generator.normal(size=(32, 5)), generator.normal(size=(32, 2))
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_lamb_keras_excludes_what_it_is_told(weights, gradients):
    """The lists work in this form too; the method of Keras gives the same result."""
    ours = LAMB(
        0.01, form="keras", weight_decay=0.1, exclude_from_weight_decay=["embedding"]
    )
    everything = keras.optimizers.Lamb(0.01, weight_decay=0.1)
    nothing = keras.optimizers.Lamb(0.01)
    result = run_keras(ours, weights, gradients)
    decayed = run_keras(everything, weights, gradients)
    undecayed = run_keras(nothing, weights, gradients)
    for i, path in enumerate(weights):
        expected = undecayed if "embedding" in path else decayed
        np.testing.assert_array_equal(result[i], expected[i])
