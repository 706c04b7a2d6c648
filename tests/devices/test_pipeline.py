"""Models in stages of a pipeline train as on one device, and where they should."""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support import pipelines
from tests.support.fresh_python import run_python
from tests.support.parity import largest_distance, rounding_bound
from tests.support.pipelines import bytes_at, made, mlp, rows_of, strategy_of, trained
from tests.support.run_graphs import run_graphs
from tests.support.slow_rows import made as rows_wanted
from tfdp._private.step_trace import StepTrace
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.plan.stages import held_activations, stage_ends

layers, optimizers = keras.layers, keras.optimizers
OPTIMIZERS = {
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "clipnorm": lambda: optimizers.SGD(0.05, clipnorm=0.05),
    "global": lambda: optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
    "averages": lambda: optimizers.AdamW(
        0.01, epsilon=1e-3, weight_decay=0.01, use_ema=True
    ),
    "accumulation": lambda: optimizers.Adam(
        0.01, epsilon=1e-3, global_clipnorm=0.1, gradient_accumulation_steps=2
    ),
    "Nadam": lambda: optimizers.Nadam(0.01, epsilon=1e-3),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.05)),
    "LAMB": lambda: tfdp.optimizers.LAMB(0.01),
    "LARS": lambda: tfdp.optimizers.LARS(0.1),
}
# Steps, and rows of each: the last batch has 8, and of 4 replicas one has fewer.
ROWS, BATCH, EPOCHS = 44, 12, 2
STEPS = EPOCHS * -(-ROWS // BATCH)


def in_stages(stages=2, **options):
    return lambda model: tfdp.pipeline(model, stages, **options)


def recomputed(model):
    return tfdp.pipeline(tfdp.remat(model), micro_batches=4)


def bound_of(model, optimizer="momentum"):
    """Two orders of summation differ so much in the weights, by `rounding_bound`.

    A row's gradient of the mean loss is below 8 (inputs up to 9, weights below 1). SGD
    takes it times 0.05 (momentum 0.9: times 0.5). Adam's step changes with the gradient
    by at most its rate / epsilon = 10, LAMB's and LARS' by the norm of a weight (below
    4) over that of its gradient (above 0.05), times 0.1.
    """
    rate = {"momentum": 0.5, "clipnorm": 0.05, "scaled": 0.05, "LAMB": 8.0, "LARS": 8.0}
    return rounding_bound(model, STEPS, BATCH, 8.0, rate.get(optimizer, 10.0))


def check(one, several, bound):
    (model, losses), (own, own_losses) = one, several
    assert largest_distance(model.get_weights(), own.get_weights()) < bound
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_one_device_with_each_optimizer(name):
    given = {"optimizer": OPTIMIZERS[name], "epochs": EPOCHS, "batch": BATCH}
    one = trained(mlp, **given)
    check(
        one,
        trained(mlp, strategy_of(2), change=in_stages(), **given),
        bound_of(one[0], name),
    )


def case(build, replicas, change, slow=False):
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(build, replicas, change, marks=marks, id=f"{build}-{replicas}")


@pytest.mark.parametrize(
    "build, replicas, change",
    rows_wanted(
        [
            case("mlp", 4, in_stages()),
            case("branched", 4, in_stages(4)),
            case("penalized", 2, in_stages()),
            case("frozen", 2, in_stages(micro_batches=3)),
            case("convolved", 2, in_stages()),
            case("mlp", 2, recomputed),
            case("attentive", 2, in_stages()),
            case("tied", 2, in_stages(), slow=True),
            case("attentive", 4, in_stages(micro_batches=4), slow=True),
            case("recurrent", 2, in_stages(micro_batches=2), slow=True),
        ]
    ),
)
def test_weights_are_those_of_one_device_for_each_model(build, replicas, change):
    build = getattr(pipelines, build)
    data = rows_of(build, ROWS)
    one = trained(build, data=data)
    several = trained(build, strategy_of(replicas), data=data, change=change)
    check(one, several, bound_of(one[0]))
    [found, own] = [
        tf.nest.flatten(model.predict(data[0], verbose=0))
        for model, _ in (one, several)
    ]
    for expected, given in zip(found, own, strict=True):
        np.testing.assert_allclose(given, expected, atol=1e-4)


@pytest.mark.parametrize("rows", [13, 1])
def test_rows_that_do_not_divide_and_a_replica_without_rows(rows):
    data = rows_of(mlp, rows)
    one = trained(mlp, data=data)
    change = in_stages(micro_batches=2)
    check(one, trained(mlp, strategy_of(2), data=data, change=change), bound_of(one[0]))


def test_draws_and_moving_statistics_are_those_of_plain_replicas():
    """Of own rows on each replica, and so not one device's."""
    build = pipelines.normalized
    plain = trained(build, strategy_of(2))
    check(plain, trained(build, strategy_of(2), change=in_stages()), 1e-6)


def test_mixed_precision_is_that_of_plain_replicas():
    keras.config.set_dtype_policy("mixed_float16")
    plain = trained(mlp, strategy_of(2))
    check(plain, trained(mlp, strategy_of(2), change=in_stages()), 1e-6)


@pytest.mark.parametrize("shard", ["parameters", "gradients"])
def test_weights_in_shards_move_to_their_owners(shard):
    strategy = strategy_of(2, shard=shard, shard_min_bytes=0)
    one = trained(mlp)
    check(one, trained(mlp, strategy, change=in_stages()), bound_of(one[0]))


def test_sample_weights_in_two_groups():
    """Their sum is an exchange between forward and backward passes."""
    x, y = rows_of(mlp, ROWS)
    weights = np.linspace(0.0, 2.0, ROWS)
    fitted = []
    for strategy, change in ((None, None), (strategy_of(4), in_stages())):
        model = made(mlp, strategy, change=change)
        options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
        how = model.fit(x, y, sample_weight=weights, verbose=0, **options)
        fitted.append((model, how.history["loss"]))
    check(*fitted, bound_of(fitted[0][0]))


class Adding(layers.Dense):
    """Gives `add_loss` a function of its results and of its layer."""

    def __init__(self, loss_of, **given):
        super().__init__(16, "tanh", **given)
        self._loss_of = loss_of

    def call(self, inputs):
        found = super().call(inputs)
        self.add_loss(self._loss_of(found, self))
        return found


def adding(loss_of):
    """A layer that adds losses, called in two stages."""

    def build():
        inputs, layer = keras.Input((12,)), Adding(loss_of)
        hidden = layers.Dense(12, "tanh")(layer(inputs))
        return keras.Model(inputs, layers.Dense(5)(layer(hidden)))

    return build


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda found, layer: 0.1 * keras.ops.mean(found**2),
        lambda found, layer: 0.1 * keras.ops.mean(found**2, axis=-1),
        lambda found, layer: 0.1 * layer.kernel**2,
    ],
    ids=["mean", "rows", "weights"],
)
def test_losses_that_layers_add_count_once_for_all_parts(loss_of):
    build, change = adding(loss_of), in_stages(micro_batches=3)
    several = trained(build, strategy_of(2), data=rows_of(build, ROWS), change=change)
    one = trained(build, data=rows_of(build, ROWS))
    check(one, several, bound_of(one[0]))


def test_a_share_that_a_layer_adds_is_refused_in_parts():
    build = adding(lambda found, layer: tfdp.losses.local_sum(keras.ops.sum(found**2)))
    with pytest.raises(ConfigurationError, match="use micro_batches=1"):
        trained(build, strategy_of(2), change=in_stages(micro_batches=2))


def called_twice():
    """A weight that is read twice in the second stage, and in no other."""
    inputs, layer = keras.Input((12,)), layers.Dense(12, "tanh", name="twice")
    hidden = layer(layer(layers.Dense(12, "tanh")(inputs)))
    return keras.Model(inputs, layers.Dense(5)(hidden))


def test_sums_of_several_reads_of_a_stage_are_no_suspicious_gradients():
    """Warnings are errors."""
    one = trained(called_twice)
    change = in_stages(cuts=["twice"])
    check(one, trained(called_twice, strategy_of(2), change=change), bound_of(one[0]))
    one = trained(mlp)
    change = lambda model: tfdp.pipeline(tfdp.remat(model))  # noqa: E731
    check(one, trained(mlp, strategy_of(2), change=change), bound_of(one[0]))


def synchronized():
    normal = tfdp.layers.SyncBatchNormalization
    hidden = [layers.Dense(16, "tanh"), normal(), layers.Dense(16, "tanh"), normal()]
    return keras.Sequential([keras.Input((12,)), *hidden, layers.Dense(5)])


def test_layers_that_exchange_statistics_do_not_stand_still():
    """Sums in the forward pass wait for other replicas' forward passes."""
    plain = trained(synchronized, strategy_of(2))
    check(plain, trained(synchronized, strategy_of(2), change=in_stages()), 1e-5)


class Penalized(keras.Model):
    """A penalty on the gradient of the outputs, which has a gradient of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                found = self(x, training=True)
                total = tf.reduce_sum(found * found)
            steep = tf.reduce_sum(inner.gradient(total, x) ** 2, -1)
            loss = self.compute_loss(x, y, found)
            loss += 0.1 * tfdp.losses.local_mean(tf.reduce_mean(steep))
        found = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(found, self.trainable_variables)
        return {"loss": loss}


def penalizing():
    model = mlp()
    return Penalized(model.inputs, model.outputs)


def test_gradients_of_gradients():
    data = rows_of(mlp, 36)  # of equal replicas
    plain = trained(penalizing, strategy_of(2), data=data)
    check(
        plain, trained(penalizing, strategy_of(2), data=data, change=in_stages()), 1e-5
    )


def equal_layers():
    return keras.Sequential(
        [keras.Input((12,)), *(keras.layers.Dense(12, "tanh") for _ in range(8))]
    )


def test_each_device_stores_its_stages_with_their_state():
    """1 / P of weights and state, in each group, and nothing of it elsewhere."""
    change = in_stages(4)
    strategy = strategy_of(4)
    model = made(equal_layers, strategy, OPTIMIZERS["averages"], change)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    of_stage = 2 * (12 * 12 + 12) * 4  # two layers, float32
    assert bytes_at(model, state=False) == [of_stage] * 4
    assert bytes_at(model) == [4 * of_stage] * 4  # two moments, an average
    assert [weight.shape for weight in model.layers[0].weights] == [(12, 12), (12,)]


def place_of(name):
    """(stage, replica, whether backward) of an operation of a stage, by its name."""
    stage = re.search(r"/stage_(\d)", name)
    replica = re.search(r"replica_(\d)/", name)
    if stage is None:
        return None
    at = int(replica[1]) if replica else 0
    return int(stage[1]), at, "gradient_tape" in name


def test_every_operation_of_a_stage_is_on_its_owners_device():
    """Forward and backward, also of rows of other replicas: 100 %."""
    model = made(equal_layers, strategy_of(4), change=in_stages(2), loss="mse")
    x = np.ones((16, 12), "float32")
    graphs = run_graphs(lambda: model.fit(x, x, batch_size=16, verbose=0))
    placed = collections.Counter()
    for node in (node for graph in graphs for node in graph.node):
        found = place_of(node.name)
        if found and node.op not in ("Const", "_Send", "_Recv", "NoOp"):
            stage, replica, is_backward = found
            owner = replica // 2 * 2 + stage
            placed[is_backward, node.device.endswith(f":{owner}")] += 1
    assert placed[False, True] > 20 and placed[True, True] > 20
    assert placed[False, False] == placed[True, False] == 0


class Traced(keras.callbacks.Callback):
    """The operations of the fourth step."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            self._trace = StepTrace()
            self._trace.start()

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.events = self._trace.stop()


def wide():
    return keras.Sequential(
        [keras.Input((128,)), *(keras.layers.Dense(128, "tanh") for _ in range(8))]
    )


def test_a_stage_holds_few_activations():
    """In the order 1F1B: stage s of P those of P - s micro-batches at most."""
    model = made(wide, strategy_of(4), change=in_stages(4), loss="mse")
    x, traced = np.ones((64, 128), "float32"), Traced()
    model.fit(x, x, batch_size=16, verbose=0, callbacks=[traced])
    spans = collections.defaultdict(list)
    for event in traced.events:
        found = place_of(event.name)
        if found and "MatMul" in event.name:
            spans[found] += [event.start_us, event.start_us + event.duration_us]
    for stage in range(4):
        changes = []
        for replica in range(4):
            changes.append((min(spans[stage, replica, False]), 1))
            changes.append((max(spans[stage, replica, True]), -1))
        held = np.cumsum([change for _, change in sorted(changes)])
        assert max(held) <= held_activations(4, 4, stage), stage


def test_a_mask_of_the_model_gives_the_other_order_and_no_standstill():
    """The sum of its weights is an exchange between forward and backward passes."""
    data = rows_of(pipelines.attentive, 12)
    model, losses = trained(
        pipelines.attentive, strategy_of(2), data=data, change=in_stages(), epochs=1
    )
    assert np.isfinite(losses).all()


def test_files_hold_whole_weights_and_any_number_of_stages_reads_them(tmp_path):
    model, _ = trained(mlp, strategy_of(2), change=in_stages())
    model.save(tmp_path / "two.keras")
    whole = keras.models.load_model(tmp_path / "two.keras")
    model.save_weights(tmp_path / "two.weights.h5")
    four = made(mlp, strategy_of(4), change=in_stages(4))
    four.load_weights(tmp_path / "two.weights.h5")
    for other in (whole, four):
        for one, expected in zip(other.weights, model.weights, strict=True):
            assert one.path.split("/")[-2:] == expected.path.split("/")[-2:]
            np.testing.assert_array_equal(one.numpy(), expected.numpy())
    x, _ = rows_of(mlp)
    np.testing.assert_allclose(model(x), whole(x), atol=1e-6)


def test_a_training_resumes_in_another_number_of_stages(tmp_path):
    data, adam = rows_of(mlp), OPTIMIZERS["global"]
    for replicas, epochs in ((2, 1), (4, 2)):
        change = in_stages(replicas)
        model = made(mlp, strategy_of(replicas), adam, change)
        resumed = tfdp.callbacks.Checkpoint(tmp_path)
        how = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
        model.fit(*data, callbacks=[resumed], **how)
    one, _ = trained(mlp, data=data, optimizer=adam, epochs=2)
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, "global")


def with_a_number():
    """Its second output has no rows."""
    model = mlp()
    number = keras.ops.mean(model.outputs[0])
    return keras.Model(model.inputs, [*model.outputs, number])


def of_all_rows():
    layer = tfdp.layers.AllRows(keras.layers.Dense(12))
    return keras.Sequential([keras.Input((12,)), layers.Dense(12), layer])


class MayAdd(layers.Layer):
    def call(self, one, other=None):
        return one if other is None else one + other


def test_an_optional_input_that_is_missing():
    def build():
        one, other = keras.Input((12,)), keras.Input((12,), optional=True)
        found = layers.Dense(12, "tanh")(MayAdd()(one, other))
        return keras.Model([one, other], layers.Dense(5)(found))

    model = made(build, strategy_of(2), change=in_stages())
    x, strategy = tf.constant(rows_of(mlp)[0]), model.distribute_strategy

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = tfdp.losses.local_mean(tf.reduce_mean(model([x, None]) ** 2))
        found = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(found, model.trainable_variables)
        return loss

    losses = strategy.run(gradients)
    assert float(strategy.reduce("SUM", losses, None)) > 0


def test_an_output_without_rows():
    model = with_a_number()
    with strategy_of(2).scope():
        several = tfdp.pipeline(with_a_number())
    several.set_weights(model.get_weights())
    x, _ = rows_of(mlp)
    np.testing.assert_allclose(several(x)[1], model(x)[1], atol=1e-6)


def one_layer():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def subclassed():
    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    return Own()


@pytest.mark.parametrize(
    "build, given, words",
    [
        (mlp, {"stages": 1}, "stages must be an integer of at least 2"),
        (mlp, {"micro_batches": 0}, "micro_batches must be"),
        (mlp, {"stages": 3}, "2 replicas, of which 3 stages"),
        (one_layer, {}, "stages must be at most 1, .*Received: 2"),
        (mlp, {"cuts": ["nowhere"]}, "cuts must name 1 layers.*hidden_0, hidden_1"),
        (mlp, {"cuts": ["hidden_0"]}, "none of them the first"),
        (mlp, {"cuts": 2}, "cuts must name 1 layers"),
        (of_all_rows, {"micro_batches": 2}, "gives it parts of them"),
        (with_a_number, {"micro_batches": 2}, r"of shape \(\) has no rows"),
        (subclassed, {}, "functional model, or of a Sequential that is built"),
        (lambda: tfdp.pipeline(mlp()), {}, "is cut already"),
        (lambda: tfdp.remat(mlp(), "segments"), {}, "is cut already"),
    ],
)
def test_refused(build, given, words):
    with strategy_of(2).scope(), pytest.raises(ConfigurationError, match=words):
        tfdp.pipeline(build(), **given)


def test_segments_of_a_model_in_stages_are_refused():
    with strategy_of(2).scope():
        model = tfdp.pipeline(mlp())
    with pytest.raises(ConfigurationError, match="by tfdp.pipeline. Use another"):
        tfdp.remat(model, "segments")


def test_a_strategy_that_cannot_lend_weights_is_refused():
    with pytest.raises(ConfigurationError, match="made in the scope of a strategy"):
        tfdp.pipeline(mlp())
    with (
        strategy_of(2, communication=tfdp.Communication(engine="tensorflow")).scope(),
        pytest.raises(ConfigurationError, match="engine='in_process'"),
    ):
        tfdp.pipeline(mlp())


def test_a_model_that_was_trained_is_refused():
    model, _ = trained(mlp, strategy_of(2))
    with pytest.raises(ConfigurationError, match="was used by fit.*compile=False"):
        tfdp.pipeline(model)


@pytest.mark.parametrize(
    "compiled, error, words",
    [
        ({"run_eagerly": True}, ConfigurationError, "run_eagerly=False.*tfdp.pipeline"),
        ({"jit_compile": True}, CollectiveError, "jit_compile=False.*tfdp.pipeline"),
    ],
)
def test_a_step_that_is_no_graph_of_replicas_is_refused(compiled, error, words):
    with pytest.raises(error, match=words):
        trained(mlp, strategy_of(2), change=in_stages(), **compiled)


def test_a_noise_scale_names_the_pipeline_that_it_cannot_measure():
    model, data = made(mlp, strategy_of(2), change=in_stages()), rows_of(mlp)
    with pytest.raises(ConfigurationError, match="Noise.* whole sums.*tfdp.pipeline"):
        model.fit(*data, callbacks=[tfdp.callbacks.GradientNoiseScale()], verbose=0)


def test_an_optimizer_of_whole_matrices_is_refused():
    with pytest.raises(ConfigurationError, match=r"Muon.*tfdp\.pipeline"):
        trained(
            mlp,
            strategy_of(2),
            change=in_stages(),
            optimizer=lambda: optimizers.Muon(0.01),
        )


def test_cuts_balance_costs():
    assert stage_ends([1] * 7, [1] * 7, 3) == [2, 4, 6]  # 3, 2 and 2 layers
    assert stage_ends([1, 1, 1, 5, 1, 1], [9, 9, 1, 1, 9, 9], 2) == [2, 5]
    assert stage_ends([2, 1, 1], [5, 1, 1], 2) == [0, 2]


SCRIPT = """
import keras, numpy as np, tfdp
with tfdp.auto_strategy(cpu_devices=2).scope():
    layers = [keras.layers.Dense(8, name=f"dense_{n}") for n in range(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model = tfdp.pipeline(model, micro_batches=2)
    model.compile("adam", "mse")
model.fit(np.ones((32, 8)), np.ones((32, 8)), batch_size=16)
"""


@pytest.mark.worth_seconds(12)
def test_a_plan_has_a_row_for_each_stage(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_python("-m", "tfdp", "plan", script, "--replicas", 2)
    assert done.returncode == 0, done.stderr
    # 2 x (8 x 8 + 8) numbers; 2 of 4 micro-batches of 16 rows; 16 rows and back.
    stage = r"0 +dense_0 to dense_1 +576 B +512 B +1.02 kB"
    assert re.search(stage, done.stdout), done.stdout
    assert "4 micro-batches: each device is idle for 20%" in done.stdout
