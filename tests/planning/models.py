"""Models that nobody here wrote: of `keras.applications`, and published transformers.

The transformers are built of Keras' own layers.
"""

import functools

import numpy as np

from tests.planning.hub import HUB_MODELS

# Name -> image size, near the smallest that the network takes; the quickest first.
IMAGES = {
    "VGG16": 64,
    "MobileNet": 96,
    "MobileNetV3Small": 96,
    "ResNet50": 64,
    "MobileNetV2": 96,
    "Xception": 96,
    "ResNet50V2": 64,
    "EfficientNetB0": 64,
    "ConvNeXtTiny": 64,
    "InceptionV3": 96,
    "EfficientNetV2B0": 64,
    "DenseNet121": 64,
    "NASNetMobile": 64,
}
# layers, width, heads, words, tokens. Turc et al. 2019 (arXiv 1908.08962), "BERT-mini"
# and "BERT-small"; Radford et al. 2019, GPT-2's smallest.
TRANSFORMERS = {
    "BERTMini": (4, 256, 4, 30522, 128),
    "BERTSmall": (4, 512, 8, 30522, 128),
    "GPT2Small": (12, 768, 12, 50257, 64),
}
MODELS = ("BERTMini", "BERTSmall", *IMAGES, "BidirectionalLSTM", "GPT2Small")


def make_of(name):
    """A function that makes the compiled model, and another that makes n rows."""
    if name == "BidirectionalLSTM":
        return _recurrent, _reviews
    if name in HUB_MODELS:
        return HUB_MODELS[name]
    if name in IMAGES:
        return functools.partial(_image_model, name), functools.partial(
            _images, IMAGES[name]
        )
    return functools.partial(_transformer, *TRANSFORMERS[name]), functools.partial(
        _tokens, TRANSFORMERS[name][3], TRANSFORMERS[name][4]
    )


def _recurrent():
    """https://keras.io/examples/nlp/bidirectional_lstm_imdb, of 200 words."""
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((200,), dtype="int32"),
            layers.Embedding(20000, 128),
            layers.Bidirectional(layers.LSTM(64, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(64)),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=False)
    return model


def _reviews(rows):
    random = np.random.default_rng(1)
    x = random.integers(0, 20000, (rows, 200), dtype="int32")
    return x, random.integers(0, 2, (rows, 1)).astype("float32")


def _image_model(name):
    import keras

    size = IMAGES[name]
    made = getattr(keras.applications, name)
    model = made(weights=None, input_shape=(size, size, 3), classes=100)
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    return model


def _images(size, rows):
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, size, size, 3)).astype("float32")
    return x, random.integers(0, 100, rows, dtype="int32")


def _transformer(depth, width, heads, words, length):
    import keras
    from keras import layers, ops

    tokens = keras.Input((length,), dtype="int32")
    places = layers.Embedding(length, width)(ops.arange(length))
    x = layers.Embedding(words, width)(tokens) + places
    for _ in range(depth):
        attended = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(
            attended, attended, use_causal_mask=True
        )
        inner = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(inner)
    logits = layers.Dense(words, use_bias=False)(layers.LayerNormalization()(x))
    model = keras.Model(tokens, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    return model


def _tokens(words, length, rows):
    random = np.random.default_rng(1)
    x = random.integers(0, words, (rows, length), dtype="int32")
    return x, np.roll(x, -1, axis=1)
