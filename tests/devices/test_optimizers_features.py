"""LARS and LAMB with every feature of a Keras optimizer, one row per form."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.optimizers import LAMB, LARS

# The table of the family: a new form is a row, and gets every test below.
FORMS = {
    "lars-classic": lambda **kw: LARS(0.02, trust_coefficient=0.5, **kw),
    "lars-unscaled": lambda **kw: LARS(
        0.02, trust_coefficient=0.5, form="unscaled", **kw
    ),
    "lars-mlperf": lambda **kw: LARS(
        0.02, trust_coefficient=0.5, form="mlperf", nesterov=True, **kw
    ),
    "lamb-paper": lambda **kw: LAMB(0.01, weight_decay=0.1, **kw),
    "lamb-nvlamb": lambda **kw: LAMB(0.01, form="nvlamb", **kw),
    "lamb-keras": lambda **kw: LAMB(0.01, form="keras", weight_decay=0.1, **kw),
}
every_form = pytest.mark.parametrize("form", FORMS)
# nvlamb has a way of clipping of its own, and Keras allows one.
UNCLIPPED = [form for form in FORMS if form != "lamb-nvlamb"]


def make_variables():
    generator = np.random.default_rng(5)
    return [
        keras.Variable(generator.normal(size=(4, 3)), dtype="float32", name="kernel"),
        keras.Variable(generator.normal(size=(3,)), dtype="float32", name="bias"),
    ]


def make_gradients(count):
    generator = np.random.default_rng(6)
    return [
        [
            tf.constant(generator.normal(size=shape), tf.float32)
            for shape in ((4, 3), (3,))
        ]
        for _ in range(count)
    ]


def apply_all(optimizer, gradients, variables=None):
    variables = variables or make_variables()
    for gradient in gradients:
        optimizer.apply(gradient, variables)
    return [variable.numpy() for variable in variables]


def assert_close(ours, theirs, roundings=20):
    """Values below 4 that went through that many roundings more or other."""
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=roundings * 4 * 2.0**-24)


def make_model(seed=7):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(12, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(8),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(2),
        ]
    )


def make_data(count=16):
    generator = np.random.default_rng(8)
    return generator.integers(0, 12, (count, 4)), generator.normal(size=(count, 2))


@every_form
def test_configuration_survives_serialisation(form):
    optimizer = FORMS[form](
        exclude_from_weight_decay=["embedding"],
        exclude_from_layer_adaptation=[],
        use_ema=True,
        ema_momentum=0.5,
        gradient_accumulation_steps=2,
        name="mine",
    )
    config = keras.optimizers.serialize(optimizer)
    restored = keras.optimizers.deserialize(config)
    assert type(restored) is type(optimizer)
    assert restored.get_config() == optimizer.get_config()
    assert restored.get_config()["exclude_from_weight_decay"] == ["embedding"]
    assert restored.get_config()["exclude_from_layer_adaptation"] == []


@every_form
def test_default_exclusions_survive_as_none(form):
    config = FORMS[form]().get_config()
    assert config["exclude_from_weight_decay"] is None
    assert config["exclude_from_layer_adaptation"] is None


@every_form
def test_a_loaded_model_goes_on_where_it_stopped(form, tmp_path):
    x, y = make_data()
    model = make_model()
    model.compile(FORMS[form](), loss="mse", jit_compile=False)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    for each in (model, loaded):
        each.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", UNCLIPPED)
@pytest.mark.parametrize(
    ("argument", "clip"),
    [
        ("clipvalue", lambda gs: [tf.clip_by_value(g, -0.3, 0.3) for g in gs]),
        ("clipnorm", lambda gs: [tf.clip_by_norm(g, 0.3) for g in gs]),
        ("global_clipnorm", lambda gs: tf.clip_by_global_norm(gs, 0.3)[0]),
    ],
)
def test_clipping(form, argument, clip):
    gradients = make_gradients(3)
    result = apply_all(FORMS[form](**{argument: 0.3}), gradients)
    expected = apply_all(FORMS[form](), [clip(gradient) for gradient in gradients])
    assert_close(result, expected)


@every_form
def test_gradient_accumulation_is_one_step_with_the_mean(form):
    gradients = make_gradients(6)
    means = [
        [(a + b) / 2 for a, b in zip(*gradients[i : i + 2], strict=True)]
        for i in (0, 2, 4)
    ]
    result = apply_all(FORMS[form](gradient_accumulation_steps=2), gradients)
    assert_close(result, apply_all(FORMS[form](), means))


@every_form
def test_moving_average(form):
    variables = make_variables()
    optimizer = FORMS[form](use_ema=True, ema_momentum=0.75)
    plain = make_variables()
    other = FORMS[form]()
    average = None
    for gradient in make_gradients(4):
        optimizer.apply(gradient, variables)
        other.apply(gradient, plain)
        now = [variable.numpy() for variable in plain]
        average = (
            now
            if average is None
            else [0.75 * a + 0.25 * b for a, b in zip(average, now, strict=True)]
        )
    assert_close([variable.numpy() for variable in variables], now)
    optimizer.finalize_variable_values(variables)
    assert_close([variable.numpy() for variable in variables], average)


@every_form
def test_loss_scaling_changes_nothing(form):
    """A power of two scales exactly, so the result is equal to the last bit."""
    gradients = make_gradients(3)
    expected = apply_all(FORMS[form](), gradients)
    scaled = [[1024.0 * g for g in gradient] for gradient in gradients]
    for optimizer in (
        FORMS[form](loss_scale_factor=1024.0),
        keras.optimizers.LossScaleOptimizer(FORMS[form](), initial_scale=1024.0),
    ):
        for a, b in zip(apply_all(optimizer, scaled), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@every_form
def test_loss_scaling_skips_an_overflow(form):
    optimizer = keras.optimizers.LossScaleOptimizer(FORMS[form]())
    variables = make_variables()
    before = [variable.numpy() for variable in variables]
    gradient = make_gradients(1)[0]
    apply_all(optimizer, [[gradient[0] * float("inf"), gradient[1]]], variables)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@every_form
def test_mixed_precision_follows_float32(form):
    """A float16 gradient has an error of one part in 2048, so the loss has, too."""
    x, y = make_data()
    losses = []
    for policy in ("mixed_float16", "float32"):
        keras.config.set_dtype_policy(policy)
        model = make_model()
        # A scale of 256 keeps the first steps from overflowing, which would skip them.
        scaled = keras.optimizers.LossScaleOptimizer(FORMS[form](), initial_scale=256.0)
        model.compile(scaled, loss="mse", jit_compile=False)
        history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    # Six steps, each with a dozen such errors, from the forward pass on.
    np.testing.assert_allclose(*losses, rtol=6 * 12 / 2048)
    # The losses of the epochs differ by far more than that from each other.
    assert max(losses[1]) > 1.2 * min(losses[1])


@every_form
def test_compiled_by_xla_equals_eager(form):
    gradients = make_gradients(4)
    variables = make_variables()
    optimizer = FORMS[form]()
    optimizer.build(variables)
    compiled = tf.function(
        lambda gradient: optimizer.apply(gradient, variables), jit_compile=True
    )
    for gradient in gradients:
        compiled(gradient)
    result = [variable.numpy() for variable in variables]
    assert_close(result, apply_all(FORMS[form](), gradients))


# Keras takes the global norm of sparse rows as they come, without summing those that
# occur twice, so nvlamb clips a sparse gradient by another factor than a dense one.
@pytest.mark.parametrize("form", UNCLIPPED)
def test_sparse_gradients_equal_dense_ones(form):
    """Row 2 occurs twice: a norm over the rows as they come would be too small."""
    indices = tf.constant([2, 0, 2])
    rows = tf.constant(np.random.default_rng(9).normal(size=(3, 3)), tf.float32)
    sparse = tf.IndexedSlices(rows, indices, tf.constant([4, 3]))
    dense = tf.math.unsorted_segment_sum(rows, indices, 4)
    bias = tf.constant([0.1, 0.2, 0.3])
    for keyword in ({}, {"gradient_accumulation_steps": 2}):
        result = apply_all(FORMS[form](**keyword), [[sparse, bias]] * 4)
        expected = apply_all(FORMS[form](**keyword), [[dense, bias]] * 4)
        assert_close(result, expected)


@every_form
def test_an_unused_variable_is_left_alone(form):
    variables = make_variables()
    before = variables[1].numpy()
    optimizer = FORMS[form]()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([make_gradients(1)[0][0], None], variables)
    np.testing.assert_array_equal(variables[1].numpy(), before)


def test_inside_a_multi_optimizer():
    x, y = make_data()
    model = make_model()
    optimizer = keras.optimizers.MultiOptimizer(
        lambda variable: lars if variable.path.endswith("kernel") else sgd
    )
    lars, sgd = LARS(0.5, trust_coefficient=0.1), keras.optimizers.SGD(0.01)
    model.compile(optimizer, loss="mse")
    losses = model.fit(x, y, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_nvlamb_clips_at_what_it_is_told():
    gradients = make_gradients(3)
    nvlamb = LAMB(0.01, form="nvlamb", global_clipnorm=0.2)
    paper = LAMB(0.01, global_clipnorm=0.2)
    result, expected = apply_all(nvlamb, gradients), apply_all(paper, gradients)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert LAMB(form="nvlamb").global_clipnorm == 1.0
    assert LAMB().global_clipnorm is None


def test_a_whole_number_is_a_learning_rate():
    assert LARS(2).get_config()["learning_rate"] == 2.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: LARS("fast"),
        lambda: LARS(-1.0),
        lambda: LARS(True),
        lambda: LARS(float("nan")),
        lambda: LARS(momentum=1.0),
        lambda: LARS(momentum=-0.1),
        lambda: LARS(trust_coefficient=0.0),
        lambda: LARS(epsilon=-1e-9),
        lambda: LARS(form="paper"),
        lambda: LARS(form=None),
        lambda: LARS(weight_decay=-0.1),
        lambda: LARS(weight_decay="0.1"),
        lambda: LARS(exclude_from_weight_decay="bias"),
        lambda: LARS(exclude_from_weight_decay=["("]),
        lambda: LARS(exclude_from_layer_adaptation=[""]),
        lambda: LARS(exclude_from_layer_adaptation=[None]),
        lambda: LARS(exclude_from_layer_adaptation={"bias"}),
        lambda: LAMB(None),
        lambda: LAMB(beta_1=1.0),
        lambda: LAMB(beta_2=-0.5),
        lambda: LAMB(epsilon=float("inf")),
        lambda: LAMB(form="classic"),
        lambda: LAMB(form=["paper"]),
        lambda: LAMB(form="nvlamb", clipnorm=1.0),
        lambda: LAMB(form="nvlamb", clipvalue=1.0),
        lambda: LAMB(global_clipnorm="1"),
        lambda: LARS(clipnorm=-1.0),
    ],
)
def test_nonsense_is_refused_when_the_optimizer_is_made(make):
    with pytest.raises(ConfigurationError, match="Received"):
        make()


def test_unknown_arguments_are_refused_as_keras_does():
    with pytest.raises(ValueError, match="not recognized"):
        LARS(beta_1=0.9)
