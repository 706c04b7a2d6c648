"""The known causes of a difference between N replicas and one device.

A cause applies if the model fits (`where`) and an experiment confirms it (`change`, of
`tfdp.tools.testing.changes`): with the change to both sides, the comparison holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfdp.tools.testing.facts import CauseFacts
from tfdp.tools.testing.report import HIDDEN_BY_DRAWS, HIDDEN_BY_ROUNDING, LOST_SUMS


@dataclasses.dataclass(frozen=True)
class Cause:
    """One known cause; texts may contain the names of facts, such as `{replicas}`."""

    name: str  # the same in every version
    where: Callable[[CauseFacts], tuple[str, ...] | None]  # None: it does not apply
    why: str
    instead: str  # what to write instead
    change: str | None = None  # the experiment; None: facts suffice
    evidence: str = ""  # what the experiment shows


def _hand_written(facts: CauseFacts) -> tuple[str, ...]:
    step = (f"{facts.train_step}.train_step",) if facts.train_step else ()
    return step + tuple(f"loss {name}" for name in facts.loss_functions)


def _weighted_means(facts: CauseFacts) -> tuple[str, ...] | None:
    weights = ("sample_weight",) if facts.sample_weights else ()
    return facts.masking_layers + weights or None


TOO_LITTLE_MOVEMENT = Cause(
    name=HIDDEN_BY_ROUNDING,
    where=lambda facts: (
        None if facts.moved_enough or facts.synchronized_batch_norms else ()
    ),
    why="Rounding alone moves the weights about as far as training does. Either steps "
    "are tiny, or two trainings on one device differ as well: random numbers not from "
    "keras.random.SeedGenerator (tf.random), or a result that depends on the order of "
    "rows in a batch.",
    instead="Check with a larger learning rate or more steps; use keras.random with a "
    "SeedGenerator.",
)

# Causes that facts show, without another training.
FROM_FACTS = (
    Cause(
        name="training diverges",
        where=lambda facts: None if facts.finite_on_one_device else (),
        why="Weights already become infinite or NaN on one device.",
        instead="Lower the learning rate, or check the data for values that are not "
        "finite.",
    ),
    Cause(
        name=HIDDEN_BY_DRAWS,
        where=lambda facts: facts.drawing_layers or None,
        why="A layer draws different random numbers on {replicas} replicas than on one "
        "device, by design: each replica draws for its own rows.",
        instead="Leave out random_layers='keep' (--keep-random-layers): the check then "
        "disables Keras' dropout, noise and augmentation, and other draws of "
        "keras.random are the same for each row. What keeps its state by itself, such "
        "as a tf.random.Generator, has to be a part of the batch.",
    ),
    Cause(
        name="overflow on one replica",
        where=lambda facts: (
            () if facts.half_precision and not facts.finite_on_replicas else None
        ),
        why="With float16 a gradient may overflow on one replica only. TensorFlow's "
        "strategies check replica 0 before the reduction, and apply the infinite sum.",
        instead="Train under tfdp.DataParallelStrategy, which checks the reduced "
        "gradients; or use mixed_bfloat16, which needs no loss scaling.",
    ),
    TOO_LITTLE_MOVEMENT,
)

IN_HALF_PRECISION = Cause(
    name=LOST_SUMS,
    where=lambda facts: None,  # from a comparison with float32
    why="The gradients of these weights are sums over the rows of a batch that "
    "TensorFlow adds in half precision: in bfloat16 such a sum stops at 256 equal "
    "terms, in float16 at 2,048. On CPUs the kernel of a bias' gradient (BiasAddGrad) "
    "does. More replicas, with fewer rows each, lose less.",
    instead="Compute layers with a bias in float32 (dtype='float32'), or use fewer "
    "rows per batch, or GPUs, on which kernels add in float32.",
    evidence="moves as it should when the model computes in float32",
)

# Each has its own change, which does not affect the others.
SEPARABLE = (
    Cause(
        name="uneven batches",
        where=lambda facts: facts.uneven_batches or None,
        why="{replicas} replicas cannot share the rows of a batch evenly: a replica "
        "with few rows counts as much as one with many, so its rows weigh too much.",
        instead="Make every global batch a multiple of {replicas} rows "
        "(dataset.batch(n, drop_remainder=True)), or train under "
        "tfdp.DataParallelStrategy, which weights each replica by its rows; in your "
        "own train_step take the gradient of tfdp.losses.local_mean(loss).",
        change="even_batches",
        evidence="holds when every batch is cut to a multiple of {replicas} rows",
    ),
    Cause(
        name="clipping before the reduction",
        where=lambda facts: facts.clipping or None,
        why="Each replica clips its own part of the gradient before the reduction, "
        "which bounds neither the norm nor the values of the sum.",
        instead="Train under tfdp.DataParallelStrategy, which clips the reduced "
        "gradient; in your own loop wrap the optimizer in tfdp.DistributedOptimizer.",
        change="no_clipping",
        evidence="holds without clipping",
    ),
    Cause(
        name="batch normalization per replica",
        where=lambda facts: facts.local_batch_norms or None,
        why="The layer normalizes with the mean and variance of its replica's rows, "
        "not of the global batch.",
        instead="Use tfdp.layers.SyncBatchNormalization, or "
        "tfdp.layers.convert_batch_normalization(model). A replica has "
        "{rows_of_replica} rows of these batches: from about 32 on the difference is "
        "usually harmless, and intended.",
        change="freeze_batch_norm",
        evidence="holds with these layers frozen",
    ),
    Cause(
        name="cancellation in synchronized batch normalization",
        where=lambda facts: facts.synchronized_batch_norms or None,
        why="With synchronized=True Keras computes the variance as E[x^2] - E[x]^2, "
        "which cancels when the mean is much larger than the deviation. So does one "
        "device: neither result is right.",
        instead="Use tfdp.layers.SyncBatchNormalization, which merges means and "
        "squared deviations, or normalize the input first.",
        change="freeze_synchronized_batch_norm",
        evidence="holds with these layers frozen",
    ),
)

# No experiment takes lines out of a step: its analysis says so.
CHANGED_GRADIENTS = Cause(
    name="gradients changed in the step",
    where=lambda facts: (
        _hand_written(facts)[: bool(facts.train_step)]
        if facts.gradient_change
        else None
    ),
    why="{gradient_change}.",
    instead="{gradient_advice}.",
    evidence="the analysis of the step (LocalMeanWarning)",
)

_MEANS_OF_MEANS = Cause(
    name="means of means",
    where=_weighted_means,
    why="Masks or weights give each replica another denominator: the mean of the "
    "replicas' means is not the mean over all unmasked or weighted rows.",
    instead="Train under tfdp.DataParallelStrategy, which uses the global denominator "
    "for Keras' losses. Elsewhere, and in your own train_step: sum the losses, and "
    "divide by the sum of weights over all replicas (tfdp.losses.all_sum).",
    change="same_rows",
    evidence="holds when every replica gets the same rows",
)
_SUM_OF_MEANS = Cause(
    name="sum of local means",
    where=_hand_written,
    why="The gradients of the {replicas} replicas are added. The loss is the mean over "
    "a replica's own rows, not divided by {replicas}, so every update is {replicas} "
    "times too large.",
    instead="Return one loss per row from a loss function and let Keras average; in "
    "your own train_step take the gradient of tfdp.losses.local_mean(loss), or of "
    "loss / strategy.num_replicas_in_sync.",
    change="sgd_divided",
    evidence="holds with plain SGD when the replicas' rate is divided by {replicas}",
)
_DIVIDED_TWICE = Cause(
    name="divided by the replicas twice",
    where=_hand_written,
    why="Every update is {replicas} times too small: the loss is divided twice by the "
    "global batch or the number of replicas.",
    instead="Divide once. Keras' losses divide themselves; under "
    "tfdp.DataParallelStrategy mark a loss that is already divided with "
    "tfdp.losses.local_sum(loss).",
    change="sgd_multiplied",
    evidence="holds with plain SGD when the replicas' rate is multiplied by {replicas}",
)
_OPTIMIZER = Cause(
    name="the optimizer",
    where=lambda facts: (facts.optimizer,),
    why="The gradients agree, but not the update. An optimizer that uses the gradient "
    "before the reduction (clipping, noise, custom statistics) gets a different one on "
    "each replica; one that divides by its magnitude (such as Adam) can also amplify "
    "the rounding of gradients near zero.",
    instead="Use the reduced gradient, in update_step. If only rounding grows: a "
    "larger epsilon, and the check with SGD.",
    change="sgd",
    evidence="holds with plain SGD",
)
_COUPLED_ROWS = Cause(
    name="rows of a batch depend on each other",
    where=lambda facts: (),
    why="A layer or a loss computes a mean, a maximum or another statistic over a "
    "replica's rows (in-batch negatives, a mask, a weight), not the global batch's. Or "
    "values of tfdp.losses.all_rows meet labels that number a replica's own rows.",
    instead="Compute losses and metrics on the rows of all replicas "
    "(tfdp.losses.on_all_rows(model)), and such a layer, too "
    "(tfdp.layers.AllRows(layer)). In your own train_step gather first: loss = "
    "tfdp.losses.local_mean(loss_of(tfdp.losses.all_rows(outputs))), or sum a number "
    "(tfdp.losses.all_sum); labels of a replica's rows are tfdp.losses.own_rows(labels "
    "of all, x). Or accept statistics per replica.",
    change="same_rows",
    evidence="holds when every replica gets the same rows",
)
# A sum with a constant (the smoothing of a Dice loss) differs for equal rows, too.
_LOSS_OF_ALL_ROWS = dataclasses.replace(
    _COUPLED_ROWS,
    change="all_rows",
    evidence="holds with losses on the rows of all replicas "
    "(tfdp.losses.on_all_rows(model))",
)

# Tried in this order, on top of the separable changes that apply.
COMBINATIONS: tuple[tuple[Cause, ...], ...] = (
    (_MEANS_OF_MEANS,),
    (_SUM_OF_MEANS,),
    (_DIVIDED_TWICE,),
    (_OPTIMIZER,),
    (_COUPLED_ROWS,),
    (_LOSS_OF_ALL_ROWS,),
    (_SUM_OF_MEANS, _MEANS_OF_MEANS),
    (_SUM_OF_MEANS, _COUPLED_ROWS),
)

# The analysis of the step sees what no experiment shows: a sum with a constant.
TOLD = Cause(
    name="told by a warning",
    where=lambda facts: () if facts.told else None,
    why="No experiment explains the difference, but a LocalMeanWarning says: {told}.",
    instead="{told_instead}",
)

UNKNOWN = Cause(
    name="unknown",
    where=lambda facts: (),
    why="No known cause explains the difference: it remains with even batches, with "
    "equal rows on every replica, and with plain SGD.",
    instead="Start from the variable with the largest ratio: look for state, "
    "collectives or arithmetic on the batch size in its layer. Halve the model until "
    "the check holds.",
)
