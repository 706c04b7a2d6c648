"""The models whose first step is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

__all__ = ["CLASSES", "MODELS", "WORDS", "that_stops"]

CLASSES, WORDS = 10, 1000


def _resnet50() -> keras.Model:
    from keras import applications

    return applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=CLASSES)


def _transformer(layers: int, width: int, heads: int) -> Callable[[], keras.Model]:
    """Vaswani et al. 2017, section 3.1, with the norms before, as most train it now."""

    def build() -> keras.Model:
        import keras
        from keras.layers import Dense, LayerNormalization, MultiHeadAttention

        words = keras.Input((16,), dtype="int32")
        x: Any = keras.layers.Embedding(WORDS, width)(words)
        for _ in range(layers):
            y = LayerNormalization()(x)
            x = keras.layers.add([x, MultiHeadAttention(heads, width // heads)(y, y)])
            y = Dense(4 * width, "gelu")(LayerNormalization()(x))
            x = keras.layers.add([x, Dense(width)(y)])
        x = keras.layers.GlobalAveragePooling1D()(x)
        return keras.Model(words, Dense(CLASSES, activation="softmax")(x))

    return build


#: What makes a model, not yet compiled: of images, or of words.
MODELS: dict[str, Callable[[], keras.Model]] = {
    "resnet50": _resnet50,  # for images of 32 x 32
    "transformer-12": _transformer(12, 256, 8),
    "transformer-tiny": _transformer(2, 16, 2),
}


def that_stops(model: keras.Model) -> keras.Model:
    """`model`, of which a step fails before anything of it is computed."""
    import keras
    import tensorflow as tf

    class StopsHere(keras.layers.Layer):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            # Not known while the graph is built; never so.
            is_odd = tf.reduce_any(tf.not_equal(inputs, inputs))
            with tf.control_dependencies([tf.debugging.Assert(is_odd, ["stops"])]):
                return tf.identity(inputs)

    first = model.inputs[0]
    inputs = keras.Input(first.shape[1:], dtype=first.dtype)
    return keras.Model(inputs, model(StopsHere()(inputs)))
