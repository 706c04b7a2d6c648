"""`grain` inputs in `fit`: the batches of one device, and a place that is kept.

The reference is the same program, undisturbed; or one device on the same batches.
Several hosts are in tests/processes/test_grain.py.
"""

import itertools
import json

import absl.flags
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.devices.test_checkpoint import make_model
from tests.devices.test_resume import BreakOff, Broken, assert_ends_alike, run
from tests.support.parity import classification_data, make_strategy
from tfdp.data.grain import MOST_STATES, GrainPasses, is_shard_of
from tfdp.errors import ConfigurationError, DataError

grain = pytest.importorskip("grain", reason="pip install 'tfdp[grain]'")
SAMPLES, ROWS = 130, 12


class Fetch(grain.transforms.Map):
    """A sample by its number, counted."""

    def __init__(self):
        self.x, self.y = classification_data(SAMPLES)
        self.fetched = []

    def map(self, number):
        self.fetched.append(int(number))
        return self.x[number], self.y[number]


def loader(fetch, seed=5, epochs=1, workers=0):
    everything = grain.sharding.NoSharding()
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, SAMPLES, 1),
        sampler=grain.samplers.IndexSampler(
            SAMPLES, everything, shuffle=True, seed=seed, num_epochs=epochs
        ),
        operations=[fetch, grain.transforms.Batch(ROWS)],
        shard_options=everything,
        worker_count=workers,
    )


def dataset(fetch):
    numbers = grain.MapDataset.range(SAMPLES).seed(5).shuffle()
    return numbers.map(fetch).batch(ROWS)


def windows(fetch):
    """Shuffled in windows, which cannot be reached by a number."""
    numbers = grain.MapDataset.range(SAMPLES).map(fetch).to_iter_dataset()
    shuffled = grain.experimental.WindowShuffleIterDataset(
        numbers, window_size=40, seed=3
    )
    return shuffled.batch(ROWS)


KINDS = {
    "loader": lambda fetch: {"x": loader(fetch)},
    "dataset": lambda fetch: {"x": dataset(fetch)},
    "windows": lambda fetch: {"x": windows(fetch)},
    # An epoch goes on where the one before has ended, in another order.
    "repeated": lambda fetch: {
        "x": loader(fetch, epochs=None),
        "steps_per_epoch": 7,
    },
}


def run_kind(replicas, kind, *arguments, fetch=None, **options):
    fetch = fetch or Fetch()
    return run(replicas, lambda: KINDS[kind](fetch), *arguments, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_one_device(kind):
    """One device reads what Keras makes of the input, without tfdp."""
    expected = run_kind(2, kind)[0].get_weights()
    model = make_model(2)
    keras.utils.set_random_seed(9)
    made = KINDS[kind](Fetch())
    source = made.pop("x")
    batches = []
    while len(batches) < 22:  # two epochs, or enough for two of 7 steps
        found = itertools.islice(source, 22)
        batches += [tuple(map(np.asarray, batch)) for batch in found]
    steps = 14 if made else 22
    batches = iter(batches[:steps])
    data = tf.data.Dataset.from_generator(
        lambda: batches,
        output_signature=(
            tf.TensorSpec((None, 12), tf.float32),
            tf.TensorSpec((None,), tf.int64),
        ),
    )
    model.compile(model.optimizer, model.loss, metrics=["accuracy"])
    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", patience=1, factor=0.5, min_delta=0.3
    )
    model.fit(
        data, epochs=2, steps_per_epoch=steps // 2, verbose=0, callbacks=[plateau]
    )
    # The same steps of the same replicas: no other order of any sum.
    for mine, theirs in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "replicas, kind, at",
    [
        *((2, kind, 14) for kind in KINDS),
        *(pytest.param(2, kind, 4, marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(0, kind, 14, marks=pytest.mark.slow) for kind in KINDS),
        (0, "loader", 4),
    ],
)
def test_broken_off_and_gone_on(tmp_path, replicas, kind, at, capfd):
    expected = run_kind(replicas, kind)
    with pytest.raises(Broken):
        run_kind(replicas, kind, tmp_path, BreakOff(at), every_steps=3)
    again = Fetch()
    found = run_kind(replicas, kind, tmp_path, every_steps=3, fetch=again)
    assert_ends_alike(expected, found)
    says_so = "batches again and skips them" in capfd.readouterr().err
    # Without a strategy Keras' own input is read, as far as before.
    assert says_so == (replicas == 0)


def test_nothing_is_read_again(tmp_path):
    with pytest.raises(Broken):
        run_kind(2, "loader", tmp_path, BreakOff(8), every_steps=7)
    again = Fetch()
    run_kind(2, "loader", tmp_path, every_steps=7, fetch=again)
    # Keras looks at two batches before it trains; and then the four that are left of
    # the first epoch, and the second one. Keras drops an iterator behind each.
    first = again.fetched[2 * ROWS : 2 * ROWS + SAMPLES - 7 * ROWS]
    order = Fetch()
    list(loader(order))
    assert first == order.fetched[7 * ROWS :]


def test_another_order_is_refused(tmp_path):
    with pytest.raises(Broken):
        run_kind(2, "loader", tmp_path, BreakOff(5), every_steps=3)
    with pytest.raises(DataError, match="cannot go on .*Sampler in checkpoint"):
        run(2, lambda: {"x": loader(Fetch(), seed=6)}, tmp_path, every_steps=3)


@pytest.mark.parametrize(
    "state",
    ["", "[", "[]", "null", "{}", '{"next_index": "x"}', "[" * 9999, "\x00", "1e999"],
)
@pytest.mark.parametrize("make", [loader, dataset, windows])
def test_a_state_that_is_none_is_refused(make, state):
    passes = GrainPasses(make(Fetch()))
    with pytest.raises(DataError, match="cannot go on"):
        passes.begin_next_at(3, state)


def test_states_are_few():
    passes = GrainPasses(grain.MapDataset.range(MOST_STATES + 5).map(lambda n: [n]))
    assert next(passes.batches()) == (0,) and passes.state_after(1) is None
    passes.keep()
    assert [first for (first,) in passes.batches()] == list(range(MOST_STATES + 5))
    assert passes.state_after(5) is None
    last = json.loads(passes.state_after(MOST_STATES + 5))
    assert last["next_index"] == MOST_STATES + 5


class Untold:
    """Iterators of somebody's own, which do not tell where they are."""

    def __iter__(self):
        return self

    def __next__(self):
        return [1]

    def get_state(self):
        return {"what": object()}


def test_who_tells_no_state_is_read_all_the_same():
    passes = GrainPasses(Untold())
    passes.keep()
    assert next(passes.batches()) == (1,) and passes.state_after(1) is None


def test_other_shards_within_an_epoch_are_refused(tmp_path):
    with pytest.raises(Broken):
        run_kind(2, "loader", tmp_path, BreakOff(5), every_steps=3)
    half = grain.sharding.ShardOptions(0, 2)

    def sharded():
        fetch = Fetch()
        return {
            "x": grain.DataLoader(
                data_source=grain.sources.RangeDataSource(0, SAMPLES, 1),
                sampler=grain.samplers.SequentialSampler(SAMPLES, half),
                operations=[fetch, grain.transforms.Batch(ROWS)],
                shard_options=half,
            )
        }

    with pytest.raises(ConfigurationError, match="has 2 shards, and had 1"):
        run(2, sharded, tmp_path, every_steps=3)


def test_which_shard_a_host_reads():
    assert is_shard_of(1, 2, rank=1, hosts=2)
    assert not is_shard_of(0, 1, rank=1, hosts=2)
    for index, count in ((0, 2), (1, 3), (0, 4)):
        with pytest.raises(ConfigurationError, match="grain.DataLoader reads shard"):
            is_shard_of(index, count, rank=1, hosts=2)


def test_what_is_evaluated_and_predicted():
    strategy = make_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(10)])
        model.compile("sgd", "mse")
    x, _ = classification_data(SAMPLES)
    order = Fetch()
    list(loader(order))
    predicted = model.predict(loader(Fetch()), verbose=0)
    expected = model.predict(x[order.fetched], verbose=0, batch_size=ROWS)
    np.testing.assert_array_equal(predicted, expected)


def test_a_pass_begins_where_it_was_and_the_next_at_the_beginning():
    passes = GrainPasses(grain.MapDataset.range(9).batch(2))
    passes.keep()
    # Read ahead: what is asked for lies behind.
    ahead = passes.batches()
    for _ in range(4):
        next(ahead)
    later = GrainPasses(grain.MapDataset.range(9).batch(2))
    later.begin_next_at(2, passes.state_after(2))
    assert [batch.tolist() for batch in later.batches()] == [[4, 5], [6, 7], [8]]
    assert next(later.batches()).tolist() == [0, 1]


@pytest.mark.slow
def test_processes_of_grain_read_ahead():
    # As `absl.app.run` does: grain's processes read flags.
    absl.flags.FLAGS.mark_as_parsed()

    def made():
        numbers = grain.MapDataset.range(30).batch(3).to_iter_dataset()
        options = grain.MultiprocessingOptions(num_workers=2)
        return GrainPasses(numbers.mp_prefetch(options))

    passes = made()
    passes.keep()
    every = [batch.tolist() for batch in passes.batches()]
    assert sorted(sum(every, [])) == list(range(30))
    for place in (1, 4, 9, 10):
        later = made()
        later.begin_next_at(place, passes.state_after(place))
        assert [batch.tolist() for batch in later.batches()] == every[place:]
