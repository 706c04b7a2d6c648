"""Classifies graphs: each replica reads batches of whole graphs.

python examples/cookbook/graphs.py
tfdp launch --workers 2 examples/cookbook/graphs.py
"""

import tfdp

tfdp.quiet()

import keras
import numpy as np
import tensorflow as tf

GRAPHS, BATCH = 600, 60  # BATCH: graphs of a global batch, ten in an epoch
KEYS = ("graph", "node", "receiver", "sender")
keras.utils.set_random_seed(1)


def graph(number: int) -> tuple[np.ndarray, int, int]:
    """Edges in both directions, the number of nodes, and 0 for a path, 1 for a star."""
    kind, nodes = number % 2, 4 + number // 2 % 9
    ahead = np.arange(1, nodes)
    edges = np.stack([ahead, 0 * ahead if kind else ahead - 1])
    return np.concatenate([edges, edges[::-1]], axis=1), nodes, kind


def joined(numbers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Some graphs as one: `node` holds the graph of each node, edges index nodes."""
    edges, nodes, kinds = zip(*map(graph, numbers), strict=True)
    first_nodes = np.cumsum([0, *nodes[:-1]])
    moved = [each + first for each, first in zip(edges, first_nodes, strict=True)]
    receiver, sender = np.concatenate(moved, axis=1)
    rows = [numbers, np.repeat(np.arange(len(nodes)), nodes), receiver, sender]
    return dict(zip(KEYS, rows, strict=True)), np.array(kinds)


def batches_of_host(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """One element per replica of this host and step, of equally many graphs each."""
    replicas = context.num_replicas_in_sync
    here = replicas // context.num_input_pipelines
    own = context.input_pipeline_id * here + np.arange(here)
    order = np.random.default_rng(1).permutation(GRAPHS).reshape(-1, BATCH)

    def elements():
        for batch in order:
            for replica in own:
                yield joined(batch[replica::replicas])

    rows = tf.TensorSpec((None,), tf.int64)
    spec = (dict.fromkeys(KEYS, rows), rows)
    return tf.data.Dataset.from_generator(elements, output_signature=spec).repeat()


class Classifier(keras.Model):
    """Two rounds of messages along the edges, then the mean over each graph."""

    def __init__(self):
        super().__init__()
        self.rounds = [keras.layers.Dense(16, "relu") for _ in range(2)]
        self.out = keras.layers.Dense(2)

    def call(self, x):
        count = tf.size(x["node"])
        states = tf.ones((count, 1))
        for layer in self.rounds:
            sent = tf.gather(states, x["sender"])
            received = tf.math.unsorted_segment_sum(sent, x["receiver"], count)
            states = layer(tf.concat([states, received], axis=1))
        graphs = tf.size(x["graph"])
        return self.out(tf.math.unsorted_segment_mean(states, x["node"], graphs))


strategy = tfdp.auto_strategy(cpu_devices=2)
batches = strategy.distribute_datasets_from_function(batches_of_host)
with strategy.scope():
    model = Classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
model.fit(batches, epochs=4, steps_per_epoch=10, shuffle=False, verbose=2)
