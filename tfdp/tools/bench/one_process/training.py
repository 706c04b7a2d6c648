"""Times Keras training steps on synthetic data in memory.

The step is Keras' `train_function`, as `fit` calls it, without `fit`'s work per epoch.
Every replica gets its own part of each global batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.tools.bench.one_process.arms import ARMS, OPEN_BATCH_ARMS
from tfdp.tools.bench.one_process.interleave import time_in_turn
from tfdp.tools.bench.request import Request
from tfdp.tools.bench.results import ArmResult, CaseResult
from tfdp.tools.bench.subjects import (
    BATCHES_IN_MEMORY,
    LOCAL_BATCH,
    MODELS,
    SEED,
    BenchmarkModel,
    make_images,
)


@dataclasses.dataclass
class TrainingArm:
    """One strategy with its model and data.

    `step` trains one execution and returns the loss so far; `global_batch`: its images,
    over all replicas.
    """

    step: Callable[[], tf.Tensor]
    global_batch: int
    network: keras.Model

    def subject(self, request: Request) -> dict[str, Any]:
        """The trained network's name and sizes, for reports."""
        parameters = sum(math.prod(w.shape) for w in self.network.trainable_weights)
        name, local_batch = request.subject_name, LOCAL_BATCH
        return {"name": name, "parameters": parameters, "local_batch": local_batch}


def measure_training(request: Request, devices: list[str]) -> CaseResult:
    """Runs a "train" or "execution" case in this process, with one replica per device.

    Raises CollectiveError if an arm's loss is not finite.
    """
    model = MODELS[request.subject_name]
    arms = {
        arm: make_training_arm(ARMS[arm](devices), model, arm in OPEN_BATCH_ARMS)
        for arm in request.arm_names
    }
    losses = {arm: warm_up(arm, arms[arm], request) for arm in arms}
    seconds = time_in_turn(
        {arm: arms[arm].step for arm in arms},
        repeats=request.repeats,
        calls=request.calls,
        finish=tf.test.experimental.sync_devices,
    )
    return CaseResult(
        case=request.case.name,
        suite=request.case.suite,
        devices=len(devices),
        subject=next(iter(arms.values())).subject(request),
        settings=request.settings(),
        arms={
            arm: ArmResult(
                seconds=tuple(seconds[arm]),
                items_per_call=arms[arm].global_batch,
                facts={"loss_after_warm_up": losses[arm]},
            )
            for arm in arms
        },
    )


def make_training_arm(
    strategy: tf.distribute.Strategy, model: BenchmarkModel, open_batch: bool = False
) -> TrainingArm:
    """The model under `strategy`, with weights and data equal for every arm.

    `open_batch`: whether the compiled step takes batches of any length.
    """
    global_batch = LOCAL_BATCH * strategy.num_replicas_in_sync
    network = build_network(strategy, model)
    network.make_train_function()
    images = tf.data.Dataset.from_tensor_slices(make_images(model, global_batch))
    dataset = images.batch(global_batch, drop_remainder=not open_batch)
    dataset = dataset.cache().repeat().prefetch(2)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    return TrainingArm(
        step=lambda: network.train_function(batches)["loss"],
        global_batch=global_batch * model.steps_per_execution,
        network=network,
    )


def build_network(
    strategy: tf.distribute.Strategy, model: BenchmarkModel
) -> keras.Model:
    """The compiled network with its optimizer's slots, equal for every arm."""
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        network = model.build(model.input_shape, model.classes)
        network.compile(
            optimizer=keras.optimizers.SGD(0.01, momentum=model.momentum),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=model.steps_per_execution,
        )
        # As `fit` does: a stock strategy cannot create the slots inside the step.
        network.optimizer.build(network.trainable_variables)
    return network


def warm_up(arm: str, training_arm: TrainingArm, request: Request) -> float:
    """Trains some untimed steps; returns the loss, CollectiveError if not finite."""
    # Once through the data, so that the cache is full before the clock starts.
    for _ in range(max(request.warmup_calls, BATCHES_IN_MEMORY)):
        loss = training_arm.step()
    if not math.isfinite(float(loss)):
        raise CollectiveError(
            f"Arm {arm!r} is not timed: its loss after the warm-up is {float(loss)}."
        )
    return float(loss)
