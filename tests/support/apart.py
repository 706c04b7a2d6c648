"""Training apart (`tfdp.sync`) in NumPy: linear regression, group by group, by hand."""

import dataclasses

import keras
import numpy as np

import tfdp

FEATURES = 5
RATE, MOMENTUM = 0.05, 0.5


def regression_data(rows, seed=11):
    """Rows of very different size, so that no two groups have alike gradients."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)) * rng.uniform(0.2, 2.0, size=(rows, 1))
    y = x @ rng.normal(size=(FEATURES, 1)) + rng.normal(size=(rows, 1))
    return x.astype("float32"), y.astype("float32")


def linear_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])


def embedding_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(4, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def synchronous_slices(syncs, strategy):
    """The weights of an embedding whose words repeat, trained with each of `syncs`.

    Adam squares each slice of a repeated word by itself: dense gradients, or slices
    added up, would be another update.
    """
    rng = np.random.default_rng(5)
    words, targets = rng.integers(0, 4, (48, 3)), rng.normal(size=(48, 1))
    results = []
    for sync in syncs:
        with strategy.scope():
            model = embedding_model()
            adam = keras.optimizers.Adam(0.01)
            optimizer = tfdp.DistributedOptimizer(adam, sync=sync)
            model.compile(optimizer, "mse", jit_compile=False)
        options = {"batch_size": 20, "shuffle": False, "verbose": 0}
        model.fit(words, targets, **options)
        results.append(np.concatenate([np.ravel(w) for w in model.get_weights()]))
    return results


def sgd(**options):
    return keras.optimizers.SGD(RATE, momentum=MOMENTUM, **options)


@dataclasses.dataclass
class ByHand:
    """w and the bias as one vector of float64, outer and of each group.

    The equations are those of the docstrings of `tfdp.sync.LocalSGD` and `DiLoCo`,
    written once more, with Keras' SGD: v <- m v - lr g, w <- w + v.
    """

    sync: object
    start: np.ndarray
    groups: int

    def __post_init__(self):
        self.outer = self.start.astype("float64")
        self.local = [self.outer.copy() for _ in range(self.groups)]
        self.velocity = [np.zeros_like(self.outer) for _ in range(self.groups)]
        self.momentum = np.zeros_like(self.outer)
        self.updates = 0
        self.on_the_way = {}  # by the update in which it is back: fragment, mean
        self.losses = []  # of each group in each update: its rows, and their mean

    def update(self, parts):
        """One update; `parts` has the (x, y) of each group, perhaps without rows."""
        for w, (x, y) in zip(self.local, parts, strict=True):
            loss = np.mean((x @ w[:-1, None] + w[-1] - y) ** 2) if len(x) else 0.0
            self.losses.append((len(x), loss))
        gradients = [gradient_of(w, *p) for w, p in zip(self.local, parts, strict=True)]
        self.updates += 1
        is_synchronous = self.updates <= self.sync.start_step
        if is_synchronous:
            rows = [len(x) for x, _ in parts]
            gradients = [np.average(gradients, axis=0, weights=rows)] * self.groups
        for i, gradient in enumerate(gradients):
            self.velocity[i] = MOMENTUM * self.velocity[i] - RATE * gradient
            self.local[i] = self.local[i] + self.velocity[i]
        if is_synchronous:
            self.outer = self.local[0].copy()
            return
        if self.updates in self.on_the_way:
            self.move(*self.on_the_way.pop(self.updates))
        each = self.sync.every // self.fragments
        place = (self.updates - self.sync.start_step) % self.sync.every
        if not is_synchronous and place % each == 0:
            self.meet((place // each - 1) % self.fragments)

    def mean_loss(self):
        """Over all rows since it was last asked: what an epoch reports."""
        rows, losses = zip(*self.losses, strict=True)
        self.losses = []
        return np.average(losses, weights=rows)

    @property
    def fragments(self):
        return getattr(self.sync, "fragments", 1)

    def meet(self, number):
        """Of two fragments the first is the kernel, the second the bias."""
        own = slice(None)
        if self.fragments == 2:
            own = [slice(0, -1), slice(-1, None)][number]
        local = [w[own] for w in self.local]
        if isinstance(self.sync, tfdp.sync.DiLoCo):
            mean = np.mean([self.outer[own] - w for w in local], axis=0)
        else:
            mean = np.mean(local, axis=0)
        overlap = getattr(self.sync, "overlap_steps", 0)
        if overlap:
            self.on_the_way[self.updates + overlap] = own, mean
        else:
            self.move(own, mean)

    def move(self, own, mean):
        outer, share = mean, 0.0
        if isinstance(self.sync, tfdp.sync.DiLoCo):
            mu, rate = self.sync.outer_momentum, self.sync.outer_learning_rate
            momentum = mu * self.momentum[own] + mean
            outer = self.outer[own] - rate * (mean + mu * momentum)
            self.momentum[own] = momentum
            share = self.sync.mixing
            if share is None:
                share = 0.5 if self.sync.overlap_steps else 0.0
        self.outer = self.outer.copy()
        self.outer[own] = outer
        for weights in self.local:
            weights[own] = share * weights[own] + (1 - share) * outer


def gradient_of(weights, x, y):
    """Of the mean over the rows of (x w + b - y)^2; 0 for no rows."""
    if not len(x):
        return np.zeros_like(weights)
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype("float64")
    return 2 * (rows * (rows @ weights[:, None] - y)).mean(axis=0)


def vector_of(weights):
    """The kernel and the bias of `linear_model` as one vector."""
    kernel, bias = weights
    return np.concatenate([np.ravel(kernel), np.ravel(bias)]).astype("float64")


def parts_of(x, y, batch_size, replicas, groups):
    """Batch by batch, the rows of each group: a batch is dealt out evenly, the first
    replicas have one row more."""
    for start in range(0, len(x), batch_size):
        batch = x[start : start + batch_size], y[start : start + batch_size]
        each = -(-len(batch[0]) // replicas) * (replicas // groups)
        yield [
            tuple(part[i * each : (i + 1) * each] for part in batch)
            for i in range(groups)
        ]
