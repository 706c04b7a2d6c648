"""The timed work of one of several processes: a reduction, or a training step."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.bench.gradient_sets import GRADIENT_SETS, describe_set
from benchmarks.bench.models import MODELS
from benchmarks.bench.one_process.sum_check import check_sum
from benchmarks.bench.one_process.training import describe_training, warm_up
from benchmarks.bench.processes.arms import (
    NO_EXCHANGE,
    STOCK_MULTI_WORKER,
    Place,
    Work,
    own_rows,
)
from benchmarks.bench.request import Request
from tfdp.tools.measuring.models import (
    LOCAL_BATCH,
    BenchmarkModel,
    make_images,
)
from tfdp.tools.measuring.steps import (
    TimedStep,
    build_network,
    make_step,
)
from tfdp.tools.measuring.sums import (
    make_gradient,
    make_gradients,
    make_reduction,
)

SumOf = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def prepare_reduction(
    request: Request,
    arm: str,
    strategy: tf.distribute.Strategy,
    place: Place,
    sum_of: SumOf | None = None,
    coarseness: float = 0.0,
) -> Work:
    """A reduction whose sums are correct on this worker, and its facts.

    `sum_of`: as in `make_reduction`; `coarseness`: as in `check_sum`, which may raise.
    """
    shapes = GRADIENT_SETS[request.subject_name]()
    devices = strategy.extended.worker_devices
    first = place.rank * len(devices)
    gradients = {
        first + local: make_gradients(shapes, first + local, device)
        for local, device in enumerate(devices)
    }
    sums = make_reduction(strategy, gradients, sum_of=sum_of)()
    for index, on_replicas in enumerate(sums):
        parts = [
            make_gradient(shapes[index], rank, index).numpy()
            for rank in range(place.workers * len(devices))
        ]
        check_sum(arm, index, parts, on_replicas, coarseness)
    del sums
    reduction = make_reduction(strategy, gradients, read=True, sum_of=sum_of)
    for _ in range(request.warmup_calls):
        reduction()

    def call() -> list[np.ndarray]:
        return [value.numpy() for on_replicas in reduction() for value in on_replicas]

    return call, {
        "items_per_call": 1,
        "facts": {"sums_checked": len(shapes)},
        "subject": describe_set(request.subject_name, shapes),
    }


def prepare_training(
    request: Request, arm: str, strategy: tf.distribute.Strategy, place: Place
) -> Work:
    """A warmed-up training step, and its facts; CollectiveError if loss not finite."""
    model = MODELS[request.subject_name]
    if arm == STOCK_MULTI_WORKER:
        training = make_hand_written_arm(strategy, model, place)
    else:
        training = make_step(strategy, model)
    warm_up(arm, training, request)
    models = place.workers if arm == NO_EXCHANGE else 1
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts: dict[str, Any] = {
        "weight_norm_after_warm_up": _norm(training.network),
        "peak_bytes": peak_bytes,
    }
    return lambda: float(training.step()), {
        "items_per_call": models * training.global_batch,
        "facts": facts,
        "subject": describe_training(training, request),
    }


def make_hand_written_arm(
    strategy: tf.distribute.Strategy, model: BenchmarkModel, place: Place
) -> TimedStep:
    """The same training without Keras' `fit`, which stock strategies cannot run here.

    It does less: no metrics, no loss over all workers, and each worker gets its own
    rows of the global batches.
    """
    replicas = strategy.num_replicas_in_sync
    network = build_network(strategy, model)
    loss_function = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum"
    )

    def in_replica(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, network(images, training=True))
            loss = loss / (LOCAL_BATCH * replicas)
        weights = network.trainable_variables
        network.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function
    def step(batches: Any) -> tf.Tensor:
        # The own loss, without another exchange.
        return strategy.run(in_replica, args=next(batches))

    mine = tuple(
        own_rows(array, place.rank, place.workers)
        for array in make_images(model, LOCAL_BATCH * replicas)
    )
    dataset = tf.data.Dataset.from_tensor_slices(mine)
    dataset = dataset.batch(LOCAL_BATCH, drop_remainder=True)
    dataset = dataset.cache().repeat().prefetch(2)
    batches = iter(strategy.distribute_datasets_from_function(lambda _: dataset))
    return TimedStep(
        step=lambda: strategy.experimental_local_results(step(batches))[0],
        global_batch=LOCAL_BATCH * replicas,
        network=network,
    )


def _norm(network: keras.Model) -> float:
    squares = [np.sum(np.square(w.numpy(), dtype=np.float64)) for w in network.weights]
    return math.sqrt(math.fsum(squares))
