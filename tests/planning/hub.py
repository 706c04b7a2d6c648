"""Classifiers of KerasHub 0.32, made as its presets say, without their weights.

KerasHub is no requirement of the tests: these are in the table only where it can be
imported.
"""

import numpy as np

IMAGE_SIZE, WORDS, RESIDUES = 96, 128, 64
CLASSES = 100


def bert_tiny():
    """`bert_tiny_en_uncased`: 2 layers of 128, 4.4 million weights."""
    from keras_hub import models

    backbone = models.BertBackbone(
        vocabulary_size=30522,
        num_layers=2,
        num_heads=2,
        hidden_dim=128,
        intermediate_dim=512,
    )
    return _compiled(models.BertTextClassifier(backbone, num_classes=CLASSES))


def esm_smallest():
    """`esm2_t6_8M`: 6 layers of 320, 7.4 million weights."""
    from keras_hub import models

    backbone = models.ESMBackbone(
        vocabulary_size=33,
        num_layers=6,
        num_heads=20,
        hidden_dim=320,
        intermediate_dim=1280,
        use_pre_layer_norm=True,
    )
    classifier = models.ESMProteinClassifier(backbone, num_classes=CLASSES)
    return _compiled(classifier)


def resnet_18():
    """`resnet_18_imagenet`: 11.2 million weights."""
    from keras_hub import models

    backbone = models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128, 256, 512],
        stackwise_num_blocks=[2, 2, 2, 2],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        image_shape=(IMAGE_SIZE, IMAGE_SIZE, 3),
    )
    return _compiled(models.ResNetImageClassifier(backbone, num_classes=CLASSES))


def deit_tiny():
    """`deit_tiny_distilled_patch16_224_imagenet`: 12 layers of 192, 5.5 million."""
    from keras_hub import models

    backbone = models.DeiTBackbone(
        image_shape=(IMAGE_SIZE, IMAGE_SIZE, 3),
        patch_size=16,
        num_layers=12,
        num_heads=3,
        hidden_dim=192,
        intermediate_dim=768,
    )
    return _compiled(models.DeiTImageClassifier(backbone, num_classes=CLASSES))


def images(rows):
    """Pictures and their classes."""
    random = np.random.default_rng(1)
    shape = (rows, IMAGE_SIZE, IMAGE_SIZE, 3)
    return random.normal(size=shape).astype("float32"), _classes(random, rows)


def words(rows):
    """What BERT reads."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, 30522, (rows, WORDS), dtype="int32")
    whole = np.ones_like(tokens)
    x = {"token_ids": tokens, "segment_ids": 0 * whole, "padding_mask": whole}
    return x, _classes(random, rows)


def residues(rows):
    """What ESM reads."""
    random = np.random.default_rng(1)
    tokens = random.integers(4, 24, (rows, RESIDUES), dtype="int32")
    return {"token_ids": tokens}, _classes(random, rows)


HUB_MODELS = {
    "HubBERTTiny": (bert_tiny, words),
    "HubESM2T6": (esm_smallest, residues),
    "HubResNet18": (resnet_18, images),
    "HubDeiTTiny": (deit_tiny, images),
}


def _classes(random, rows):
    return random.integers(0, CLASSES, rows, dtype="int32")


def _compiled(model):
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    return model
