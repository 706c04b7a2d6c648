"""A table by `FeatureSpace`: indexed, crossed and normalized columns."""

import keras
import numpy as np
import tensorflow as tf
from keras.utils import FeatureSpace

rng = np.random.default_rng(0)
COUNT = 256
table = {
    "sex": rng.integers(0, 2, COUNT),
    "pain": rng.integers(0, 4, COUNT),
    "thal": rng.choice(["fixed", "normal", "reversible"], COUNT),
    "age": rng.integers(29, 78, COUNT).astype("float32"),
    "cholesterol": rng.normal(240, 40, COUNT).astype("float32"),
}
ill = (table["pain"] + table["age"] / 30 + rng.normal(size=COUNT) > 3.5).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((table, ill))

feature_space = FeatureSpace(
    features={
        "sex": FeatureSpace.integer_categorical(num_oov_indices=0),
        "pain": FeatureSpace.integer_categorical(),
        "thal": FeatureSpace.string_categorical(num_oov_indices=0),
        "age": FeatureSpace.float_discretized(num_bins=8),
        "cholesterol": FeatureSpace.float_normalized(),
    },
    crosses=[FeatureSpace.cross(feature_names=("sex", "age"), crossing_dim=16)],
    output_mode="concat",
)
feature_space.adapt(dataset.map(lambda x, _: x).batch(32))

train = dataset.take(208).shuffle(208, seed=2).batch(32)
preprocessed = train.map(lambda x, y: (feature_space(x), y), tf.data.AUTOTUNE)
encoded = feature_space.get_encoded_features()
x = keras.layers.Dense(32, activation="relu")(encoded)
x = keras.layers.Dropout(0.5)(x)
model = keras.Model(encoded, keras.layers.Dense(1, activation="sigmoid")(x))
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
model.fit(preprocessed.prefetch(tf.data.AUTOTUNE), epochs=2, verbose=2)
