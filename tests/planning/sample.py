"""Cases from all over the grid, where the whole of it would take days.

A model has 54 settings: three batches; one replica, or two or four at each of four
stages; with `remat` or without. In a round each model has one of them. The rounds are
for two, four and one replica in turn; the models of a round have the settings of so
many replicas in an order in which stage, batch and `remat` change from one to the next.
So after five rounds each setting was met by some model, and after three each model has
met all numbers of replicas.
"""

import importlib.util
import itertools

from tests.planning.case import Case
from tests.planning.hub import HUB_MODELS

ROWS = (4, 8, 16)
STAGES = range(4)
REPLICAS = (2, 4, 1)
# Settings are gone through in such steps, which have no divisor in common with 24 or 6.
STEP = 7
# Those whose steps are traced soon come first. GPT2Small takes 16 bytes for each of
# 124 million weights on every replica, NASNetMobile minutes to be traced: not here.
MODELS = (
    "HubBERTTiny",
    "VGG16",
    "BERTMini",
    "MobileNet",
    "HubESM2T6",
    "BidirectionalLSTM",
    "HubResNet18",
    "BERTSmall",
    "MobileNetV3Small",
    "MobileNetV2",
    "ResNet50",
    "HubDeiTTiny",
    "ResNet50V2",
    "Xception",
    "EfficientNetB0",
    "InceptionV3",
    "EfficientNetV2B0",
    "ConvNeXtTiny",
    "DenseNet121",
)


def settings(replicas):
    """(rows, stage, remat) for so many replicas, mixed; one has no stages."""
    stages = STAGES if replicas > 1 else (0,)
    found = [
        (rows, stage, remat)
        for remat, rows, stage in itertools.product((False, True), ROWS, stages)
    ]
    return [found[STEP * place % len(found)] for place in range(len(found))]


def sample(rounds):
    """Of each round a case for each model that can be made here.

    >>> cases = list(sample(6))
    >>> len({(c.replicas, c.stage, c.remat, c.local_rows) for c in cases}) > 50
    True
    """
    has_hub = importlib.util.find_spec("keras_hub") is not None
    for number in range(rounds):
        replicas = REPLICAS[number % len(REPLICAS)]
        of_replicas = settings(replicas)
        turn = number * len(MODELS)
        for place, model in enumerate(MODELS):
            if model in HUB_MODELS and not has_hub:
                continue
            rows, stage, remat = of_replicas[(turn + place) % len(of_replicas)]
            yield Case(model, rows, replicas, stage, remat)
