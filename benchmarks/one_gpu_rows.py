"""What the groups of `one_gpu.py` share: rows, devices, models.

`python -m benchmarks.one_gpu_rows versions DIR` is the group of the versions.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

_device = ""


def emit(
    name: str, state: str, seconds: float, figures: Mapping[str, Any], said: str = ""
) -> None:
    """Hands one row to `one_gpu.py`."""
    row = {
        "row": name,
        "state": state,
        "seconds": round(seconds, 1),
        "figures": dict(figures),
        "said": said,
        "device": _device,
    }
    print("ROW " + json.dumps(row, default=float), flush=True)


def row(name: str, function: Callable[..., Mapping[str, Any]], *arguments: Any) -> Any:
    """One row: the figures that `function` returns, or how it failed, then None."""
    start = time.perf_counter()
    try:
        figures = function(*arguments)
    except Exception as error:  # the next row may work
        traceback.print_exc()
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        emit(name, "RAISED", time.perf_counter() - start, {}, said)
        return None
    emit(name, "ok", time.perf_counter() - start, figures)
    return figures


def devices(count: int, memory_mb: int = 0) -> tuple[list[str], bool]:
    """So many logical GPUs of the card, or logical CPUs; and whether they are GPUs.

    Args:
      count: 1 takes the card as it is.
      memory_mb: of each logical GPU.
    """
    global _device
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    _device = "GPU" if gpus else "CPU"
    if not gpus:
        import tfdp

        return tfdp.use_virtual_devices(count), False
    if count > 1:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=memory_mb)
        tf.config.set_logical_device_configuration(gpus[0], [limit] * count)
    return [f"GPU:{index}" for index in range(count)], True


def wait_for_turn() -> None:
    """Says that all is ready, and waits until nothing runs beside this process."""
    if _device:
        import tensorflow as tf

        # The device has started, too.
        tf.reduce_sum(tf.ones([8])).numpy()
        tf.test.experimental.sync_devices()
    print("READY", flush=True)
    sys.stdin.readline()


def run_group(groups: Mapping[str, Callable[[pathlib.Path], None]]) -> None:
    """Runs the group that the command line names."""
    name, folder = sys.argv[1:3]
    groups[name](pathlib.Path(folder))


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The trainable weights of Keras' ResNet-50: 214 tensors, 25,583,592 numbers."""

    def convolution(size: int, inputs: int, filters: int) -> list[tuple[int, ...]]:
        # Kernel and bias, and the scale and offset of the batch normalization.
        return [(size, size, inputs, filters), *[(filters,)] * 3]

    shapes, inputs = convolution(7, 3, 64), 64
    for filters, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            if not block:
                shapes += convolution(1, inputs, 4 * filters)
            shapes += convolution(1, inputs, filters)
            shapes += convolution(3, filters, filters)
            shapes += convolution(1, filters, 4 * filters)
            inputs = 4 * filters
    return [*shapes, (2048, 1000), (1000,)]


def resnet50(real: bool, jit_compile: bool = False) -> Any:
    """ResNet-50 for bytes of 224 x 224 x 3, compiled; a small one in a rehearsal."""
    import keras

    side, classes = (224, 1000) if real else (16, 10)
    images = keras.Input((side, side, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    if real:
        x = keras.applications.ResNet50(
            weights=None, classifier_activation=None, classes=classes
        )(x)
    else:
        for strides in (1, 2):
            x = keras.layers.Conv2D(8, 3, strides)(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(x))
    logits = keras.layers.Activation("linear", dtype="float32")(x)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    return _compiled(keras.Model(images, logits), optimizer, jit_compile)


def bert(real: bool, jit_compile: bool = False) -> Any:
    """BERT-base (Devlin et al. 2018) with two classes; small in a rehearsal."""
    if real:
        return encoder(12, 768, 12, 128, 30522, jit_compile=jit_compile)
    return encoder(2, 32, 2, 16, 100, jit_compile=jit_compile)


def encoder(
    depth: int,
    width: int,
    heads: int,
    length: int,
    words: int,
    *,
    dropout: float = 0.1,
    jit_compile: bool = False,
) -> Any:
    """A transformer encoder whose first place is classified, compiled."""
    import keras
    from keras import layers

    tokens = keras.Input((length,), dtype="int32")
    places = keras.ops.arange(length)
    x = layers.Embedding(words, width)(tokens) + layers.Embedding(length, width)(places)
    x = layers.Dropout(dropout)(layers.LayerNormalization(epsilon=1e-12)(x))
    for _ in range(depth):
        y = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)(x, x)
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dropout(dropout)(y))
        y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dropout(dropout)(y))
    x = layers.Dense(width, activation="tanh")(x[:, 0])
    logits = layers.Dense(2, dtype="float32")(layers.Dropout(dropout)(x))
    model = keras.Model(tokens, logits)
    return _compiled(model, keras.optimizers.AdamW(2e-5), jit_compile)


def small_network(real: bool, jit_compile: bool = False) -> Any:
    """Three dense layers: a step is all launches."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(10),
        ]
    )
    return _compiled(model, keras.optimizers.SGD(0.01, momentum=0.9), jit_compile)


def _compiled(model: Any, optimizer: Any, jit_compile: bool) -> Any:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def _loaded_cudnn() -> str:
    try:
        return str(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
    except (OSError, AttributeError):
        return "not found by its name, libcudnn.so.9"


def versions(folder: pathlib.Path) -> None:
    """TensorFlow, Keras, CUDA, cuDNN, and the card as TensorFlow sees it."""
    import keras
    import numpy
    import tensorflow as tf

    import tfdp

    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    built = tf.sysconfig.get_build_info()
    figures = {
        "GPU": details.get("device_name", "a GPU") if gpus else "",
        "compute capability": str(details.get("compute_capability", "none")),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": numpy.__version__,
        "tfdp": tfdp.__version__,
        "CUDA of TensorFlow": str(built.get("cuda_version", "none")),
        "cuDNN of TensorFlow": str(built.get("cudnn_version", "none")),
        "cuDNN here": _loaded_cudnn() if gpus else "none",
    }
    emit("", "ok", 0.0, figures)


if __name__ == "__main__":
    run_group({"versions": versions})
