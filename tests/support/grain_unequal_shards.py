"""Shards of unequal length, of 7 rows and 13, in `evaluate`, `predict` and `fit`.

python -m tests.support.grain_unequal_shards

The reference is a model without a strategy, on the batches of both shards put together.
"""

import os

import grain
import keras
import numpy as np

import tfdp

ROWS, LOST, BATCH = 26, 6, 6
# Some sums of numbers near 1, in float32, of which each rounds by 6e-8. A row that is
# left out, or counted twice, moves means and weights by 1e-3 and more.
BOUND = 2e-6


class Fetch(grain.transforms.Map):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def map(self, number):
        return self.x[number], self.y[number]


class Keep(grain.transforms.Filter):
    """Leaves out rows of the first shard: a DataLoader's own are of one length."""

    def filter(self, element):
        return bool(element[1] < 3)


def loader(rank, hosts, x, y):
    options = grain.sharding.ShardOptions(rank, hosts)
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, ROWS, 1),
        sampler=grain.samplers.IndexSampler(ROWS, options, shuffle=False, num_epochs=1),
        operations=[Fetch(x, y), Keep(), grain.transforms.Batch(BATCH)],
        shard_options=options,
    )


def made():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def joined(shards):
    """The global batches; a shard that is over adds nothing."""
    for step in range(max(map(len, shards))):
        parts = [shard[step] for shard in shards if step < len(shard)]
        yield tuple(np.concatenate(both) for both in zip(*parts, strict=True))


def main():
    rank, hosts = int(os.environ["TFDP_RANK"]), int(os.environ["TFDP_WORKERS"])
    generator = np.random.default_rng(0)
    x, y = (
        generator.normal(size=(ROWS, 4)).astype("float32"),
        generator.integers(0, 3, ROWS),
    )
    y[:LOST] = 3  # what `Keep` leaves out
    shards = [list(loader(shard, hosts, x, y)) for shard in range(hosts)]
    print([[len(batch[1]) for batch in shard] for shard in shards])
    batches = list(joined(shards))
    inputs, labels = (np.concatenate(both) for both in zip(*batches, strict=True))

    strategy = tfdp.auto_strategy()
    with strategy.scope():
        model = made()
    plain = made()
    mine = loader(rank, hosts, x, y)
    np.testing.assert_allclose(
        model.evaluate(mine, verbose=0),
        plain.evaluate(inputs, labels, verbose=0),
        rtol=0,
        atol=BOUND,
    )
    np.testing.assert_allclose(
        model.predict(mine, verbose=0),
        plain.predict(inputs, verbose=0),
        rtol=0,
        atol=BOUND,
    )
    model.fit(mine, epochs=2, verbose=0)
    for _ in range(2):
        for batch in batches:
            plain.train_on_batch(*batch)
    for found, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND)
    print("all alike", flush=True)


if __name__ == "__main__":
    main()
