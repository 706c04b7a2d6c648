"""KerasHub: its tasks, small, by configuration and without preprocessors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np

import tfdp
from benchmarks.downstream.cases import ROWS, Numbers, draw, fit, integers

models = keras_hub.models
LENGTH, WORDS, CLASSES = 12, 50, 3
SMALL = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
HEADS = {"vocabulary_size": WORDS, "num_heads": 2, "dropout": 0.0, **SMALL}
GROUPED = {"vocabulary_size": WORDS, "num_query_heads": 2, "num_key_value_heads": 1}
IMAGES = draw(ROWS, 32, 32, 3)


def _tokens(**more: Any) -> dict[str, np.ndarray]:
    mask = np.ones((ROWS, LENGTH), "int32")
    mask[::3, 7:] = 0
    return {"token_ids": integers(WORDS, ROWS, LENGTH), "padding_mask": mask, **more}


def _compiled(task: keras.Model, metrics: Any = ("accuracy",)) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
    task.compile(adam, loss, weighted_metrics=list(metrics))
    return task


def _causal(task: keras.Model) -> Numbers:
    """Weights of 0 at padding, as the library's preprocessor gives them."""
    x, labels = _tokens(), integers(WORDS, ROWS, LENGTH)
    return fit(_compiled(task), x, labels, sample_weight=x["padding_mask"])


def bert_text_classifier() -> Numbers:
    backbone = models.BertBackbone(max_sequence_length=LENGTH, **HEADS)
    task = models.BertTextClassifier(backbone, num_classes=CLASSES, dropout=0.0)
    x = _tokens(segment_ids=np.zeros((ROWS, LENGTH), "int32"))
    return fit(_compiled(task), x, integers(CLASSES, ROWS))


def roberta_masked_lm() -> Numbers:
    backbone = models.RobertaBackbone(max_sequence_length=LENGTH, **HEADS)
    x = _tokens(mask_positions=np.tile(np.arange(1, 5, dtype="int32"), (ROWS, 1)))
    weights = np.ones((ROWS, 4), "float32")
    weights[1::2, 2:] = 0.0
    labels = integers(WORDS, ROWS, 4)
    task = _compiled(models.RobertaMaskedLM(backbone))
    return fit(task, x, labels, sample_weight=weights)


def gpt2_causal_lm() -> Numbers:
    backbone = models.GPT2Backbone(max_sequence_length=LENGTH, **HEADS)
    return _causal(models.GPT2CausalLM(backbone))


def llama_causal_lm_with_lora() -> Numbers:
    backbone = models.LlamaBackbone(**GROUPED, **SMALL)
    backbone.enable_lora(4)
    return _causal(models.LlamaCausalLM(backbone))


def gemma3_causal_lm() -> Numbers:
    backbone = models.Gemma3Backbone(image_size=16, head_dim=8, **GROUPED, **SMALL)
    return _causal(models.Gemma3CausalLM(None, backbone))


def qwen3_causal_lm() -> Numbers:
    backbone = models.Qwen3Backbone(head_dim=8, **GROUPED, **SMALL)
    return _causal(models.Qwen3CausalLM(backbone))


def mixtral_causal_lm_with_its_router_loss() -> Numbers:
    backbone = models.MixtralBackbone(num_experts=3, **GROUPED, **SMALL)
    return _causal(models.MixtralCausalLM(backbone))


def bart_seq2seq_lm() -> Numbers:
    backbone = models.BartBackbone(max_sequence_length=LENGTH, **HEADS)
    inputs = _tokens()
    x = {f"encoder_{name}": value for name, value in inputs.items()}
    x.update({f"decoder_{name}": value for name, value in inputs.items()})
    task = _compiled(models.BartSeq2SeqLM(backbone))
    weights = inputs["padding_mask"]
    return fit(task, x, integers(WORDS, ROWS, LENGTH), sample_weight=weights)


def vit_image_classifier() -> Numbers:
    backbone = models.ViTBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
    )
    task = models.ViTImageClassifier(backbone, num_classes=CLASSES)
    return fit(_compiled(task), IMAGES, integers(CLASSES, ROWS))


def _resnet() -> keras.Model:
    return models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64, 64],
        stackwise_num_blocks=[1, 1, 1],
        stackwise_num_strides=[1, 2, 2],
        block_type="basic_block",
        image_shape=(32, 32, 3),
    )


def resnet_image_classifier() -> Numbers:
    """Keras' BatchNormalization: of each replica's own rows."""
    task = models.ResNetImageClassifier(_resnet(), num_classes=CLASSES)
    return fit(_compiled(task), IMAGES, integers(CLASSES, ROWS))


def resnet_image_classifier_synchronized() -> Numbers:
    # A Functional of the same layers: the class of the backbone cannot be copied.
    network = _resnet()
    plain = keras.Model(network.input, network.output)
    backbone = tfdp.layers.convert_batch_normalization(plain)
    task = models.ResNetImageClassifier(backbone, num_classes=CLASSES)
    return fit(_compiled(task), IMAGES, integers(CLASSES, ROWS))


def segformer_image_segmenter() -> Numbers:
    encoder = models.MiTBackbone(
        layerwise_depths=[1, 1],
        image_shape=(32, 32, 3),
        hidden_dims=[16, 32],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[8, 4],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
    )
    backbone = models.SegFormerBackbone(encoder, projection_filters=16)
    task = models.SegFormerImageSegmenter(backbone, num_classes=CLASSES)
    return fit(_compiled(task, metrics=()), IMAGES, integers(CLASSES, ROWS, 32, 32, 1))


def _detector(change: Callable[[keras.Model], Any]) -> Numbers:
    """Its loss is divided by the number of boxes found in the batch."""
    encoder = _resnet()
    encoder.trainable = False  # its BatchNormalization keeps the stored statistics
    backbone = models.RetinaNetBackbone(
        image_encoder=encoder,
        min_level=2,
        max_level=3,
        use_p5=False,
        image_shape=(32, 32, 3),
    )
    task = models.RetinaNetObjectDetector(
        backbone,
        num_classes=CLASSES,
        bounding_box_format="yxyx",
    )
    task.compile(
        optimizer=keras.optimizers.SGD(1e-6),
        box_loss=keras.losses.Huber(reduction="sum"),
        classification_loss=keras.losses.BinaryFocalCrossentropy(
            from_logits=True, reduction="sum"
        ),
    )
    change(task)
    corner = np.abs(draw(ROWS, 2, 2)) * 4
    boxes = np.concatenate([corner, corner + 12], -1)
    boxes[::2, 1] = -1.0  # one box in every other image
    classes = integers(CLASSES, ROWS, 2).astype("float32")
    classes[::2, 1] = -1.0
    history = task.fit(
        IMAGES,
        {"boxes": boxes, "labels": classes},
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    return dict(history)


def retinanet_object_detector() -> Numbers:
    return _detector(lambda task: None)


def retinanet_object_detector_on_all_rows() -> Numbers:
    return _detector(tfdp.losses.on_all_rows)


CASES = {
    function.__name__: function
    for function in (
        bert_text_classifier,
        roberta_masked_lm,
        gpt2_causal_lm,
        llama_causal_lm_with_lora,
        gemma3_causal_lm,
        qwen3_causal_lm,
        mixtral_causal_lm_with_its_router_loss,
        bart_seq2seq_lm,
        vit_image_classifier,
        resnet_image_classifier,
        resnet_image_classifier_synchronized,
        segformer_image_segmenter,
        retinanet_object_detector,
        retinanet_object_detector_on_all_rows,
    )
}
