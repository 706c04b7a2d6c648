"""The table of benchmark cases; to add a case, add a row."""

from __future__ import annotations

import dataclasses
from functools import partial

STOCK_DEFAULT = "stock-default"
REDUCTION_ARMS = (STOCK_DEFAULT, "stock-hierarchical-copy", "stock-one-device", "tfdp")
TRAINING_ARMS = ("one-device", STOCK_DEFAULT, "tfdp", "tfdp-open-batch")


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure, for several arms.

    Args:
      suite: "allreduce" times reductions of a list of gradients, "train" training
        steps, "execution" calls of several steps.
      subject: a key of `gradient_sets.GRADIENT_SETS` or `MODELS`.
      quick_subject: the small one of `--quick`.
      arms: keys of `arms.ARMS`, in the order of the table.
      calls: reductions, steps or executions per arm and repeat.
    """

    name: str
    suite: str
    subject: str
    quick_subject: str
    arms: tuple[str, ...]
    calls: int
    description: str


_allreduce = partial(Case, suite="allreduce", quick_subject="tiny", arms=REDUCTION_ARMS)
_train = partial(Case, suite="train", arms=TRAINING_ARMS)
_ROWS: tuple[Case, ...] = (
    _allreduce(
        "allreduce-resnet50",
        subject="resnet50",
        calls=2,
        description="sum of ResNet-50's gradients: 214 tensors, 102 MB a replica",
    ),
    _allreduce(
        "allreduce-bert-base",
        subject="bert-base",
        calls=1,
        description="sum of BERT-base's gradients: 199 tensors, 438 MB a replica",
    ),
    _train(
        "train-mlp",
        subject="mlp-20m",
        quick_subject="mlp-tiny",
        calls=4,
        description="training of a dense network of 20M parameters, batch 64 a replica",
    ),
    _train(
        "train-cnn",
        subject="cnn-1m",
        quick_subject="cnn-tiny",
        calls=8,
        description="training of a small CNN of 1.2M parameters, batch 64 a replica",
    ),
    _train(
        "train-words",
        subject="words-13m",
        quick_subject="words-tiny",
        calls=8,
        description="training of a table of 200,000 words, 20,480 of them a replica",
    ),
    _train(
        "train-tiny",
        subject="mlp-tiny",
        quick_subject="mlp-tiny",
        calls=100,
        description="training of 586 parameters: what a strategy adds to each step",
    ),
    Case(
        "train-tiny-in-tens",
        suite="execution",
        subject="mlp-tiny-in-tens",
        quick_subject="mlp-tiny-in-tens",
        # There a stock strategy fails by default (Keras issue 19246).
        arms=("one-device", "stock-one-device", "tfdp"),
        calls=10,
        description="the same with steps_per_execution=10",
    ),
)

CASES = {case.name: case for case in _ROWS}
SUITES = tuple(dict.fromkeys(case.suite for case in _ROWS))
# Executions run only by name.
DEFAULT_SUITES = ("allreduce", "train")


def select_cases(
    suite: str | None = None, names: list[str] | None = None
) -> list[Case]:
    """The cases of a suite (None: of the default ones), or those in `names`."""
    return [
        case
        for case in _ROWS
        if (not names or case.name in names)
        and (case.suite == suite if suite else names or case.suite in DEFAULT_SUITES)
    ]
