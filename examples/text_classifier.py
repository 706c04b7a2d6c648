"""Fine-tunes a text classifier of KerasHub with LAMB.

    pip install keras-hub
    python examples/text_classifier.py
    python examples/text_classifier.py --preset bert_tiny_en_uncased --data texts

`--data` is a folder with a folder for each class, with one text in each file. Without
it the texts are the first words of the documentation of what NumPy, Keras and
scikit-learn define, and the classes are the three libraries. `--preset` names weights
that KerasHub fetches, or a folder with them; without it a small BERT starts from
random ones, with a vocabulary of the training texts. Runs unchanged on a host with GPUs
and under every launcher; on a laptop the CPU is split into `--replicas` devices.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
from pathlib import Path

import tfdp

tfdp.quiet()  # before Keras: TensorFlow's start-up notes would bury the lines below

import keras
import numpy as np
import tensorflow as tf

try:
    import keras_hub
except ImportError as error:
    raise SystemExit(
        f"this example needs KerasHub: pip install keras-hub ({error})"
    ) from None

SEED = 7
LIBRARIES = ("numpy", "keras", "sklearn")
WORDS_OF_A_TEXT = 40
LEAST_WORDS = 5
VOCABULARY = 4_000
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEST_SHARE = 0.2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder for each class")
    parser.add_argument("--preset", help="of KerasHub, such as bert_tiny_en_uncased")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128, help="global batch size")
    parser.add_argument("--tokens", type=int, default=64, help="of a text")
    parser.add_argument("--peak-learning-rate", type=float, default=1e-2)
    parser.add_argument(
        "--replicas", type=int, default=2, help="devices to split the CPU into"
    )
    return parser.parse_args()


def read_texts(data: Path | None) -> dict[str, list[str]]:
    """Texts by class, none of them twice."""
    if data is None:
        return {name: documentation_of(name) for name in LIBRARIES}
    found = {
        folder.name: [path.read_text("utf-8", "replace") for path in folder.iterdir()]
        for folder in sorted(data.iterdir())
        if folder.is_dir()
    }
    if len(found) < 2:
        raise SystemExit(f"--data {data} holds no folders of two classes or more")
    return found


def documentation_of(library: str) -> list[str]:
    """The first words of each docstring of a package, without the package's name.

    From its files, none of which is imported for it.
    """
    spec = importlib.util.find_spec(library)
    texts = set()
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.py")):
            if "test" in path.as_posix().removeprefix(folder):
                continue
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                    continue
                words = (ast.get_docstring(node) or "").lower().split()
                if len(words) >= LEAST_WORDS:
                    text = " ".join(words[:WORDS_OF_A_TEXT])
                    texts.add(text.replace(library, ""))
    return sorted(texts)


def split(texts: dict[str, list[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Texts and numbers of their classes: to train on, and to test with."""
    every = [text for of_class in texts.values() for text in of_class]
    labels = np.repeat(np.arange(len(texts)), [len(each) for each in texts.values()])
    order = np.random.default_rng(SEED).permutation(len(every))
    shuffled, labels = np.array(every, dtype=object)[order], labels[order]
    end = int(len(order) * TEST_SHARE)
    return [(shuffled[end:], labels[end:]), (shuffled[:end], labels[:end])]


def read_preset(preset: str, classes: int, tokens: int) -> keras.Model:
    try:
        preprocessor = keras_hub.models.TextClassifierPreprocessor.from_preset(
            preset, sequence_length=tokens
        )
        return keras_hub.models.TextClassifier.from_preset(
            preset, num_classes=classes, preprocessor=preprocessor
        )
    except OSError as error:  # as those of requests, which KerasHub fetches with
        raise SystemExit(
            f"--preset {preset} could not be fetched ({type(error).__name__}: "
            f"{str(error)[:200]}). KerasHub gets presets from kaggle.com or "
            "huggingface.co. Without a network, name a folder that save_to_preset has "
            "written, or leave --preset out."
        ) from None


def build_classifier(
    preset: str | None, texts: np.ndarray, classes: int, tokens: int
) -> keras.Model:
    if preset is not None:
        return read_preset(preset, classes, tokens)
    vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(
        tf.data.Dataset.from_tensor_slices(texts.astype(str)),
        vocabulary_size=VOCABULARY,
        lowercase=True,
        reserved_tokens=SPECIAL_TOKENS,
    )
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
        keras_hub.models.BertTokenizer(vocabulary, lowercase=True),
        sequence_length=tokens,
    )
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(vocabulary),
        num_layers=2,
        num_heads=2,
        hidden_dim=128,
        intermediate_dim=256,
        max_sequence_length=tokens,
    )
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=classes, preprocessor=preprocessor
    )


def main() -> None:
    arguments = parse_arguments()
    keras.utils.set_random_seed(SEED)
    strategy = tfdp.auto_strategy(cpu_devices=arguments.replicas)
    texts = read_texts(arguments.data)
    train, test = split(texts)
    counted = ", ".join(f"{name} {len(each)}" for name, each in texts.items())
    print(f"{len(train[0])} texts to train on; of both parts {counted}")
    steps = -(-len(train[0]) // arguments.batch) * arguments.epochs
    schedule = tfdp.schedules.PolynomialDecay(
        arguments.peak_learning_rate, total_steps=steps, warmup_steps=steps // 10
    )
    with strategy.scope():
        classifier = build_classifier(
            arguments.preset, train[0], len(texts), arguments.tokens
        )
        classifier.compile(
            tfdp.optimizers.LAMB(schedule, weight_decay=0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    print(f"{classifier.count_params():,} weights, {steps} steps")
    batches = tf.data.Dataset.from_tensor_slices((train[0].astype(str), train[1]))
    batches = batches.shuffle(len(train[0]), seed=SEED).batch(arguments.batch)
    held_back = tf.data.Dataset.from_tensor_slices((test[0].astype(str), test[1]))
    held_back = held_back.batch(arguments.batch)
    history = classifier.fit(
        batches,
        epochs=arguments.epochs,
        validation_data=held_back,
        verbose=2,
    )
    largest = max(np.bincount(test[1])) / len(test[1])
    accuracy = history.history["val_accuracy"][-1]
    print(
        f"test accuracy: {accuracy:.4f} (always the most frequent class: {largest:.4f})"
    )


if __name__ == "__main__":
    main()
