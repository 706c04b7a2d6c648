"""`tfdp.optimizers.fused`: Keras' updates, compiled by XLA, to rounding.

Tolerance: all updates get the same gradients, so a difference does not grow by them. An
update has at most 16 roundings, and XLA leaves some out (fused multiply-adds) or makes
a quotient a product: 2^-20 of the largest change, and one rounding of the sum (2^-24 of
the weight) in each of the updates.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import ConfigurationError
from tfdp.step import packed_updates
from tfdp.step.packed_updates import packs_of

optimizers = keras.optimizers
UPDATES = 5
# The fourth is large, once `large_from_2_kib` has been used.
SHAPES = ((7, 9), (9,), (), (40, 50), (9, 3), (3,))


def scaling(**options):
    return optimizers.LossScaleOptimizer(optimizers.Adam(0.01, **options), 1.0)


def decay(**options):
    own = optimizers.AdamW(0.01, weight_decay=0.1, **options)
    own.exclude_from_weight_decay(var_names=["bias"])
    return own


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "decay": decay,
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "lion": lambda: optimizers.Lion(0.001),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.01),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "clipping": lambda: decay(clipnorm=0.1),
    "global_clipping": lambda: optimizers.Nadam(0.01, global_clipnorm=0.1),
    "averages": lambda: optimizers.Adam(use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: optimizers.Adam(gradient_accumulation_steps=2),
    "scaling": scaling,
}


@pytest.fixture(autouse=True)
def large_from_2_kib(monkeypatch):
    monkeypatch.setattr(packed_updates, "LARGEST_BYTES", 2048)


def updated(make, is_fused, dtype="float32"):
    """Weights and optimizer after updates with other gradients on each replica."""
    strategy = make_strategy(2)
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"bias{place}")
            for place, shape in enumerate(SHAPES)
        ]
        optimizer = make()
        if is_fused:
            assert tfdp.optimizers.fused(optimizer) is optimizer
        optimizer.build(weights)

    @tf.function
    def update(gradients):
        strategy.run(lambda own: optimizer.apply(own, weights), args=(gradients,))

    for _ in range(UPDATES):
        drawn = [[rng.normal(size=shape) for shape in SHAPES] for _ in range(2)]
        of_replicas = strategy.experimental_distribute_values_from_function(
            lambda context, drawn=drawn: [
                tf.constant(one, dtype)
                for one in drawn[context.replica_id_in_sync_group]
            ]
        )
        update(of_replicas)
    graph = update.get_concrete_function(of_replicas).graph
    return weights, optimizer, graph


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_keras_to_rounding(name):
    reference, of_reference, _ = updated(OPTIMIZERS[name], False)
    weights, optimizer, _ = updated(OPTIMIZERS[name], True)
    leaf = getattr(optimizer, "inner_optimizer", optimizer)
    sizes = sorted(len(one.weights) for one in packs_of(leaf).packs)
    assert sizes == [1, len(SHAPES) - 1]
    before = updated(lambda: optimizers.SGD(0.0), False)[0]
    at_start = {own.path: start for own, start in zip(weights, before, strict=True)}
    state = zip(optimizer.variables, of_reference.variables, strict=True)
    for own, other in (*zip(weights, reference, strict=True), *state):
        value, expected = np.asarray(own, "float64"), np.asarray(other, "float64")
        change = np.abs(expected).max()
        start = at_start.get(own.path)
        if start is not None:
            change = np.abs(expected - start.numpy()).max()
        atol = UPDATES * (2**-20 * change + 2**-24 * np.abs(expected).max())
        np.testing.assert_allclose(value, expected, rtol=0, atol=atol)
        first, second = [each.numpy() for each in own.value.values]
        if "gradient_accumulator" in own.path:
            continue  # each replica's own sum
        np.testing.assert_array_equal(first, second, err_msg=own.path)


def compiled_calls(graph):
    def within(graph):
        for op in graph.get_operations():
            yield op
            for name in ("then_branch", "else_branch"):
                if name in op.node_def.attr:
                    yield from within(graph._get_function(op.get_attr(name).name).graph)

    return [op for op in within(graph) if "_XlaMustCompile" in op.node_def.attr]


def test_xla_compiles_a_kernel_for_each_pack_and_replica():
    *_, graph = updated(OPTIMIZERS["adam"], True)
    calls = compiled_calls(graph)
    assert sorted(op.device[-5:] for op in calls) == ["CPU:0"] * 2 + ["CPU:1"] * 2
    assert not compiled_calls(updated(OPTIMIZERS["adam"], False)[2])


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_in_fit(options, tmp_path):
    """Six updates of at most 0.01, each to 2^-15 by the gradients of its weights."""

    def trained(strategy, make):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    *(keras.layers.Dense(9, "tanh") for _ in range(9)),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(make(optimizers.Adam(0.01, epsilon=1e-3)), "mse", **options)
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(11, 6)), rng.normal(size=(11, 1))
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model

    reference = trained(tf.distribute.get_strategy(), lambda own: own)
    model = trained(make_strategy(2), tfdp.optimizers.fused)
    for own, other in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=0, atol=2e-6)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    for own, other in zip(
        model.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.Ftrl(),
        lambda: tfdp.optimizers.LAMB(0.1),
        lambda: "adam",
        lambda: optimizers.LossScaleOptimizer(optimizers.Muon()),
    ],
)
def test_others_are_refused(make):
    with pytest.raises(
        ConfigurationError, match=r"compiles the updates of Keras' Adam"
    ):
        tfdp.optimizers.fused(make())


def test_a_class_is_refused_with_the_call():
    with pytest.raises(ConfigurationError, match=r"call it: Adam\(\)"):
        tfdp.optimizers.fused(optimizers.Adam)


def test_after_a_step_it_is_refused():
    _, optimizer, _ = updated(OPTIMIZERS["adam"], False)
    with pytest.raises(ConfigurationError, match="before its first step"):
        tfdp.optimizers.fused(optimizer)


def test_without_effect_it_is_refused():
    with make_strategy(2, "parameters").scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(tfdp.optimizers.fused(optimizers.Adam()), "mse")
    with pytest.raises(ConfigurationError, match=r"in shards, .*: sequential.*kernel"):
        model.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)
