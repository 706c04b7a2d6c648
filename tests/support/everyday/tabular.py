"""A table of numbers and words: adapted preprocessing layers, embeddings, weights."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

rng = np.random.default_rng(0)
COUNT = 300
JOBS = np.array(["clerk", "driver", "nurse", "teacher", "none"])
table = {
    "age": rng.integers(18, 90, COUNT).astype("float32"),
    "income": rng.lognormal(10, 1, COUNT).astype("float32"),
    "job": rng.choice(JOBS, COUNT),
    "city": rng.integers(0, 50, COUNT).astype("int64"),
}
score = table["age"] / 50 + (table["job"] == "nurse") - table["city"] / 25
bought = (score + rng.normal(0, 0.3, COUNT) > 0.2).astype("float32")

inputs = {
    "age": keras.Input((1,), name="age"),
    "income": keras.Input((1,), name="income"),
    "job": keras.Input((1,), name="job", dtype="string"),
    "city": keras.Input((1,), name="city", dtype="int64"),
}
normalize_age = layers.Normalization(axis=None)
normalize_age.adapt(table["age"])
normalize_income = layers.Normalization(axis=None)
normalize_income.adapt(table["income"])
buckets = layers.Discretization(num_bins=6, output_mode="one_hot")
buckets.adapt(table["age"])
lookup = layers.StringLookup()
lookup.adapt(table["job"])
hashing = layers.Hashing(num_bins=16, salt=3)

job = layers.Embedding(lookup.vocabulary_size(), 4)(lookup(inputs["job"]))
city = layers.Embedding(16, 4)(hashing(inputs["city"]))
x = layers.Concatenate()(
    [
        normalize_age(inputs["age"]),
        normalize_income(inputs["income"]),
        buckets(inputs["age"]),
        layers.Flatten()(job),
        layers.Flatten()(city),
    ]
)
x = layers.Dense(32, activation="relu", kernel_regularizer="l2")(x)
x = layers.Dropout(0.3)(x)
outputs = layers.Dense(1, activation="sigmoid")(x)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer="adam",
    loss="binary_crossentropy",
    metrics=["accuracy", keras.metrics.AUC(name="auc")],
)

columns = {name: values[:, None] for name, values in table.items()}
dataset = tf.data.Dataset.from_tensor_slices((columns, bought[:, None]))
train = dataset.take(250).shuffle(250, seed=1).batch(32)
model.fit(
    train,
    validation_data=dataset.skip(250).batch(32),
    class_weight={0: 1.0, 1: 2.5},
    epochs=2,
)
