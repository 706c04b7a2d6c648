"""The known causes of a difference between N replicas and one device: one row each.

A cause is found by what the model is (`where`) and by an experiment (`change`): the
comparison holds once the change is made to both sides. The changes are in
`tfdp.tools.testing.changes`, by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfdp.tools.testing.facts import Facts
from tfdp.tools.testing.report import HIDDEN_BY_ROUNDING


@dataclasses.dataclass(frozen=True)
class Cause:
    """One known cause.

    Args:
      name: short, the same in every version.
      where: the places it concerns; None: it cannot be this one.
      why: what happens; may name any of the facts, as `{replicas}`.
      instead: what to write instead.
      change: the experiment in which the difference goes away; None: facts suffice.
      evidence: what the experiment shows, in words.
    """

    name: str
    where: Callable[[Facts], tuple[str, ...] | None]
    why: str
    instead: str
    change: str | None = None
    evidence: str = ""


def _if_any(names: tuple[str, ...]) -> tuple[str, ...] | None:
    return names or None


def _hand_written(facts: Facts) -> tuple[str, ...]:
    step = (f"{facts.train_step}.train_step",) if facts.train_step else ()
    return step + tuple(f"loss {name}" for name in facts.loss_functions)


def _weighted_means(facts: Facts) -> tuple[str, ...] | None:
    weights = ("sample_weight",) if facts.sample_weights else ()
    return _if_any(facts.masking_layers + weights)


NOTHING_TO_TELL = Cause(
    name=HIDDEN_BY_ROUNDING,
    where=lambda facts: (
        None if facts.moved_enough or facts.synchronized_batch_norms else ()
    ),
    why="Rounding alone moves the weights about as far as training does. Then the "
    "steps are tiny, or two trainings on one device differ as well: numbers drawn "
    "outside of keras.random.SeedGenerator (tf.random), or a result that depends "
    "on the order of rows in a batch.",
    instead="Check with a larger learning rate or more steps; draw with "
    "keras.random and a SeedGenerator.",
)

# Seen without another training.
FROM_FACTS = (
    Cause(
        name="training diverges",
        where=lambda facts: None if facts.finite_on_one_device else (),
        why="Weights become infinite or NaN on one device already, so there is nothing "
        "to compare with.",
        instead="Lower the learning rate, or check the data for values that are not "
        "finite.",
    ),
    Cause(
        name="random layers",
        where=lambda facts: _if_any(facts.drawing_layers),
        why="A layer that draws random numbers draws others on {replicas} replicas "
        "than on one device, by design: each replica has masks for its own rows.",
        instead="Nothing is wrong with the exchange. Leave random_layers='off', which "
        "switches dropout and noise off for the check; leave augmentation layers out "
        "of the model that build() makes for it.",
    ),
    Cause(
        name="overflow on one replica",
        where=lambda facts: (
            () if facts.half_precision and not facts.finite_on_replicas else None
        ),
        why="With float16 a gradient may overflow on one replica only. "
        "TensorFlow's strategies look at replica 0 before the gradients are added, and "
        "apply the infinite sum.",
        instead="tfdp.DataParallelStrategy tests the reduced gradients, on all "
        "replicas alike; or use mixed_bfloat16, which needs no loss scaling.",
    ),
    NOTHING_TO_TELL,
)

# Each with a change of its own, which leaves the others' effects in place.
SEPARABLE = (
    Cause(
        name="uneven batches",
        where=lambda facts: _if_any(facts.uneven_batches),
        why="A batch whose rows {replicas} replicas cannot share evenly: a "
        "replica with few rows counts as much as one with many, so those rows weigh "
        "too much.",
        instead="Make every global batch a multiple of {replicas} rows "
        "(dataset.batch(n, drop_remainder=True)), or train under "
        "tfdp.DataParallelStrategy, which weights each replica by its rows; there, in "
        "a train_step of your own, take the gradient of tfdp.losses.local_mean(loss).",
        change="even_batches",
        evidence="holds when every batch is cut to a multiple of {replicas} rows",
    ),
    Cause(
        name="clipping before the reduction",
        where=lambda facts: _if_any(facts.clipping),
        why="Each replica clips its own part of the gradient, and the clipped parts "
        "are added. The norm of the sum is another one than what was clipped.",
        instead="Train under tfdp.DataParallelStrategy, which clips the reduced "
        "gradient; in a loop of your own wrap the optimizer in "
        "tfdp.DistributedOptimizer.",
        change="no_clipping",
        evidence="holds without clipping",
    ),
    Cause(
        name="batch normalization per replica",
        where=lambda facts: _if_any(facts.local_batch_norms),
        why="The layer normalises with the mean and variance of the rows that its "
        "replica has, and not with those of the global batch.",
        instead="Use tfdp.layers.SyncBatchNormalization, or "
        "tfdp.layers.convert_batch_normalization(model). When a replica has enough "
        "rows (32 or so) the difference is usually harmless, and intended.",
        change="freeze_batch_norm",
        evidence="holds with these layers frozen",
    ),
    Cause(
        name="cancellation in synchronized batch normalization",
        where=lambda facts: _if_any(facts.synchronized_batch_norms),
        why="With synchronized=True Keras computes the variance as E[x^2] - E[x]^2, "
        "which loses all digits when the mean is large against the deviation. One "
        "device does so as well: neither result is right.",
        instead="Use tfdp.layers.SyncBatchNormalization, which merges means and "
        "squared deviations, or normalise the input first.",
        change="freeze_synchronized_batch_norm",
        evidence="holds with these layers frozen",
    ),
)

_MEANS_OF_MEANS = Cause(
    name="means of means",
    where=_weighted_means,
    why="Masks or weights give each replica another denominator: a mean over "
    "the unmasked or weighted rows of one replica, averaged over replicas, is not the "
    "mean over all of them.",
    instead="Train under tfdp.DataParallelStrategy, which brings Keras' losses to the "
    "global denominator. Elsewhere, and in a train_step of your own: sum the losses, "
    "and divide by the sum of weights over all replicas (context.all_reduce).",
    change="same_rows",
    evidence="holds when every replica gets the same rows",
)
_SUM_OF_MEANS = Cause(
    name="sum of local means",
    where=_hand_written,
    why="The gradients of the {replicas} replicas are added. A loss that is the mean "
    "over a replica's own rows, and that nobody divided by {replicas}, makes every "
    "update {replicas} times too large.",
    instead="Return one loss per row from a loss function and let Keras average; in a "
    "train_step of your own take the gradient of tfdp.losses.local_mean(loss), or of "
    "loss / strategy.num_replicas_in_sync.",
    change="sgd_divided",
    evidence="holds with plain SGD when the replicas' rate is divided by {replicas}",
)
_DIVIDED_TWICE = Cause(
    name="divided by the replicas twice",
    where=_hand_written,
    why="Every update is {replicas} times too small: the loss is divided by the global "
    "batch or the number of replicas, and then once more.",
    instead="Divide once. Losses of Keras do it themselves; under "
    "tfdp.DataParallelStrategy state a loss that is divided already with "
    "tfdp.losses.local_sum(loss).",
    change="sgd_multiplied",
    evidence="holds with plain SGD when the replicas' rate is multiplied by {replicas}",
)
_OPTIMIZER = Cause(
    name="the optimizer",
    where=lambda facts: (facts.optimizer,),
    why="The gradients agree, the update made of them does not. An optimizer that "
    "looks at the gradient before it is added up (clipping, noise, statistics in code "
    "of its own) sees another one on each replica; one that divides by its size (Adam "
    "and its kin) can also blow up the rounding of gradients that are nearly zero.",
    instead="Do such work in update_step, which gets the reduced gradient. Where "
    "only rounding grows: a larger epsilon, and the check with SGD.",
    change="sgd",
    evidence="holds with plain SGD",
)
_COUPLED_ROWS = Cause(
    name="rows of a batch depend on each other",
    where=lambda facts: (),
    why="A layer or a loss takes a mean, a maximum or another statistic over "
    "the rows that a replica has (in-batch negatives, a mask, a weight), where one "
    "device takes it over the global batch.",
    instead="Gather or reduce over the replicas at that place "
    "(tf.distribute.get_replica_context().all_reduce or all_gather), or accept "
    "statistics per replica.",
    change="same_rows",
    evidence="holds when every replica gets the same rows",
)

# Tried in this order, on top of the separable changes that apply.
COMBINATIONS: tuple[tuple[Cause, ...], ...] = (
    (_MEANS_OF_MEANS,),
    (_SUM_OF_MEANS,),
    (_DIVIDED_TWICE,),
    (_OPTIMIZER,),
    (_COUPLED_ROWS,),
    (_SUM_OF_MEANS, _MEANS_OF_MEANS),
    (_SUM_OF_MEANS, _COUPLED_ROWS),
)

UNKNOWN = Cause(
    name="unknown",
    where=lambda facts: (),
    why="None of the known causes explains the difference: it stays with even "
    "batches, with the same rows on every replica, and with plain SGD.",
    instead="Start from the variable that is furthest apart: look for state, "
    "collectives or arithmetic on the batch size in the layer that owns it. "
    "Halve the model until the check holds.",
)
