"""The table of benchmark cases. Adding a case is adding a row."""

from __future__ import annotations

import dataclasses

__all__ = ["CASES", "DEFAULT_SUITES", "SUITES", "Case", "Link", "select_cases"]

STOCK_DEFAULT = "stock-default"
REDUCTION_ARMS = (
    STOCK_DEFAULT,
    "stock-hierarchical-copy",
    "stock-one-device",
    "tfdp",
)
TWO_LEVEL_ARMS = ("tfdp-sockets-flat", "tfdp-sockets", "torch-gloo-flat")
OVERLAP_ARMS = (
    "tfdp-sockets-no-overlap",
    "tfdp-sockets",
    "tfdp-sockets-small-buckets",
    "tfdp-sockets-bfloat16",
    "torch-gloo",
)
COMPRESSED_SUM_ARMS = ("tfdp-sockets", "tfdp-sockets-bfloat16", "tfdp-sockets-int8")
COMPRESSED_TRAINING_ARMS = (
    *COMPRESSED_SUM_ARMS,
    "tfdp-sockets-sign",
    "tfdp-sockets-top-k",
    "tfdp-sockets-power-sgd",
    "torch-gloo",
    "torch-gloo-float16",
    "torch-gloo-power-sgd",
)
EPOCH_ARMS = ("one-device", STOCK_DEFAULT, "tfdp")
TRAINING_ARMS = ("one-device", STOCK_DEFAULT, "tfdp", "tfdp-open-batch")


@dataclasses.dataclass(frozen=True)
class Link:
    """Two hosts, joined by a link of limited rate.

    Args:
      rate: each way, in the words of `tc`.
      work: "allreduce" or "train", as the suites of these names.
      devices_per_host: replicas of each.
    """

    rate: str
    work: str
    devices_per_host: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure, for several arms.

    Args:
      name: what `--case` takes.
      suite: "allreduce" times reductions of a list of gradients, "train" times
        training steps, "execution" calls of several, "epoch" whole epochs of `fit`,
        "network" either of the first two over a link of limited rate.
      subject: a key of `gradient_sets.GRADIENT_SETS` or `models.MODELS`.
      quick_subject: the small one that `--quick` takes instead.
      arms: keys of `arms.ARMS`, in the order of the table; with a link, of
        `processes.arms.GROUP_ARMS`.
      calls: reductions, training steps or fits per arm and repeat.
      description: one line for `--list`.
      link: what joins the hosts, for cases that make some.
    """

    name: str
    suite: str
    subject: str
    quick_subject: str
    arms: tuple[str, ...]
    calls: int
    description: str
    link: Link | None = None

    @property
    def work(self) -> str:
        """What is timed: "allreduce", "train", "execution" or "epoch"."""
        return self.link.work if self.link else self.suite


_ROWS: tuple[Case, ...] = (
    Case(
        name="allreduce-resnet50",
        suite="allreduce",
        subject="resnet50",
        quick_subject="tiny",
        arms=REDUCTION_ARMS,
        calls=2,
        description="sum of ResNet-50's gradients: 214 tensors, 102 MB a replica",
    ),
    Case(
        name="allreduce-bert-base",
        suite="allreduce",
        subject="bert-base",
        quick_subject="tiny",
        arms=REDUCTION_ARMS,
        calls=1,
        description="sum of BERT-base's gradients: 199 tensors, 438 MB a replica",
    ),
    Case(
        name="train-mlp",
        suite="train",
        subject="mlp-20m",
        quick_subject="mlp-tiny",
        arms=TRAINING_ARMS,
        calls=4,
        description="training of a dense network of 20M parameters, batch 64 a replica",
    ),
    Case(
        name="train-cnn",
        suite="train",
        subject="cnn-1m",
        quick_subject="cnn-tiny",
        arms=TRAINING_ARMS,
        calls=8,
        description="training of a small CNN of 1.2M parameters, batch 64 a replica",
    ),
    Case(
        name="train-words",
        suite="train",
        subject="words-13m",
        quick_subject="words-tiny",
        arms=TRAINING_ARMS,
        calls=8,
        description="training of a table of 200,000 words, 20,480 of them a replica",
    ),
    Case(
        name="train-tiny",
        suite="train",
        subject="mlp-tiny",
        quick_subject="mlp-tiny",
        arms=TRAINING_ARMS,
        calls=100,
        description="training of 586 parameters: what a strategy adds to each step",
    ),
    Case(
        name="train-tiny-in-tens",
        suite="execution",
        subject="mlp-tiny-in-tens",
        quick_subject="mlp-tiny-in-tens",
        # The default of a stock strategy fails there (Keras issue 19246).
        arms=("one-device", "stock-one-device", "tfdp"),
        calls=10,
        description="the same with steps_per_execution=10",
    ),
    Case(
        name="epoch-tiny",
        suite="epoch",
        subject="mlp-tiny",
        quick_subject="mlp-tiny",
        arms=EPOCH_ARMS,
        calls=1,
        description="4 epochs of 10 steps of a tiny dense network by Keras' fit",
    ),
    Case(
        name="network-allreduce-100mbit",
        suite="network",
        subject="cnn-1m",
        quick_subject="tiny",
        arms=TWO_LEVEL_ARMS,
        calls=1,
        description="sum of a CNN's gradients, 4.8 MB, over a link of 100 Mbit/s",
        link=Link("100mbit", "allreduce", devices_per_host=2),
    ),
    Case(
        name="network-allreduce-1gbit",
        suite="network",
        subject="resnet50",
        quick_subject="tiny",
        arms=TWO_LEVEL_ARMS,
        calls=1,
        description="sum of ResNet-50's gradients, 102 MB, over a link of 1 Gbit/s",
        link=Link("1gbit", "allreduce", devices_per_host=2),
    ),
    Case(
        name="network-train-cnn-1gbit",
        suite="network",
        subject="cnn-1m",
        quick_subject="cnn-tiny",
        arms=OVERLAP_ARMS,
        calls=8,
        description="training of the small CNN over 1 Gbit/s, with overlap and without",
        link=Link("1gbit", "train", devices_per_host=1),
    ),
    Case(
        name="network-train-mlp-1gbit",
        suite="network",
        subject="mlp-20m",
        quick_subject="mlp-tiny",
        arms=OVERLAP_ARMS,
        calls=2,
        description="training of the dense network over 1 Gbit/s, the same way",
        link=Link("1gbit", "train", devices_per_host=1),
    ),
    Case(
        name="network-train-words-1gbit",
        suite="network",
        subject="words-13m",
        quick_subject="words-tiny",
        arms=("tfdp-sockets", "tfdp-sockets-bfloat16"),
        calls=4,
        description="training of the table of words over 1 Gbit/s, two replicas a host",
        link=Link("1gbit", "train", devices_per_host=2),
    ),
    Case(
        name="network-compressed-sums-1gbit",
        suite="network",
        subject="resnet50",
        quick_subject="tiny",
        arms=COMPRESSED_SUM_ARMS,
        calls=1,
        description="sum of ResNet-50's gradients over 1 Gbit/s, in 32, 16 and 8 bits",
        link=Link("1gbit", "allreduce", devices_per_host=2),
    ),
    Case(
        name="network-compressed-mlp-1gbit",
        suite="network",
        subject="mlp-20m",
        quick_subject="mlp-tiny",
        arms=COMPRESSED_TRAINING_ARMS,
        calls=2,
        description="training of the dense network over 1 Gbit/s, compressed",
        link=Link("1gbit", "train", devices_per_host=1),
    ),
)

CASES = {case.name: case for case in _ROWS}
SUITES = tuple(dict.fromkeys(case.suite for case in _ROWS))
# By name only: networks, which need root, epochs and executions.
DEFAULT_SUITES = ("allreduce", "train")


def select_cases(
    suite: str | None = None, names: list[str] | None = None
) -> list[Case]:
    """The cases of a suite (None: of the default ones), or those that `names` lists.

    >>> [case.name for case in select_cases("train")]
    ['train-mlp', 'train-cnn', 'train-words', 'train-tiny']
    """
    return [
        case
        for case in _ROWS
        if (not names or case.name in names)
        and (case.suite == suite if suite else names or case.suite in DEFAULT_SUITES)
    ]
