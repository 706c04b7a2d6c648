"""Times the training steps of several arms in one process."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from benchmarks.bench.models import MODELS
from benchmarks.bench.one_process.arms import ARMS, OPEN_BATCH_ARMS
from benchmarks.bench.request import Request
from benchmarks.bench.results import ArmResult, CaseResult
from tfdp.errors import CollectiveError
from tfdp.tools.measuring.in_turn import time_in_turn
from tfdp.tools.measuring.models import LOCAL_BATCH
from tfdp.tools.measuring.steps import TimedStep, make_step


def measure_training(request: Request, devices: list[str]) -> CaseResult:
    """Runs a "train" or "execution" case in this process, with one replica per device.

    Raises CollectiveError if an arm's loss is not finite.
    """
    model = MODELS[request.subject_name]
    arms = {
        arm: make_step(ARMS[arm](devices), model, arm in OPEN_BATCH_ARMS)
        for arm in request.arm_names
    }
    losses = {arm: warm_up(arm, arms[arm], request) for arm in arms}
    seconds = time_in_turn(
        {arm: arms[arm].step for arm in arms},
        repeats=request.repeats,
        calls=request.calls,
        finish=tf.test.experimental.sync_devices,
    )
    return request.result(
        describe_training(next(iter(arms.values())), request),
        {
            arm: ArmResult(
                seconds=tuple(seconds[arm]),
                items_per_call=arms[arm].global_batch,
                facts={"loss_after_warm_up": losses[arm]},
            )
            for arm in arms
        },
    )


def describe_training(training: TimedStep, request: Request) -> dict[str, Any]:
    """The trained network's name and sizes, for reports."""
    parameters = sum(math.prod(w.shape) for w in training.network.trainable_weights)
    name, local_batch = request.subject_name, LOCAL_BATCH
    return {"name": name, "parameters": parameters, "local_batch": local_batch}


def warm_up(arm: str, training: TimedStep, request: Request) -> float:
    """Trains some untimed steps; returns the loss, CollectiveError if not finite."""
    loss = training.warm_up(request.warmup_calls)
    if not math.isfinite(loss):
        raise CollectiveError(
            f"Arm {arm!r} is not timed: its loss after the warm-up is {loss}."
        )
    return loss
