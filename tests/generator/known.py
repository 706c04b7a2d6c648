"""What the draw leaves out for now, and which refusals are documented.

`KNOWN` are faults that are written down and not mended yet: taking a line out switches
what it leaves out on again. `UNDECIDED` are programs whose answer on one device is
decided by roundings that the bounds do not hold, or by chance. `REFUSED` are tfdp's
typed errors and the programs that they are documented for: the same error elsewhere is
a finding.
"""

from tests.generator.layers import ADDS_LOSS
from tests.generator.optimizers import UNSHARDABLE
from tests.generator.outputs import LOSSES
from tests.generator.program import layer_names
from tests.support.conformance_losses import PER_SAMPLE


def _uses(program, names):
    return any(name in names for name in layer_names(program))


def _has_masks(program):
    return "masking" in layer_names(program) or any(
        "mask" in branch.kind or "ragged" in branch.kind for branch in program.branches
    )


def _embeds(program):
    return any("word" in branch.kind for branch in program.branches)


# What is wrong: the programs that meet it.
KNOWN = {
    "DistributedOptimizer without a strategy takes all batches of an accumulation for "
    "equally large": lambda p: (
        p.optimizer.accumulate_steps > 1
        and (
            len(set(p.data.sizes)) > 1
            or _has_masks(p)
            or any(o.reduction == "mean_with_sample_weight" for o in p.outputs)
        )
    ),
    "loss_scale_factor with an embedding": lambda p: (
        "loss_scale_factor" in p.optimizer.options and _embeds(p)
    ),
}


def _counts_at_a_threshold(program):
    return any(
        LOSSES[output.loss].targets == "binary"
        and {*output.metrics, *output.weighted_metrics}
        for output in program.outputs
    )


# Why: the programs.
UNDECIDED = {
    "Keras multiplies one loss per sample by one mask value per time step, which fits "
    "by chance where a batch has as many rows as time steps": lambda p: (
        _has_masks(p)
        and any(one.per_step and one.loss in PER_SAMPLE for one in p.outputs)
    ),
    "products of products are so small that predictions are 0.5 to the last bit, which "
    "is what metrics compare them with": lambda p: (
        layer_names(p).count("multiplied") > 1 and _counts_at_a_threshold(p)
    ),
    "Keras' GroupNormalization computes in float32 on float32 inputs, whatever the "
    "policy": lambda p: p.policy == "float64" and "group-norm" in layer_names(p),
}


def _exchanges_within_a_step(program):
    """What `jit_compile=True` is refused for, as the error says."""
    return program.jit and (
        _has_masks(program)
        or any(o.reduction == "mean_with_sample_weight" for o in program.outputs)
        or any("sync-batch-norm" in name for name in layer_names(program))
        or program.layout.shard == 3
        or "train_on_batch" in program.calls
        or program.train_step != "keras"
    )


# What the message holds: the programs that it is documented for.
REFUSED = {
    "cannot update shards": lambda p: (
        p.layout.shard > 0 and p.optimizer.name in UNSHARDABLE
    ),
    # On several hosts.
    "computes the whole batch on one device": lambda p: p.eagerly,
    "inside a function compiled by XLA": _exchanges_within_a_step,
    "is stored in shards": lambda p: p.layout.shard == 3 and (p.jit or p.eagerly),
    "The size of the batches is not known": lambda p: (
        p.layout.pad_batches is True and p.data.source != "arrays"
    ),
    "adds a loss of its own": lambda p: p.layout.pad_batches and _uses(p, ADDS_LOSS),
    "This batch was padded to a fixed size": lambda p: (
        p.layout.pad_batches
        and (
            p.train_step == "local_mean"
            or _uses(p, ("add-loss-sum", "add-loss-local-mean"))
        )
    ),
    "Batches can be filled up when their tensors are dense and of known shape": (
        lambda p: p.layout.pad_batches and any("ragged" in b.kind for b in p.branches)
    ),
    "A loss with reduction='none' was added to another one": lambda p: any(
        o.reduction == "none" for o in p.outputs
    ),
    "takes its loss without": lambda p: (
        p.layout.pad_batches and p.train_step == "local_mean"
    ),
}


def is_known(program, switched_on=()):
    """Whether a written fault stands in the program's way."""
    return any(
        meets(program)
        for name, meets in (KNOWN | UNDECIDED).items()
        if name not in switched_on
    )


def is_documented(program, message):
    """Whether the refusal of `message` is documented for such a program."""
    return any(
        text in message and applies(program) for text, applies in REFUSED.items()
    )
