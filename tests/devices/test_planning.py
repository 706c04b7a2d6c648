"""Plans of small models: what is stored, by formula; what a step adds, by hand."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import ConfigurationError
from tfdp.planning import plan
from tfdp.tools.planning import planner as planner_module
from tfdp.tools.planning import ways
from tfdp.tools.planning.answer import Answer
from tfdp.tools.planning.planner import Planner
from tfdp.tools.planning.ways import (
    Way,
    largest_batch,
    settings_to_try,
    ways_to_fit,
)

WIDTH, DEPTH, FLOAT_BYTES = 128, 4, 4
KERNEL_BYTES = WIDTH * WIDTH * FLOAT_BYTES
BIAS_BYTES = WIDTH * FLOAT_BYTES
WEIGHT_BYTES = DEPTH * (KERNEL_BYTES + BIAS_BYTES)
# Adam's rate and counter of steps.
SMALL_BYTES = 64


def build(activation="relu", **options):
    layers = [keras.layers.Dense(WIDTH, activation) for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(keras.optimizers.Adam(1e-3, **options), "mse", jit_compile=False)
    return model


@pytest.mark.worth_seconds(6)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_what_is_stored_is_what_the_formulas_say(shard):
    found = plan(build, 64, replicas=4, shard=shard).parts
    # The kernels are sharded, the biases are too small for it.
    whole, quarter = 4 * DEPTH * BIAS_BYTES, DEPTH * KERNEL_BYTES / 4
    kernels = {"none": DEPTH * KERNEL_BYTES, "optimizer": quarter}
    slots = 2 * (kernels.get(shard, quarter) + DEPTH * BIAS_BYTES)
    weights = WEIGHT_BYTES if shard != "parameters" else quarter + whole / 4
    assert found["slots"] == pytest.approx(slots, abs=SMALL_BYTES)
    assert found["weights"] == pytest.approx(weights, abs=SMALL_BYTES)


def test_owners_hold_the_state_of_matrices_and_weights_move_to_them():
    def with_muon():
        model = build()
        model.compile(keras.optimizers.Muon(1e-3), "mse", jit_compile=False)
        return model

    # Of a kernel one momentum, at its owner; of a bias two slots, everywhere.
    slots = DEPTH * (KERNEL_BYTES / 4 + 2 * BIAS_BYTES)
    for shard in ("optimizer", "parameters"):
        found = plan(with_muon, 64, replicas=4, shard=shard)
        assert found.parts["slots"] == pytest.approx(slots, abs=SMALL_BYTES)
        sent = 2 * WEIGHT_BYTES
        if shard == "parameters":  # a quarter of each, to its owner and back
            sent += 2 * DEPTH * KERNEL_BYTES / 4
        assert found.sent_bytes == sent * 3 // 4


def test_a_model_that_was_not_compiled_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigurationError, match="not compiled"):
        plan(model, 8)


def test_activations_grow_with_the_rows():
    # The forward pass keeps the batch, the outputs of the layers before the last one
    # and what the loss makes of the last: at least DEPTH times the rows, at most as
    # many again for what flows back and the loss's own, and a number for each row.
    rows = 4096
    row_bytes = rows * WIDTH * FLOAT_BYTES
    found = plan(build, rows).parts
    most = (DEPTH + 4) * row_bytes + 2 * rows * FLOAT_BYTES
    assert DEPTH * row_bytes <= found["activations"] <= most
    assert found["batch"] == 2 * row_bytes


@pytest.mark.worth_seconds(8)
def test_remat_keeps_less():
    def deep():
        layers = [
            keras.Sequential([keras.layers.Dense(WIDTH, "gelu") for _ in range(4)])
            for _ in range(4)
        ]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    kept, again = (plan(deep, 4096, remat=remat) for remat in (False, True))
    # Of 16 layers' activations and derivatives: 4 inputs of blocks, and one block.
    assert again.parts["activations"] < 0.6 * kept.parts["activations"]
    assert 1.2 < again.flops / kept.flops < 1.5


def test_a_model_is_left_alone_and_its_numbers_are_those_of_its_builder():
    model = build()
    before = [w.numpy() for w in model.weights]
    assert plan(model, 64).peak_bytes == plan(build, 64).peak_bytes
    assert not model.optimizer.built or int(model.optimizer.iterations) == 0
    for old, new in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, new.numpy())


def test_all_forms_of_a_batch_mean_the_same():
    x, y = np.zeros((64, WIDTH), "float32"), np.zeros((64, WIDTH), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(64, drop_remainder=True)
    peaks = {
        plan(build, form).peak_bytes for form in (64, (x, y), dataset.element_spec)
    }
    assert len(peaks) == 1


def test_accumulation_and_averages_are_counted():
    plain = plan(build, 64).parts["slots"]
    more = plan(lambda: build(gradient_accumulation_steps=2), 64).parts["slots"]
    averaged = plan(lambda: build(use_ema=True), 64).parts["slots"]
    assert more == pytest.approx(plain + WEIGHT_BYTES, abs=SMALL_BYTES)
    assert averaged == pytest.approx(plain + WEIGHT_BYTES, abs=SMALL_BYTES)


@pytest.mark.slow
def test_shards_of_more_replicas_than_are_traced_follow_the_formula():
    found = plan(build, 64, replicas=4, hosts=4, shard="optimizer")
    slots = 2 * (DEPTH * KERNEL_BYTES / 16 + DEPTH * BIAS_BYTES)
    assert found.replicas == 16
    assert found.local_rows == 4
    assert found.parts["slots"] == pytest.approx(slots, rel=0.01)
    assert found.sent_bytes == 2 * WEIGHT_BYTES * 15 // 16


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("hosts", [2, 16])
def test_hosts_share_states_and_keep_what_they_sum(hosts, shard):
    found = plan(build, 32 * hosts, replicas=2, hosts=hosts, shard=shard)
    parts, biases = 2 * hosts, DEPTH * BIAS_BYTES
    shards = DEPTH * KERNEL_BYTES / parts
    slots = 2 * (biases + (DEPTH * KERNEL_BYTES if shard == "none" else shards))
    assert found.hosts == hosts and found.replicas == parts
    assert found.parts["slots"] == pytest.approx(slots, rel=0.02, abs=SMALL_BYTES)
    # One sum for both replicas of a host. With shards the link scatters whole gradients
    # and gathers whole weights, into memory of its own.
    whole = DEPTH * KERNEL_BYTES / 2
    kept = whole if shard == "none" else 2 * whole
    assert found.parts["exchange"] >= kept
    # A host that trains does not know the rows of others; here they are known.
    assert not any("shape is unknown" in note for note in found.notes)


@pytest.mark.worth_seconds(8)
def test_shards_within_each_host_are_as_large_on_any_number_of_hosts():
    by_host = tfdp.Sharding("optimizer", group="host")
    found = plan(build, 256, replicas=2, hosts=8, shard=by_host).parts
    slots = 2 * (DEPTH * KERNEL_BYTES / 2 + DEPTH * BIAS_BYTES)
    assert found["slots"] == pytest.approx(slots, abs=SMALL_BYTES)


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("hosts", [1, 2])
def test_compression_keeps_what_was_not_sent(hosts):
    # Where hosts are simulated the first replica of each speaks for it.
    simulated = {} if hosts > 1 else {"hierarchy": (2, 2)}
    int8 = tfdp.Communication(
        compression=tfdp.compression.Int8(min_bytes=1), **simulated
    )
    replicas = 2 if hosts > 1 else 4
    found = plan(build, 64, replicas=replicas, hosts=hosts, communication=int8)
    residual = DEPTH * KERNEL_BYTES / 2
    assert found.parts["state"] == pytest.approx(residual, rel=0.05)
    assert found.is_known


@pytest.mark.worth_seconds(4)
def test_compressed_sums_are_handed_on_and_not_made_again():
    int8 = tfdp.Communication(compression=tfdp.compression.Int8(min_bytes=1))

    def without_packs():  # whose update would be the peak
        model = build()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    found = plan(without_packs, 64, hosts=2, communication=int8)
    # The sums, and what is left of each; a conditional looks whether they are finite.
    # With memory of its own for what it hands on it would be four times the weights.
    kernels = DEPTH * KERNEL_BYTES
    assert 2 * kernels <= found.parts["activations"] < 2.5 * kernels
    assert found.parts.get("scratch", 0) < kernels


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("replicas", [1, 2])
def test_offload_moves_states_to_the_host_and_keeps_the_rest(replicas):
    shard = tfdp.Sharding("optimizer", offload="optimizer")
    found = plan(build, 64, replicas=replicas, shard=shard)
    slots = 2 * DEPTH * KERNEL_BYTES / replicas
    assert found.host_parts["slots"] == pytest.approx(slots, abs=SMALL_BYTES)
    assert found.parts["slots"] == pytest.approx(
        2 * DEPTH * BIAS_BYTES, abs=SMALL_BYTES
    )
    assert found.parts["weights"] == pytest.approx(WEIGHT_BYTES, abs=SMALL_BYTES)
    # Gradients go there, new weights come back.
    assert found.host_bytes > found.host_parts["slots"]
    assert found.to_json()["host_bytes"] == found.host_bytes


DEEP, ROWS = 20, 512


def build_deep():
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(DEEP)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.worth_seconds(4)
def test_all_replicas_may_be_in_the_middle_of_their_pass(monkeypatch):
    monkeypatch.setattr(planner_module, "usable_cores", lambda: 1)
    found = plan(build_deep, 4 * ROWS, replicas=4)
    batch_bytes = 2 * 4 * ROWS * WIDTH * FLOAT_BYTES
    # The weights of each replica, and three of the four passes at least.
    weights = DEEP * (KERNEL_BYTES + BIAS_BYTES)
    passes = DEEP * ROWS * WIDTH * FLOAT_BYTES
    assert 4 * found.peak_bytes >= 4 * weights + batch_bytes + 3.0 * passes


def test_the_largest_batch_fits_and_a_larger_one_does_not():
    planner = Planner(build, 64)
    limit = planner.at(1000).needed_bytes
    found = largest_batch(planner, limit)
    assert found.fits
    assert 900 <= found.local_rows <= 1000
    assert not planner.at(1100, memory_bytes=limit).fits
    assert largest_batch(planner, WEIGHT_BYTES) is None


def test_a_batch_is_not_the_largest_where_no_larger_one_was_looked_at(monkeypatch):
    monkeypatch.setattr(ways, "MOST_BATCH_BYTES", 200 * 2 * WIDTH * FLOAT_BYTES)
    planner = Planner(build, 64)
    enough = 2 * planner.at(200).needed_bytes
    found = largest_batch(planner, enough)
    assert (found.local_rows, found.larger_may_fit) == (200, True)
    answer = Answer("model", planner.at(64, memory_bytes=enough), found, [])
    assert "at least 200 rows" in str(answer.fact_rows())
    assert "at least 200 rows" in answer.page()
    assert answer.to_json()["largest"]["larger_may_fit"] is True
    fewer = largest_batch(planner, planner.at(100).needed_bytes)
    assert not fewer.larger_may_fit and fewer.local_rows <= 100


def test_a_way_that_needs_no_less_is_not_listed(monkeypatch):
    """Of four rows the accumulated gradients are larger than the activations."""
    planner, done = Planner(build, 4), []
    limit = planner.at(4).peak_bytes
    ways = list(ways_to_fit(planner, limit, done.append))
    names = [way.name for way in ways]
    assert all(way.peak_bytes < limit for way in ways)
    assert not any("accumulation" in name for name in names)
    assert len(done) == len(settings_to_try(planner)) > len(ways)
    [row, *_] = Answer(
        "m", planner.at(4), None, [Way("w", 10**8, False, 0, 0)]
    ).way_rows()
    # A tenth and 16 MiB of margin.
    assert row == ("w", "100.0 MB", "126.8 MB", "no", "+0%", "0.0 kB")


@pytest.mark.slow
def test_ways_are_named_with_their_cost():
    planner = Planner(build, 64, replicas=2)
    base = planner.at(planner.local_rows)
    ways = {way.name: way for way in ways_to_fit(planner, base.needed_bytes - 1)}
    sharded = ways['shard="optimizer"']
    assert sharded.fits
    assert sharded.peak_bytes < base.peak_bytes
    assert sharded.sent_bytes == base.sent_bytes
    again = ways['shard="parameters" and tfdp.remat(model)']
    assert again.sent_bytes == base.sent_bytes * 3 // 2
    assert again.more_flops > 0.1
    assert "gradient_accumulation_steps=2, 16 rows at a time" in ways


@pytest.mark.parametrize("policy", ["each", "segments"])
def test_a_model_that_calls_remat_itself_is_planned_as_with_remat(policy):
    own = Planner(lambda: tfdp.remat(build(), policy), 64, replicas=2, shard=3)
    found = own.at(own.local_rows)
    other = plan(build, 64, replicas=2, shard="parameters", remat=policy)
    assert found.remat and found.sent_bytes == other.sent_bytes
    assert found.sent_bytes == 3 * WEIGHT_BYTES // 2
    assert found.peak_bytes == other.peak_bytes
    assert not any("remat" in way.name for way in ways_to_fit(own, 10**6))


@pytest.mark.parametrize("policy", [True, "segments"])
def test_ways_need_less_than_the_plan_that_was_requested(policy):
    planner = Planner(build, 64, replicas=2)
    base = planner.at(planner.local_rows, remat=policy)
    ways = list(ways_to_fit(planner, 10**6, remat=policy))
    assert ways and all(way.peak_bytes < base.peak_bytes for way in ways)
    names = [way.name for way in ways if "shard" in way.name]
    assert all("remat" in name for name in names)
    assert all(abs(way.more_flops) < 0.05 for way in ways)


def test_the_answer_in_words_and_on_a_page():
    found = plan(build, 64, memory_bytes=10**6)
    answer = Answer("<model>", found, None, [])
    assert "does not fit in 1.0 MB" in answer.sentence
    assert answer.sentence.startswith("<model>: one replica (GPU or CPU) with 64 rows")
    # A tenth and 16 MiB.
    margin = f"{(1.1 * found.peak_bytes + 2**24) / 1e6:,.1f} MB"
    assert ("peak with its margin", margin) in answer.fact_rows()
    assert "&lt;model&gt;" in answer.page() and "<model>" not in answer.page()
    assert "memory: 1 MB" in answer.page()
    assert json.loads(json.dumps(answer.to_json()))["plan"]["fits"] is False


@pytest.mark.parametrize(
    "batch,options,message",
    [
        (0, {}, "batch must be"),
        ("64", {}, "batch must be"),
        (64, {"replicas": 0}, "replicas must be"),
        (2, {"replicas": 4}, "2 rows for 4 replicas"),
        (64, {"memory_bytes": 0}, "memory_bytes must be"),
        (64, {"shard": "all"}, "shard must be"),
        (
            64,
            {"hosts": 2, "communication": tfdp.Communication(min_hosts=1)},
            "independently",
        ),
        (64, {"hosts": 2, "shard": tfdp.Sharding(1, "host")}, "this host has one"),
        (
            64,
            {"hosts": 2, "communication": tfdp.Communication(engine="tensorflow")},
            "need connected hosts",
        ),
        ((tf.TensorSpec((None, 3), "float32"),), {}, "same, fixed number of rows"),
    ],
)
def test_bad_arguments(batch, options, message):
    with pytest.raises(ConfigurationError, match=message):
        plan(build, batch, **options)


def looked_up():
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            keras.layers.Embedding(5000, 12),
            keras.layers.Bidirectional(keras.layers.LSTM(16)),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def _with_half_negated(x):
    half = max(1, x.shape[0] // 2)
    return keras.ops.concatenate([x[:half], -x[half:]])


def halved():
    """A model that takes half of its batch."""
    inputs = keras.Input((WIDTH,))
    x = keras.layers.Dense(WIDTH)(inputs)
    half = keras.layers.Lambda(
        lambda x: x if x.shape[0] is None else _with_half_negated(x),
        output_shape=(WIDTH,),
    )
    model = keras.Model(inputs, half(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


# Each replica negates half of its own rows, which the step rightly warns of.
@pytest.mark.filterwarnings("ignore:.*rows are joined:tfdp.errors.LocalMeanWarning")
# Of a single row, an LSTM squeezes the axis of rows, too.
@pytest.mark.filterwarnings("ignore:.*past Squeeze:tfdp.errors.LocalMeanWarning")
@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("build_model", [build, looked_up, halved])
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_trace_says_of_all_rows_what_a_trace_of_each_says(build_model, replicas):
    each = Planner(build_model, 8 * replicas, replicas=replicas)
    once = Planner(build_model, 8 * replicas, replicas=replicas, any_rows=True)
    for rows in (8, 13, 1):
        expected, found = each.at(rows), once.at(rows)
        # Zeros of fewer than 1,000 numbers are a constant, of more an op: four states
        # of 1 KB at most in peaks of 0.8 MB and more, and the orders of ops with them.
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.01)
        assert found.flops == pytest.approx(expected.flops, rel=1e-3)
        assert found.parts["weights"] == expected.parts["weights"]
    (traced,) = once._traced.values()
    # What takes a part of its batch is traced for each number of rows.
    assert (traced.shared_trace is None) == (build_model is halved)


@pytest.mark.worth_seconds(8)
def test_rows_of_tables_are_sent_and_whole_tables_are_not():
    def sent(communication=None, shard="none", rows=4):
        found = Planner(
            looked_up, 4 * rows, replicas=4, shard=shard, communication=communication
        ).at(rows)
        return found.sent_bytes, found.trainable_bytes

    table = 5000 * 12 * FLOAT_BYTES
    rest = sent()[1] - table
    # Of 7 words in 4 rows each is a row of 48 bytes and its place, to 3 others.
    assert sent()[0] == 3 * 28 * 52 + 2 * rest * 3 // 4
    added = tfdp.Communication(repeated_rows="sum")
    assert sent(added)[0] == sent()[0]
    # 7,000 words: 5,000 rows at most, and the whole table is less than three times it.
    assert sent(added, rows=1000)[0] == 2 * table * 3 // 4 + 2 * rest * 3 // 4
    assert sent(rows=1000)[0] == 3 * 7000 * 52 + 2 * rest * 3 // 4
    assert sent(shard="optimizer")[0] == 2 * (rest + table) * 3 // 4


@pytest.mark.parametrize("replicas,hosts", [(2, 1), (4, 1), (8, 1), (2, 2)])
def test_rows_of_all_replicas_are_held_and_received(replicas, hosts):
    def on_all():
        return tfdp.losses.on_all_rows(build())

    rows = 512  # so many that the peak is not in the update
    options = {"replicas": replicas, "hosts": hosts}
    total = rows * replicas * hosts
    found, plain = plan(on_all, total, **options), plan(build, total, **options)
    # Outputs and targets.
    own_bytes = 2 * rows * WIDTH * FLOAT_BYTES
    others = replicas * hosts - 1
    assert found.all_rows_bytes == others * own_bytes
    assert plain.all_rows_bytes == 0
    assert found.sent_bytes - plain.sent_bytes == others * own_bytes
    # At the peak of a step with rows of other hosts other tensors are gone.
    held = found.parts["activations"] - plain.parts["activations"]
    assert held >= (others * own_bytes if hosts == 1 else own_bytes)
    assert Answer("model", found, None, ()).to_json()["plan"]["all_rows_bytes"]
    # A model is made again with its mark.
    assert plan(on_all(), total, **options).all_rows_bytes == found.all_rows_bytes


def test_rows_of_all_replicas_are_counted_of_the_rows_that_are_asked_for():
    # One trace serves all numbers of rows.
    def on_all():
        return tfdp.losses.on_all_rows(build())

    planner = Planner(on_all, 2 * 96, replicas=2, any_rows=True)
    of_row = 2 * WIDTH * FLOAT_BYTES
    for rows in (96, 24, 48):
        assert planner.at(rows).all_rows_bytes == rows * of_row
    options = {"memory_bytes": 10**9, "one_order": False}
    between = planner.interpolated(24, 96, 60, False, **options)
    assert between.all_rows_bytes == 60 * of_row
    assert between.sent_bytes - planner.at(24).sent_bytes == 36 * of_row
