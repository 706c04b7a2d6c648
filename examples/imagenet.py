"""Trains ResNet-50 on TFRecords of JPEG pictures, with LARS as in MLPerf's recipe.

    python examples/imagenet.py
    python examples/imagenet.py --records IMAGENET --size 224 --batch 8192 --epochs 41
    tfdp launch --workers 2 examples/imagenet.py

`--records` is a folder with ImageNet as most tools write it: files `train-*` and
`validation-*` whose records hold `image/encoded` (a JPEG) and `image/class/label` (from
1). Without it scikit-learn's 1,797 handwritten digits are written in that form, which
shows on a laptop that all of it works.

The recipe is that of the MLPerf reference (docs/optimizers.md): polynomial decay of
power 2 after a linear warm-up, momentum 0.9, weight decay 2e-4 but for biases and batch
normalization, label smoothing 0.1, moving averages with 0.9. Its pictures are cut
otherwise: here the middle of each is taken, and shifted at random by up to an eighth.

A run that was stopped goes on when the same command is given again. Runs unchanged on
a host with GPUs, on a TPU and under every launcher; on a laptop the CPU is split into
`--replicas` devices.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tfdp

tfdp.quiet()  # before Keras: TensorFlow's start-up notes would bury the lines below

import keras
import numpy as np
import tensorflow as tf

from tfdp.tools.report import write_learning_curve

SEED = 7
FEATURES = {
    "image/encoded": tfdp.data.FeatureSpec((), "string"),
    "image/class/label": tfdp.data.FeatureSpec((), "int64"),
}
SMALL_SET_CLASSES, IMAGENET_CLASSES = 10, 1000
SMALL_SET_TEST_SHARE = 0.2
WEIGHT_DECAY, MOMENTUM, LABEL_SMOOTHING = 2e-4, 0.9, 0.1
# The recipe's: global batches below the first number, learning rate, warm-up epochs.
PEAKS = ((16_384, 10.0, 5), (32_768, 25.0, 5), (float("inf"), 31.2, 25))
TRUST_COEFFICIENT = 0.001
# A hundred steps must be larger ones. Biases and the scales of batch normalization
# take the learning rate as it is, hence not that is 20 times as large but the trust
# coefficient.
SMALL_SET_PEAK, SMALL_SET_TRUST = (1.0, 2), 0.02
# The shorter side of a picture, as a multiple of what is cut out of its middle.
MARGIN = 8 / 7
SHIFT = 1 / 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, help="ImageNet's (default: digits)")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=128, help="global batch size")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mixed-precision", action="store_true", help="bfloat16")
    parser.add_argument(
        "--replicas", type=int, default=2, help="devices to split the CPU into"
    )
    parser.add_argument("--out", type=Path, default=Path("out/imagenet"))
    return parser.parse_args()


def write_small_set(directory: Path) -> None:
    """The digits as JPEG files of 64 x 64 pixels, labelled as ImageNet is: from 1."""
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    split = int(len(order) * SMALL_SET_TEST_SHARE)
    for name, chosen in {"validation": order[:split], "train": order[split:]}.items():
        examples = [
            {"image/encoded": jpeg(images[i]), "image/class/label": int(labels[i]) + 1}
            for i in chosen
        ]
        index = tfdp.data.write_tfrecords(
            examples, directory, num_shards=4, name=name, features=FEATURES
        )
        print(f"wrote {index.examples} pictures to {directory}/{name}-*.tfrecord")


def jpeg(digit: np.ndarray) -> bytes:
    picture = digit.reshape(8, 8, 1).repeat(3, axis=2) * (255 / 16)
    picture = tf.image.resize(picture, (64, 64), method="bicubic")
    return tf.io.encode_jpeg(
        tf.cast(tf.clip_by_value(picture, 0, 255), tf.uint8)
    ).numpy()


def prepare_records(records: Path | None, out: Path) -> Path:
    """Where the records are, with an index beside them."""
    if records is None:
        records = out / "records"
        if not (records / "train.index.json").exists():
            write_small_set(records)
        return records
    for name in ("train", "validation"):
        if not (records / f"{name}.index.json").exists():
            # Once: reads all files, counts their records and notes their checksums.
            tfdp.data.index_tfrecords(records / f"{name}-*", FEATURES, name=name)
    return records


def read(records: Path, batch: int, size: int, *, training: bool) -> tf.data.Dataset:
    shorter = round(size * MARGIN)

    def decode(encoded: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        picture = tf.io.decode_jpeg(encoded, channels=3)
        shape = tf.cast(tf.shape(picture)[:2], tf.float32)
        shape = tf.cast(tf.round(shape * shorter / tf.reduce_min(shape)), tf.int32)
        picture = tf.image.resize(picture, shape)
        picture = tf.image.resize_with_crop_or_pad(picture, size, size)
        return tf.cast(tf.clip_by_value(picture, 0, 255), tf.uint8), label - 1

    return tfdp.data.read_tfrecords(
        records / ("train" if training else "validation"),
        batch,
        shuffle=training,
        as_supervised=("image/encoded", "image/class/label"),
        transform=decode,
    ).prefetch(tf.data.AUTOTUNE)


def build_model(size: int, classes: int, *, flip: bool) -> keras.Model:
    resnet = keras.applications.ResNet50(
        weights=None,
        input_shape=(size, size, 3),
        classes=classes,
        classifier_activation=None,
    )
    for layer in resnet.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9
    layers = [
        keras.Input((size, size, 3), dtype="uint8"),
        keras.layers.RandomTranslation(SHIFT, SHIFT, seed=SEED),
        *([keras.layers.RandomFlip("horizontal", seed=SEED)] if flip else []),
        keras.layers.Rescaling(1 / 127.5, offset=-1),
        resnet,
        # Probabilities in float32, whatever the layers before compute in.
        keras.layers.Activation("linear", dtype="float32"),
    ]
    return keras.Sequential(layers)


def make_optimizer(
    batch: int, steps_per_epoch: int, epochs: int, *, is_small: bool
) -> keras.optimizers.Optimizer:
    peak, warmup_epochs = next(row[1:] for row in PEAKS if batch < row[0])
    if is_small:
        peak, warmup_epochs = SMALL_SET_PEAK
    schedule = tfdp.schedules.PolynomialDecay(
        peak,
        total_steps=epochs * steps_per_epoch,
        warmup_steps=min(warmup_epochs, epochs - 1) * steps_per_epoch,
    )
    return tfdp.optimizers.LARS(
        schedule,
        form="mlperf",
        momentum=MOMENTUM,
        trust_coefficient=SMALL_SET_TRUST if is_small else TRUST_COEFFICIENT,
        weight_decay=WEIGHT_DECAY,
    )


def main() -> None:
    arguments = parse_arguments()
    is_small = arguments.records is None
    classes = SMALL_SET_CLASSES if is_small else IMAGENET_CLASSES
    keras.utils.set_random_seed(SEED)
    if arguments.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    strategy = tfdp.auto_strategy(cpu_devices=arguments.replicas)
    if strategy.is_chief:
        prepare_records(arguments.records, arguments.out)
    strategy.barrier("records are written")
    records = arguments.records or arguments.out / "records"
    train = read(records, arguments.batch, arguments.size, training=True)
    test = read(records, arguments.batch, arguments.size, training=False)
    print(
        f"{strategy.num_replicas_in_sync} replicas, global batch {arguments.batch}, "
        f"{len(train)} steps per epoch"
    )
    with strategy.scope():
        model = build_model(arguments.size, classes, flip=not is_small)
        model.compile(
            make_optimizer(
                arguments.batch, len(train), arguments.epochs, is_small=is_small
            ),
            loss=keras.losses.CategoricalCrossentropy(
                from_logits=True, label_smoothing=LABEL_SMOOTHING
            ),
            metrics=["accuracy"],
        )

    def one_hot(batches: tf.data.Dataset) -> tf.data.Dataset:
        return batches.map(
            lambda pictures, label: (pictures, tf.one_hot(label, classes))
        )

    begin = time.perf_counter()
    history = model.fit(
        one_hot(train),
        epochs=arguments.epochs,
        shuffle=False,  # the dataset does it
        validation_data=one_hot(test),
        callbacks=[
            tfdp.callbacks.LearningRateLogger(),
            tfdp.callbacks.Checkpoint(arguments.out / "checkpoints"),
        ],
    )
    if strategy.is_chief:
        picture = write_learning_curve(
            history,
            arguments.out / "learning_curve.png",
            title=f"ResNet-50, LARS, batch {arguments.batch}",
        )
        print(f"learning curve: {picture}")
    print(f"{time.perf_counter() - begin:,.0f} s")
    accuracy = history.history["val_accuracy"][-1]
    print(f"validation accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
