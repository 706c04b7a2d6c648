"""The models with steps that are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras


#: From the input's shape, without the batch, and the number of classes.
Build = Callable[[tuple[int, ...], int], Any]


@dataclasses.dataclass(frozen=True)
class BenchmarkModel:
    """A model to train on synthetic images or token sequences.

    Args:
      build: makes the Keras model, not yet compiled.
      words: vocabulary size of models on tokens, which are drawn by Zipf's law so that
        some repeat within a batch; 0: images.
      momentum: of the optimizer. Without it an update touches only a batch's rows of a
        table, with it the whole table.
      steps_per_execution: steps in one call of the training function.
      calls: of the training function, for one figure.
    """

    build: Build
    input_shape: tuple[int, ...]
    classes: int = 10
    words: int = 0
    momentum: float = 0.9
    steps_per_execution: int = 1
    calls: int = 4


def _mlp(width: int) -> Build:
    def build(input_shape: tuple[int, ...], classes: int) -> keras.Model:
        from keras import Input, Sequential, layers

        hidden = [layers.Dense(width, activation="relu") for _ in range(2)]
        return Sequential([Input(input_shape), *hidden, layers.Dense(classes)])

    return build


def _cnn(filters: int, width: int) -> Build:
    def build(input_shape: tuple[int, ...], classes: int) -> keras.Model:
        from keras import Input, Sequential, layers

        images = Input(input_shape)
        found = [layers.Conv2D(n, 3, activation="relu") for n in (filters, 2 * filters)]
        found += [layers.MaxPooling2D(), layers.Flatten()]
        found += [layers.Dense(width, activation="relu"), layers.Dense(classes)]
        return Sequential([images, *found])

    return build


def _words(words: int, width: int) -> Build:
    def build(input_shape: tuple[int, ...], classes: int) -> keras.Model:
        from keras import Input, Sequential, layers

        tokens = Input(input_shape, dtype="int32")
        hidden = [layers.Embedding(words, width), layers.GlobalAveragePooling1D()]
        return Sequential([tokens, *hidden, layers.Dense(classes)])

    return build


def _transformer(words: int, width: int, heads: int, depth: int) -> Build:
    """Vaswani et al. 2017's encoder, normalized first, without positions."""

    def build(input_shape: tuple[int, ...], classes: int) -> keras.Model:
        from keras import Input, Model, layers

        tokens = Input(input_shape, dtype="int32")
        x = layers.Embedding(words, width)(tokens)
        for _ in range(depth):
            inner = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(heads, width // heads)(inner, inner)
            inner = layers.LayerNormalization()(x)
            inner = layers.Dense(4 * width, activation="gelu")(inner)
            x = x + layers.Dense(width)(inner)
        x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
        return Model(tokens, layers.Dense(classes)(x))

    return build


def _resnet(blocks: int, filters: int) -> Build:
    """He et al. 2016, section 4.2: three stages of blocks of two 3 x 3 convolutions."""

    def build(input_shape: tuple[int, ...], classes: int) -> keras.Model:
        from keras import Input, Model, layers

        def convolution(x: Any, width: int, strides: int, size: int = 3) -> Any:
            x = layers.Conv2D(width, size, strides, padding="same", use_bias=False)(x)
            return layers.BatchNormalization()(x)

        images = Input(input_shape)
        x = layers.ReLU()(convolution(images, filters, 1))
        for stage in range(3):
            width = filters << stage
            for block in range(blocks):
                strides = 2 if stage and not block else 1
                y = layers.ReLU()(convolution(x, width, strides))
                y = convolution(y, width, 1)
                if strides > 1:
                    x = convolution(x, width, strides, size=1)
                x = layers.ReLU()(layers.Add()([x, y]))
        x = layers.GlobalAveragePooling2D()(x)
        return Model(images, layers.Dense(classes)(x))

    return build


MODELS = {
    # 784 x 4096 + 4096 x 4096 + 4096 x 10 weights and their biases: 20,037,642.
    "mlp-20m": BenchmarkModel(_mlp(4096), (784,)),
    "mlp-tiny": BenchmarkModel(_mlp(16), (8,)),
    # 32 and 64 filters of 3 x 3, then 9216 x 128: 1,199,882 with biases.
    "cnn-1m": BenchmarkModel(_cnn(32, 128), (28, 28, 1), calls=8),
    # ResNet-20 for images of 32 x 32: 272,474 weights with those of shortcuts.
    "resnet20": BenchmarkModel(_resnet(3, 16), (32, 32, 3)),
    "resnet-tiny": BenchmarkModel(_resnet(1, 2), (8, 8, 3), calls=8),
    "cnn-tiny": BenchmarkModel(_cnn(2, 4), (8, 8, 1), calls=8),
    # 200,000 words of 64 numbers each, and 64 x 10: 12,800,650. A batch of 64 texts of
    # 320 words has as many rows as one of 1,024 texts of 20.
    "words-13m": BenchmarkModel(
        _words(200_000, 64), (320,), words=200_000, momentum=0.0, calls=8
    ),
    # 8,000 words of 128 numbers, two blocks of 198,272, 256 and 128 x 10: 1,422,090.
    "transformer-1m": BenchmarkModel(
        _transformer(8_000, 128, heads=4, depth=2), (32,), words=8_000
    ),
    "transformer-tiny": BenchmarkModel(
        _transformer(900, 8, heads=2, depth=1), (4,), words=900
    ),
    "words-tiny": BenchmarkModel(
        _words(900, 8), (4,), words=900, momentum=0.0, calls=8
    ),
}


LOCAL_BATCH = 64
BATCHES_IN_MEMORY = 8
SEED = 1
# Word n occurs proportionally to n to the minus this: 1.0 to 1.2 in texts.
ZIPF_EXPONENT = 1.2


def make_images(
    model: BenchmarkModel, global_batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of all global batches, the same for every arm."""
    random = np.random.default_rng(SEED)
    count = BATCHES_IN_MEMORY * global_batch
    if model.words:
        # Draw uniformly what exceeds the vocabulary.
        words = random.zipf(ZIPF_EXPONENT, (count, *model.input_shape)) - 1
        beyond = words >= model.words
        words[beyond] = random.integers(model.words, size=np.count_nonzero(beyond))
        images: np.ndarray = words.astype(np.int32)
    else:
        images = random.standard_normal((count, *model.input_shape), dtype=np.float32)
    labels = random.integers(model.classes, size=count, dtype=np.int32)
    return images, labels
