"""One trial of `tfdp tune`: a few steps of the user's model with one setting.

TensorFlow fixes its devices when it starts, so a trial runs in its own processes:
`python -m tfdp.tools.commands.tune_trial ORDERS` (JSON). Rank 0 writes the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.checked_json import write_json
from tfdp.hosts.link_speed import speed_of_sums
from tfdp.tools.commands.check_target import (
    load_target,
    parse_target,
    training_a_target,
)
from tfdp.tools.commands.plan_model import load_model
from tfdp.tools.tune.space import Setting

WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class TrialOrders:
    """Arguments of the processes of a trial."""

    target: str  # as `tfdp check` takes it
    rows: int  # of the global batch
    processes: int
    replicas: int  # of each process
    setting: dict[str, Any]  # as JSON
    steps: int  # that are timed
    timeout_seconds: float  # of exchanges between the processes
    with_facts: bool  # whether to measure the link, too


def main(arguments: list[str]) -> None:
    """Entry point of a process."""
    orders = json.loads(arguments[0])
    path = orders.pop("result_path")
    with training_a_target():
        figures, is_chief = _figures(TrialOrders(**orders))
    if is_chief:
        write_json(path, figures)


def _figures(orders: TrialOrders) -> tuple[dict[str, Any], bool]:
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    import keras

    from tfdp import remat
    from tfdp.tools.planning.keras_profile import inputs_of, profile_of

    setting = Setting.from_json(orders.setting)
    strategy = _strategy(orders, setting)
    build, data = _target(orders)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
    if setting.remat:
        remat(model)
    _accumulate(model, setting.accumulation_steps)
    ends: list[tuple[int, float]] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append((batch, time.perf_counter()))
    )
    together = setting.accumulation_steps
    steps = WARM_UP_STEPS + orders.steps * together
    dataset = _batches(data, model, orders.rows // together)
    model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    batch = next(iter(dataset))
    own_rows = max(1, orders.rows // (orders.processes * orders.replicas))
    figures = {
        "engine": strategy.engine_name,
        "seconds": _seconds(ends, orders.steps, together),
        "profile": profile_of(model, [x[:own_rows] for x in inputs_of(model, batch)]),
    }
    link = getattr(strategy, "link", None)
    if orders.with_facts and link is not None:
        figures["link"] = dataclasses.asdict(speed_of_sums(link))
    return figures, strategy.is_chief


def _strategy(orders: TrialOrders, setting: Setting) -> Any:
    import tensorflow as tf

    import tfdp

    options: dict[str, Any] = {
        "communication": _communication(setting, orders.timeout_seconds),
        "shard": setting.shard,
    }
    if orders.processes > 1:
        options["devices_per_host"] = orders.replicas
        return tfdp.MultiHostDataParallelStrategy(**options)
    if len(tf.config.list_physical_devices("GPU")) >= orders.replicas:
        devices = [f"GPU:{number}" for number in range(orders.replicas)]
    else:
        devices = tfdp.use_virtual_devices(orders.replicas)
    return tfdp.DataParallelStrategy(devices, **options)


def _communication(setting: Setting, timeout_seconds: float) -> Any:
    import tfdp
    from tfdp import compression

    given: dict[str, Any] = {}
    if setting.lossy_argument is not None:
        name, value = setting.lossy_argument
        is_class = name == "compression"
        given[name] = getattr(compression, value)() if is_class else value
    return tfdp.Communication(
        bucket_bytes=setting.bucket_bytes,
        first_bucket_bytes=setting.first_bucket_bytes,
        engine=setting.engine,  # type: ignore[arg-type]
        hierarchy=setting.hierarchy,  # type: ignore[arg-type]
        timeout_seconds=timeout_seconds,
        **given,
    )


def _accumulate(model: Any, steps: int) -> None:
    """Makes the model's optimizer update after every `steps` batches, if possible."""
    if steps == 1:
        return
    optimizer = model.optimizer
    given = getattr(optimizer, "gradient_accumulation_steps", "none")
    if given is not None or optimizer.built:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} cannot accumulate gradients: it "
            f"{'is built already' if optimizer.built else f'has its own {given!r}'}."
        )
    optimizer.gradient_accumulation_steps = steps


def _target(orders: TrialOrders) -> tuple[Callable[[], Any], Any]:
    """The model function, and the data; None for a model of keras.applications."""
    if orders.target.isidentifier():
        return load_model(orders.target, orders.rows)[0], None
    found = load_target(parse_target(orders.target))
    return found.build, found.data


def _batches(data: Any, model: Any, rows: int) -> Any:
    """Repeats the first rows, so that reading is not measured."""
    import numpy as np
    import tensorflow as tf

    from tfdp.tools.testing.batches import collect_batches, row_count, take_rows

    if data is None:
        shape = model.inputs[0].shape[1:]
        images = np.random.default_rng(0).normal(size=(rows, *shape))
        data = (images.astype("float32"), np.zeros(rows, "int32"))
    (batch,) = collect_batches(data, 1, rows)
    count = row_count(batch)
    batch = take_rows(batch, [row % count for row in range(rows)])
    return tf.data.Dataset.from_tensors(batch).repeat()


def _seconds(ends: list[tuple[int, float]], count: int, together: int) -> list[float]:
    """Of each of the last `count` whole batches; `ends`: (last step, time)."""
    each: list[float] = []
    for (first, before), (last, after) in itertools.pairwise(ends):
        each += [(after - before) / (last - first)] * (last - first)
    timed = each[-count * together :]
    whole = len(timed) // together * together
    return [sum(timed[n : n + together]) for n in range(0, whole, together)]


if __name__ == "__main__":
    main(sys.argv[1:])
