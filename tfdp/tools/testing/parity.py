"""`check_parity`: N replicas against one device, on the user's model and data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp import DataParallelStrategy
from tfdp.checks import check_one_of, check_whole, is_whole
from tfdp.cluster.machine import notebook_restart_hint
from tfdp.errors import ConfigurationError, DeviceError, ParityError, ScopeError
from tfdp.strategies.devices import find_devices
from tfdp.strategies.in_words import without_fit_message
from tfdp.strategies.unused import note_used
from tfdp.tools.testing.batches import collect_batches, row_count
from tfdp.tools.testing.changes import CHANGES
from tfdp.tools.testing.comparison import compare
from tfdp.tools.testing.crashes import describe_error
from tfdp.tools.testing.diagnosis import diagnose as find_causes
from tfdp.tools.testing.diagnosis import find_lost_sums
from tfdp.tools.testing.report import Finding, ParityReport
from tfdp.tools.testing.trainee import CheckedTraining

FEW_STEPS = (
    "trained for {steps} steps, with the batches repeated: an optimizer accumulates "
    "the gradients of {count} steps for an update"
)
RANDOM_LAYERS = ("off", "keep")
COARSE = (
    "computed in float32 for the check: in half precision rounding explains every "
    "difference, but would also hide a wrong step"
)


def check_parity(
    build: Callable[[], keras.Model],
    data: Any,
    strategy: tf.distribute.Strategy | int | None = None,
    *,
    steps: int = 4,
    batch_size: int = 32,
    seed: int = 0,
    random_layers: str = "off",
    diagnose: bool = True,
    raise_on_failure: bool = False,
) -> ParityReport:
    """Trains a model on one device and on N replicas, and compares every variable.

    Both start from equal weights and train on the same global batches through `fit`.
    For a variable w, with w_1 on one device and w_r on replica r, each step must
    satisfy

        max_r |w_r - w_1| <= 8 spread + 2 t u |w| + 2 sqrt(n) u travel

    The right side is the effect of the order of float32 sums: the spread of one-device
    trainings that differ only by rounding, and the rounding of t updates and of sums
    over n rows (u is the unit round-off, travel the sum of w's changes). On failure the
    report names the known causes, found by experiment. If rounding in half precision
    would hide a wrong step, a second comparison with the layers in float32 decides.

    Args:
      build: creates, compiles and returns a new model. Called inside and outside of the
        strategy's scope, after `keras.utils.set_random_seed(seed)`.
      data: a tuple of arrays (x, y) or (x, y, sample_weight); or a `tf.data.Dataset` or
        another iterable of global batches. Of arrays with more batches than `steps` it
        uses the first ones and the last, perhaps short, one.
      strategy: a strategy of this process; or a number of replicas, at least 2, for a
        `tfdp.DataParallelStrategy` on the first devices; None: on all devices.
      steps: training steps, at least 1.
      batch_size: rows of a global batch, at least 1; for arrays only.
      seed: for `build`, and for the order of rows on one device; 0 or more.
      random_layers: "off" sets the rates of dropout and noise to 0, because they draw
        differently on every replica by design; "keep" leaves them.
      diagnose: find the causes of a failure, by a handful of further comparisons.
      raise_on_failure: raise instead of returning a report that is not `ok`.

    Returns:
      A `ParityReport`: `print` it, or use `ok`, `rows`, `causes`, `to_json()`.

    Raises:
      ConfigurationError: an argument is invalid.
      DeviceError: there are fewer devices than replicas.
      ScopeError: it was called inside a strategy's scope.
      ParityError: `raise_on_failure` is set and the check fails; see its `report`.

    Cost: 5 short trainings, 4 of them on one device; 10 in half precision.

    ```python
    import keras
    import numpy as np
    import tfdp

    tfdp.use_virtual_devices(2)

    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 1))
    report = tfdp.testing.check_parity(build, (x, y), 2, steps=2, batch_size=16)
    print(report)
    if not report.ok:
        raise SystemExit(1)
    ```

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section
    4.2; N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error
    Analysis, 2019. Differs from them: the constants of the model are measured.
    """
    _check_arguments(build, steps, batch_size, seed, random_layers)
    chosen = _choose_strategy(strategy)
    setting = CheckedTraining(
        build=build,
        strategy=chosen,
        batches=collect_batches(data, steps, batch_size),
        seed=seed,
        keep_random_layers=random_layers == "keep",
    )
    report, error = compare_and_report(setting, diagnose)
    if raise_on_failure and not report.ok:
        raise ParityError(str(report), report=report) from error
    return report


def compare_and_report(
    setting: CheckedTraining, diagnose: bool
) -> tuple[ParityReport, Exception | None]:
    """Implements `check_parity`, also for a strategy with one replica.

    Returns the report, and the error of the training under the strategy, if any.
    """
    causes: tuple[Finding, ...] = ()
    notes = []
    note_used()  # the fits on one device are no mistake
    with _float32_products(), without_fit_message():
        comparison = compare(setting)
        if len(setting.batches) < (count := comparison.accumulated_steps):
            batches = itertools.cycle(setting.batches)
            repeated = tuple(itertools.islice(batches, 2 * count))
            setting = dataclasses.replace(setting, batches=repeated)
            notes.append(FEW_STEPS.format(count=count, steps=2 * count))
            comparison = compare(setting)
        if comparison.is_in_half_precision and comparison.error is None:
            in_float32 = CHANGES["compute_in_float32"](setting)
            exact = compare(in_float32)
            causes = find_lost_sums(comparison.lost_movement(exact))
            if comparison.is_too_coarse:
                # Rounding in half precision depends on the processor, unlike the
                # correctness of the replicas' sums.
                notes.append(COARSE)
                setting, comparison = in_float32, exact
        if diagnose and not comparison.ok and not causes:
            causes = find_causes(setting, comparison)
    if comparison.switched_off:
        notes.append(
            "switched off for the check, because each replica draws independently by "
            f"design: {', '.join(comparison.switched_off)}"
        )
    notes += getattr(setting.strategy, "idle_lines", ())
    error = comparison.error
    report = ParityReport(
        model=comparison.model.name,
        strategy=type(setting.strategy).__name__,
        replicas=setting.replicas,
        steps=len(setting.batches),
        batch_rows=tuple(row_count(batch) for batch in setting.batches),
        seed=setting.seed,
        rows=comparison.rows,
        causes=causes,
        notes=tuple(notes),
        loss_one_device=comparison.loss_one_device,
        loss_replicas=comparison.loss_replicas,
        error=None if error is None else describe_error(error),
    )
    return report, error


@contextlib.contextmanager
def _float32_products() -> Iterator[None]:
    """Disables TensorFloat-32, whose 10 bits would hide most errors."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _check_arguments(
    build: Any, steps: Any, batch_size: Any, seed: Any, random_layers: Any
) -> None:
    # Models are callable.
    if not callable(build) or isinstance(build, keras.Model):
        raise ConfigurationError(
            "build must be a function without arguments that creates, compiles and "
            f"returns a model. Received: {type(build).__name__}."
        )
    counts = (("steps", steps, 1), ("batch_size", batch_size, 1), ("seed", seed, 0))
    for name, value, least in counts:
        check_whole(name, value, least)
    check_one_of("random_layers", random_layers, RANDOM_LAYERS)
    if tf.distribute.has_strategy():
        raise ScopeError(
            "check_parity was called inside a strategy's scope. Call it outside: it "
            "calls build() inside and outside of the scope itself."
        )


def _choose_strategy(strategy: Any) -> tf.distribute.Strategy:
    if strategy is None:
        strategy = DataParallelStrategy(alone=True)
    elif is_whole(strategy):
        strategy = _strategy_of(strategy)
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ConfigurationError(
            "strategy must be a tf.distribute.Strategy, a number of replicas or None. "
            f"Received: {strategy!r}."
        )
    replicas = strategy.num_replicas_in_sync
    if replicas < 2:
        raise ConfigurationError(
            "The strategy has only one replica: there is nothing to compare. Call "
            "tfdp.use_virtual_devices(2) before TensorFlow starts, or add devices."
        )
    if len(strategy.extended.worker_devices) != replicas:
        raise ConfigurationError(
            f"{type(strategy).__name__} spans several processes. Check the model on "
            f"one host, with {replicas} virtual devices."
        )
    return strategy


def _strategy_of(replicas: int) -> DataParallelStrategy:
    if replicas < 2:
        raise ConfigurationError(
            "strategy as a number of replicas must be at least 2. "
            f"Received: {replicas}."
        )
    devices = find_devices()
    if len(devices) < replicas:
        devices = tuple(device.name for device in tf.config.list_logical_devices("CPU"))
    if len(devices) < replicas:
        raise DeviceError(
            f"{replicas} replicas need as many devices, and there are {len(devices)}. "
            f"Call tfdp.use_virtual_devices({replicas}) before TensorFlow starts."
            f"{notebook_restart_hint()}"
        )
    return DataParallelStrategy(devices[:replicas], alone=True)
