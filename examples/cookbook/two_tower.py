"""A recommender with two towers; negatives are the items of the whole global batch.

python examples/cookbook/two_tower.py
tfdp launch --workers 2 examples/cookbook/two_tower.py
"""

import tfdp

tfdp.quiet()

import keras
import numpy as np
import tensorflow as tf

USERS, ITEMS, TASTES, CLICKS = 200, 300, 10, 4000
keras.utils.set_random_seed(1)
# User u likes the items whose number has the same rest by TASTES as u.
generator = np.random.default_rng(1)
user_numbers = generator.integers(0, USERS, CLICKS).astype("int32")
items_of_a_taste = generator.integers(0, ITEMS // TASTES, CLICKS).astype("int32")
item_numbers = items_of_a_taste * TASTES + user_numbers % TASTES


def tower(count: int, name: str) -> keras.Model:
    number = keras.Input((), dtype="int32", name=name)
    hidden = keras.layers.Embedding(count, 16)(number)
    vector = keras.layers.Dense(16)(keras.layers.Dense(32, "relu")(hidden))
    return keras.Model(number, keras.layers.UnitNormalization()(vector))


def in_batch_loss(items: tf.Tensor, towers: tf.Tensor) -> tf.Tensor:
    """For each row the cross-entropy of its item among the items of all rows.

    l_i = -log(exp(u_i v_i / t) / sum over j of exp(u_i v_j / t)), t = 0.1, where j runs
    over all rows of the global batch but those with the item of row i once more.
    """
    user_vectors, item_vectors = keras.ops.split(towers, 2, axis=1)
    positions = keras.ops.arange(keras.ops.shape(items)[0])
    scores = keras.ops.matmul(user_vectors, keras.ops.transpose(item_vectors)) / 0.1
    is_same_item = keras.ops.equal(items[:, None], items[None, :])
    is_same_row = keras.ops.equal(positions[:, None], positions[None, :])
    is_repeated = keras.ops.logical_and(is_same_item, ~is_same_row)
    scores = keras.ops.where(is_repeated, -1e9, scores)
    return keras.losses.sparse_categorical_crossentropy(
        positions, scores, from_logits=True
    )


strategy = tfdp.auto_strategy(cpu_devices=2)
with strategy.scope():
    user_tower, item_tower = tower(USERS, "user"), tower(ITEMS, "item")
    both = [*user_tower.inputs, *item_tower.inputs]
    towers = [user_tower.output, item_tower.output]
    model = keras.Model(both, keras.layers.Concatenate()(towers))
    model.compile(keras.optimizers.Adam(0.01), in_batch_loss, jit_compile=False)
# The loss gets the rows of all replicas, as on one device.
tfdp.losses.on_all_rows(model)
model.fit(
    {"user": user_numbers, "item": item_numbers},
    item_numbers,
    batch_size=250,
    epochs=6,
    verbose=2,
)

# A metric of all rows: `predict`, which every worker calls, returns them on each one.
user_vectors = user_tower.predict(np.arange(USERS), batch_size=128, verbose=0)
item_vectors = item_tower.predict(np.arange(ITEMS), batch_size=128, verbose=0)
best = np.argsort(-user_vectors @ item_vectors.T, axis=1)[:, :10]
liked = best % TASTES == np.arange(USERS)[:, None] % TASTES
if strategy.is_chief:
    print(f"of the ten best items {liked.mean():.1%} are liked")
