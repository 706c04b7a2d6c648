"""Builds a program's model, strategy and data."""

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.generator import outputs, train_steps
from tests.generator.layers import INPUTS, LAYERS, TIMES, WIDTH
from tests.generator.optimizers import make_optimizer


def make_strategy(layout, devices=None):
    """The strategy of a `Layout` on logical CPUs."""
    return tfdp.DataParallelStrategy(
        devices or [f"CPU:{i}" for i in range(layout.replicas)],
        communication=tfdp.Communication(
            engine=layout.engine,
            hierarchy=layout.hierarchy,
            bucket_bytes=layout.bucket_bytes,
            first_bucket_bytes=min(layout.bucket_bytes, 2**20),
        ),
        shard=layout.shard,
        # Even the smallest variable is cut; some shards are then empty.
        shard_min_bytes=0,
        pad_batches=layout.pad_batches,
        draws_per_replica=layout.draws_per_replica,
    )


def make_model(program):
    """The compiled model; call it in the scope."""
    keras.utils.set_random_seed(program.data.seed + 3)
    keras.config.set_dtype_policy(program.policy)
    try:
        model = _compiled(program)
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def _compiled(program):
    inputs, results = _tensors(program)
    model = train_steps.make_model(program, inputs, results)
    several = len(program.outputs) > 1
    losses = [outputs.make_loss(output) for output in program.outputs]
    weights = [output.loss_weight for output in program.outputs]
    model.compile(
        make_optimizer(program.optimizer),
        losses if several else losses[0],
        loss_weights=None
        if weights == [None] * len(weights)
        else [1.0 if weight is None else weight for weight in weights],
        metrics=_metrics(program, "metrics"),
        weighted_metrics=_metrics(program, "weighted_metrics"),
        jit_compile=program.jit,
        run_eagerly=program.eagerly,
        steps_per_execution=program.steps_per_execution,
    )
    return model


def _metrics(program, field):
    found = [
        [outputs.make_metric(output, name) for name in getattr(output, field)]
        for output in program.outputs
    ]
    if not any(found):
        return None
    return found if len(found) > 1 else found[0]


def _tensors(program):
    inputs, vectors, sequence = [], [], None
    for branch in program.branches:
        made, embed = INPUTS[branch.kind].make()
        inputs.append(made)
        x = embed(made)
        for name in branch.layers:
            x = LAYERS[name].make()(x)
            if len(x.shape) == 3:
                sequence = x if len(inputs) == 1 else sequence
        if INPUTS[branch.kind].gives == "sequence" and len(inputs) == 1:
            sequence = embed(made) if sequence is None else sequence
        vectors.append(x)
    x = _joined(program, vectors)
    for name in program.trunk:
        x = LAYERS[name].make()(x)
    results = [
        outputs.predictions(output)(sequence if output.per_step else x)
        for output in program.outputs
    ]
    # One input or output stands by itself, as people write it.
    return inputs if len(inputs) > 1 else inputs[0], (
        results if len(results) > 1 else results[0]
    )


def _joined(program, vectors):
    if len(vectors) == 1:
        return vectors[0]
    if program.join == "add":
        return keras.layers.Add()([keras.layers.Dense(WIDTH)(v) for v in vectors])
    return keras.layers.Concatenate()(vectors)


class Rows:
    """The arrays of a program: lists of one array per input, output and weight."""

    def __init__(self, program, rows, seed):
        rng = np.random.default_rng([program.data.seed, seed])
        self._branches = program.branches
        self.x = [INPUTS[b.kind].draw(rng, rows) for b in program.branches]
        self.y = [outputs.targets(o, rng, rows) for o in program.outputs]
        self.weights = None
        if program.data.weighting in ("sample_weight", "zero_weights"):
            self.weights = [
                self._weights(program, output, rng, rows) for output in program.outputs
            ]

    @staticmethod
    def _weights(program, output, rng, rows):
        shape = (rows, TIMES) if _weighs_steps(output) else (rows,)
        weights = rng.uniform(0.1, 2.0, size=shape).astype("float32")
        if program.data.weighting == "zero_weights":
            # Whole rows, so that a replica may have none that counts.
            weights[rng.uniform(size=rows) < 0.4] = 0.0
        return weights

    def changed(self, order, nudge):
        """The same rows in another `order`, inputs moved by `nudge`."""
        other = object.__new__(Rows)
        other._branches = self._branches
        other.x = [_nudged(array[order], nudge) for array in self.x]
        other.y = [array[order] for array in self.y]
        other.weights = self.weights and [array[order] for array in self.weights]
        return other

    def arrays(self, first=None, last=None):
        """(x, y, weights) as Keras takes them, of the rows from first to last."""
        cut = slice(first, last)
        x, y, weights = (
            arrays and [array[cut] for array in arrays]
            for arrays in (self.x, self.y, self.weights)
        )
        if first is not None:
            x = [self._trimmed(place, array) for place, array in enumerate(x)]
        return _single(x), _single(y), weights and _single(weights)

    def _trimmed(self, place, array):
        """A batch of ragged rows, as long as the longest."""
        if not INPUTS[self._branches[place].kind].is_ragged:
            return array
        return array[:, : max(1, (array != 0).sum(axis=1).max())]


def _weighs_steps(output):
    return output.per_step and not outputs.needs_time_steps(output.loss)


def _single(arrays):
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _nudged(array, nudge):
    # Whole numbers stay: they stand for words, or for what is masked.
    if array.dtype.kind != "f":
        return array
    return np.where(array == np.round(array), array, nudge(array)).astype(array.dtype)


def as_dataset(batches):
    """A `tf.data.Dataset` of `batches`: (x, y) or (x, y, weights), of any size."""
    trimmed = [batch if batch[2] is not None else batch[:2] for batch in batches]
    signature = tf.nest.map_structure(
        lambda *arrays: tf.TensorSpec(_shape_of(arrays), arrays[0].dtype), *trimmed
    )
    return tf.data.Dataset.from_generator(
        lambda: iter(trimmed), output_signature=signature
    )


def _shape_of(arrays):
    """The common shape of a batch: None where batches differ, and for the rows."""
    sizes = zip(*(array.shape for array in arrays), strict=True)
    whole = [size[0] if len(set(size)) == 1 else None for size in sizes]
    return (None, *whole[1:])


class Batches(keras.utils.PyDataset):
    """A Python generator of batches that can begin again."""

    def __init__(self, batches):
        super().__init__()
        self.batches = [b if b[2] is not None else b[:2] for b in batches]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, place):
        return self.batches[place]
