"""Trains small backbones of KerasHub on a mesh of 2 x 2, beside Keras on JAX.

The program is the same in both and calls `keras.distribution.set_distribution`: on
TensorFlow it trains by `tfdp.obey_keras_distribution()`. Llama and Gemma come with maps
of their own (`get_layout_map`); the others get rules for heads, hidden layers and, with
words, the vocabulary. All start from the same weights, by the names of these. Rows of
words that occur several times are added up before the update in both; dropout is off.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import zlib
from typing import Any

from benchmarks.shared import in_a_line, make_parser, run_script, write_report
from tfdp.errors import DeviceError
from tfdp.tools.processes.children import ProcessFailed, ask_child

ROWS, LENGTH, VOCABULARY, CLASSES = 8, 6, 32, 10
WIDTHS = {"num_layers": 2, "hidden_dim": 16}
HEADS = {"num_query_heads": 4, "num_key_value_heads": 2, "intermediate_dim": 32}
PLAIN = {"num_heads": 4, "dropout": 0.0, "max_sequence_length": LENGTH}
BACKBONES: dict[str, dict[str, Any]] = {
    "Llama": {"vocabulary_size": VOCABULARY, **HEADS},
    "Gemma": {"vocabulary_size": VOCABULARY, "head_dim": 4, **HEADS},
    "GPT2": {"vocabulary_size": VOCABULARY, "intermediate_dim": 32, **PLAIN},
    "Bert": {"vocabulary_size": VOCABULARY, "intermediate_dim": 32, **PLAIN},
    "ViT": {"image_shape": (16, 16, 3), "patch_size": 4, "mlp_dim": 32, "num_heads": 4},
}
# For backbones without a map of their own.
RULES: dict[str, tuple[str | None, ...]] = {
    ".*(self_attention_layer|self_attention|mha)/(query|key|value)/kernel": (
        *(None, "model", None),
    ),
    ".*(self_attention_layer|self_attention|mha)/attention_output/kernel": (
        *("model", None, None),
    ),
    ".*(feedforward_intermediate_dense|dense_1)/kernel": (None, "model"),
    ".*(feedforward_output_dense|dense_2)/kernel": ("model", None),
    "token_embedding/embeddings": ("model", None),
}


def layout_of(kind: Any, mesh: Any, words: bool) -> Any:
    """The map that the backbone comes with, or `RULES`."""
    import keras

    if hasattr(kind, "get_layout_map"):
        return kind.get_layout_map(mesh)
    layout = keras.distribution.LayoutMap(mesh)
    for rule, axes in RULES.items():
        if words or not rule.startswith("token"):
            layout[rule] = axes
    return layout


def data_of(words: bool, rows: int) -> tuple[Any, Any]:
    """Inputs and labels: the label of a word, or of an image, drawn from one seed."""
    import numpy as np

    generator = np.random.default_rng(0)
    if not words:
        images = generator.normal(size=(rows, 16, 16, 3)).astype("float32")
        return {"images": images}, generator.integers(0, CLASSES, rows)
    ids = generator.integers(0, VOCABULARY, (rows, LENGTH)).astype("int32")
    mask = np.ones_like(ids)
    mask[:, LENGTH - 2 :][generator.random((rows, 2)) < 0.3] = 0
    x = {"token_ids": ids, "padding_mask": mask, "segment_ids": ids % 2}
    return x, (3 * ids + 1) % VOCABULARY


def train(name: str, steps: int) -> dict[str, Any]:
    """The loss of each step, and the weights after the last one by their paths."""
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax  # noqa: F401 (before Keras, as a script of JAX does)
    else:
        import tfdp

        tfdp.use_virtual_devices(4)
        tfdp.obey_keras_distribution()
    import keras
    import keras_hub
    import numpy as np

    kind, words = getattr(keras_hub.models, f"{name}Backbone"), name != "ViT"
    devices = keras.distribution.list_devices("cpu")
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
    layout = layout_of(kind, mesh, words)
    parallel = keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch"
    )
    keras.distribution.set_distribution(parallel)
    backbone = kind(**WIDTHS, **BACKBONES[name])
    hidden = backbone.output
    if isinstance(hidden, dict):
        hidden = hidden["sequence_output"]
    if words:
        outputs = backbone.token_embedding(hidden, reverse=True)
    else:
        outputs = keras.layers.Dense(CLASSES, name="head")(hidden[:, 0])
    model = keras.Model(backbone.inputs, outputs)
    for weight in model.weights:
        if "float" in weight.dtype:
            generator = np.random.default_rng(zlib.crc32(weight.path.encode()))
            drawn = 0.1 * generator.normal(size=weight.shape)
            about = 1.0 if weight.path.endswith(("scale", "gamma")) else 0.0
            weight.assign((about + drawn).astype("float32"))
    losses: list[float] = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(float(logs["loss"]))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # A large epsilon: a gradient of rounding only would move a weight by a whole rate.
    model.compile(keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=1.0), loss)
    x, y = data_of(words, ROWS * steps)
    x = {one.name: x[one.name] for one in backbone.inputs}
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[Losses()], **options)
    after = {
        one.path: np.ravel(keras.ops.convert_to_numpy(one)).tolist()
        for one in model.trainable_weights
    }
    return {"losses": losses, "weights": after}


def run(options: argparse.Namespace) -> int:
    """Trains each backbone in both, and prints how far they are from each other."""
    for package, installed in (("jax", "jax"), ("keras_hub", "keras-hub")):
        if importlib.util.find_spec(package) is None:
            raise DeviceError(f"This needs {package}: pip install {installed}.")
    import numpy as np

    rows: list[dict[str, Any]] = []
    steps = 3 if options.quick else 20
    print("backbone: first and last loss on JAX; the most that tfdp is away from it")
    for name in [*BACKBONES] * options.repeats:
        found = []
        for backend in ("jax", "tensorflow"):
            more = {"KERAS_BACKEND": backend, "JAX_NUM_CPU_DEVICES": "4"}
            asked = {"name": name, "steps": steps}
            seconds = options.timeout_seconds
            try:
                found.append(ask_child("benchmarks.backbones", asked, seconds, **more))
            except ProcessFailed as error:
                print(f"{name}, {backend}: {in_a_line(error)}", file=sys.stderr)
                return 1
        theirs, ours = found
        losses = float(np.max(np.abs(np.subtract(ours["losses"], theirs["losses"]))))
        weights = max(
            float(np.max(np.abs(np.subtract(ours["weights"][path], values))))
            for path, values in theirs["weights"].items()
        )
        first, last = theirs["losses"][0], theirs["losses"][-1]
        print(
            f"{name}: {first:.4f}, {last:.4f}; losses {losses:.1e}, weights "
            f"{weights:.1e}",
            flush=True,
        )
        rows.append({"backbone": name, "losses": losses, "weights": weights})
    write_report(options.json, "backbones", rows=rows)
    return 0


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=1)
    run_script(parser, run, lambda asked: train(**asked))
