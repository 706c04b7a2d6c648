"""The optimizers of a program, and their options, by name."""

import keras

import tfdp
from tests.support.conformance_table import OPTIMIZERS, UNSHARDABLE, WITH_OWNERS

__all__ = ["OPTIMIZERS", "OPTIONS", "UNSHARDABLE", "WITH_OWNERS", "make_optimizer"]

# Each with its group: of a group at most one is drawn.
OPTIONS = {
    "clipvalue": ("clip", {"clipvalue": 0.1}),
    "clipnorm": ("clip", {"clipnorm": 0.2}),
    "global_clipnorm": ("clip", {"global_clipnorm": 0.5}),
    "ema": ("ema", {"use_ema": True, "ema_momentum": 0.5}),
    "ema-overwrite": (
        "ema",
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    ),
    "decay": ("decay", {"weight_decay": 0.05}),
    "accumulation-2": ("accumulation", {"gradient_accumulation_steps": 2}),
    "accumulation-3": ("accumulation", {"gradient_accumulation_steps": 3}),
    # Of the rate: see `make_optimizer`.
    "schedule": ("rate", {}),
    "loss_scale_factor": ("scale", {"loss_scale_factor": 64.0}),
}


def make_optimizer(chosen):
    """The `keras.optimizers.Optimizer` of a program's `Optimizer`."""
    arguments = {}
    for option in chosen.options:
        arguments.update(OPTIONS[option][1])
    optimizer = OPTIMIZERS[chosen.name](**arguments)
    if "schedule" in chosen.options:
        rate = float(optimizer.learning_rate)
        optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(
            rate, decay_steps=1, decay_rate=0.7
        )
    if chosen.wrapper == "distributed":
        return tfdp.DistributedOptimizer(
            optimizer, accumulate_steps=chosen.accumulate_steps
        )
    if chosen.wrapper == "loss_scale":
        return keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=1024.0, dynamic_growth_steps=2
        )
    return optimizer
