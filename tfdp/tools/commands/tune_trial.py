"""One trial of `tfdp tune`: a few steps of the user's model with one setting.

TensorFlow fixes its devices when it starts, so a trial runs in its own processes:
`python -m tfdp.tools.commands.tune_trial`. Rank 0 answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.hosts.link_speed import speed_of_sums
from tfdp.tools.commands.check_target import ScriptRun, load_target, training_a_target
from tfdp.tools.commands.end_of_process import leave
from tfdp.tools.commands.plan_model import load_model, parse_model
from tfdp.tools.processes.children import answer
from tfdp.tools.processes.devices import find_devices
from tfdp.tools.tune.space import Setting, TrialLayout

WARM_UP_STEPS = 3


def _figures(request: dict[str, Any]) -> dict[str, Any] | None:
    """The figures that `Trials.measure` requests; None: not on this rank."""
    from tfdp.strategies.quiet import import_tensorflow_quietly

    import_tensorflow_quietly()
    import keras

    from tfdp import remat

    setting, place = (
        Setting.from_json(request["setting"]),
        TrialLayout(**request["place"]),
    )
    strategy = _strategy(place, setting, request["timeout_seconds"])
    keras.utils.set_random_seed(0)
    with strategy.scope():  # in which a script builds its model when it is run
        build, data = _target(request, place, strategy)
        model = build()
    if setting.remat:
        remat(model)
    _accumulate(model, setting.accumulation_steps)
    own_rows = max(1, place.rows // place.all_replicas)
    together = setting.accumulation_steps
    figures = timed_steps(model, data, place.rows, own_rows, request["steps"], together)
    figures["engine"] = strategy.engine_name
    link = getattr(strategy, "link", None)
    if request["with_facts"] and link is not None:
        figures["link"] = dataclasses.asdict(speed_of_sums(link))
    if place.processes > 1:
        strategy.close()  # else the others take the end of this process for a fault
    return figures if strategy.is_chief else None


def timed_steps(
    model: Any, data: Any, rows: int, own_rows: int, steps: int, together: int = 1
) -> dict[str, Any]:
    """Seconds of `steps` whole batches of `rows` rows, and the model's profile.

    `own_rows`: of a replica; `together`: steps of a whole batch (accumulation).
    """
    import keras

    from tfdp.tools.planning.keras_profile import inputs_of, profile_of

    ends: list[tuple[int, float]] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append((batch, time.perf_counter()))
    )
    count = WARM_UP_STEPS + steps * together
    dataset = _batches(data, model, rows // together)
    model.fit(dataset, steps_per_epoch=count, verbose=0, callbacks=[clock])
    inputs = [x[:own_rows] for x in inputs_of(model, next(iter(dataset)))]
    seconds = _seconds(ends, steps, together)
    return {"seconds": seconds, "profile": profile_of(model, inputs)}


def _strategy(place: TrialLayout, setting: Setting, timeout_seconds: float) -> Any:
    import tfdp

    options: dict[str, Any] = {
        "communication": _communication(setting, timeout_seconds),
        "shard": setting.shard,
    }
    if place.processes > 1:
        options["devices_per_host"] = place.replicas
        return tfdp.MultiHostDataParallelStrategy(**options)
    strategy = tfdp.DataParallelStrategy(find_devices(place.replicas), **options)
    # As under `auto_strategy`: a `sync` between hosts does nothing here.
    strategy.idle_options = {}
    return strategy


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


def _target(
    request: dict[str, Any], place: TrialLayout, strategy: Any
) -> tuple[Callable[[], Any], Any]:
    """The model function, and the data; None for a model of keras.applications."""
    target = parse_model(request["target"], request["arguments"], place.rows)
    if isinstance(target, str):
        return load_model(target, place.rows, place.all_replicas)[0], None
    script_run = ScriptRun(lambda: strategy, place.all_replicas)
    found = load_target(target, script_run)
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
    """Seconds of each of the last `count` whole batches; `ends`: (last step, time)."""
    each: list[float] = []
    for (first, before), (last, after) in itertools.pairwise(ends):
        each += [(after - before) / (last - first)] * (last - first)
    timed = each[-count * together :]
    whole = len(timed) // together * together
    return [sum(timed[n : n + together]) for n in range(0, whole, together)]


if __name__ == "__main__":
    with training_a_target():
        answer(sys.argv[1:], _figures)
    leave(0)
