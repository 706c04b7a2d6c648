"""Trains a model on one device and on N replicas, and compares each variable."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from tfdp.errors import ConfigurationError, LocalMeanWarning
from tfdp.step.find_optimizers import optimizers_of
from tfdp.tools.testing import rounding
from tfdp.tools.testing.batches import Batch, permute_rows, row_count
from tfdp.tools.testing.model_parts import (
    HALF_PRECISION,
    compute_round_off,
    inner_optimizers,
    layers_of,
    unit_round_off,
)
from tfdp.tools.testing.report import VariableRow, are_conclusive
from tfdp.tools.testing.stages import begin_stage
from tfdp.tools.testing.trainee import CheckedTraining, Trainee

# Trainings on one device that differ only by rounding; see `rounding`.
TWINS = 3


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a comparison; `model` is the one-device model."""

    model: keras.Model
    rows: tuple[VariableRow, ...]
    switched_off: tuple[str, ...]
    drawing_layers: tuple[str, ...]
    finite_on_one_device: bool
    finite_on_replicas: bool
    loss_one_device: float | None
    loss_replicas: float | None
    gradient_change: tuple[str, str] = ("", "")  # and what to do, for `CauseFacts`
    error: Exception | None = None
    told: tuple[str, ...] = ()  # what tfdp warned of in a step of the replicas

    @property
    def ok(self) -> bool:
        """Whether every row holds, and enough of them are conclusive."""
        return self._no_row_exceeds and are_conclusive(self.rows)

    @property
    def is_too_coarse(self) -> bool:
        """Whether rounding in half precision would hide a wrong step."""
        return self._no_row_exceeds and not self.ok and self.is_in_half_precision

    @property
    def is_in_half_precision(self) -> bool:
        """Whether a layer computes in half precision."""
        dtypes = {layer.compute_dtype for layer in layers_of(self.model)}
        return not dtypes.isdisjoint(HALF_PRECISION)

    @property
    def accumulated_steps(self) -> int:
        """The steps after which every optimizer has updated its weights."""
        optimizers = [
            each for one in optimizers_of(self.model) for each in inner_optimizers(one)
        ]
        counts = (getattr(x, "gradient_accumulation_steps", 1) for x in optimizers)
        return max(count or 1 for count in counts)

    def lost_movement(self, exact: Comparison) -> tuple[str, ...]:
        """The weights that move less than 4/5 as far on one device as in `exact`, in
        float32, and by more than half of the bound. A loss scaler may skip steps.
        """
        optimizers = inner_optimizers(self.model.optimizer)
        if any(isinstance(one, LossScaleOptimizer) for one in optimizers):
            return ()
        return tuple(
            own.path
            for own, full in zip(self.rows, exact.rows, strict=False)
            if full.movement - own.movement > max(own.bound / 2, full.movement / 5)
        )

    @property
    def _no_row_exceeds(self) -> bool:
        exceeds = any(row.first_step_over is not None for row in self.rows)
        return self.error is None and not exceeds


class _Movements:
    def __init__(self, model: keras.Model):
        self.start = [weight.numpy() for weight in model.weights]
        self.steps: dict[int, list[np.ndarray]] = {}

    def note(self, step: int, weights: list[list[np.ndarray]]) -> None:
        self.steps[step] = [copies[0] for copies in weights]

    @property
    def finite(self) -> bool:
        values = itertools.chain.from_iterable(self.steps.values())
        return all(np.isfinite(rounding.largest(value)) for value in values)


def compare(setting: CheckedTraining) -> Comparison:
    """Trains on one device, its twins, and on the replicas.

    Raises errors of the one-device training; those of the replicas are in the result.
    """
    begin_stage("builds the model on one device and on the replicas")
    one, several, error = _make_both(setting)
    begin_stage("trains on one device")
    start = one.values()
    states_before = one.random_states()
    reference = _Movements(one.model)
    loss_one = one.train(setting.batches, reference.note)
    states_after = one.random_states()
    drawing = [
        name
        for name, states in states_before.items()
        if not all(map(np.array_equal, states, states_after[name]))
    ]
    period = (one.period if one.has_drawn else 1) if not drawing else None
    spreads = _twin_spreads(setting, one, start, reference, period=period)
    distances = _Distances(reference)
    loss_several, told = None, list[str]()
    if several is not None:
        # Keeps the learning rate, which an experiment may have changed.
        begin_stage("trains on the replicas")
        several.load(start, rates=False)
        try:
            with _noting_warnings(told):
                loss_several = several.train(setting.batches, distances.note)
        except Exception as raised:
            error = raised
    bounds = _bounds(setting, one.model, reference, spreads)
    rows = () if error else _rows(one.model, reference, distances, bounds)
    return Comparison(
        model=one.model,
        rows=rows,
        switched_off=tuple(one.switched_off),
        drawing_layers=tuple(drawing),
        finite_on_one_device=reference.finite,
        finite_on_replicas=distances.finite,
        loss_one_device=loss_one,
        loss_replicas=loss_several,
        gradient_change=several.gradient_change() if several else ("", ""),
        error=error,
        told=tuple(told),
    )


@contextlib.contextmanager
def _noting_warnings(told: list[str]) -> Iterator[None]:
    """Notes each LocalMeanWarning; all warnings are shown at the end."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for one in caught:
            if issubclass(one.category, LocalMeanWarning):
                told.append(str(one.message))
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _make_both(
    setting: CheckedTraining,
) -> tuple[Trainee, Trainee | None, Exception | None]:
    one = Trainee(setting, None)
    one.make()
    if not one.model.trainable_weights:
        raise ConfigurationError(
            f"No weight of the model {one.model.name!r} is trainable, so there is no "
            "training to compare. Set layer.trainable = True before compile()."
        )
    several = Trainee(setting, setting.strategy)
    try:
        several.make()
    except ConfigurationError:
        raise
    except Exception as error:
        return one, None, error
    if one.model is several.model:
        raise ConfigurationError(
            f"build() returned the same model twice ({one.model.name!r}). It must "
            "return a new one at every call, inside and outside the strategy's scope."
        )
    # "auto" differs under a strategy and on one device, and XLA rounds differently.
    one.jit_compile = one.model.jit_compile = several.model.jit_compile
    return one, several, None


def _twin_spreads(
    setting: CheckedTraining,
    one: Trainee,
    start: list[np.ndarray],
    reference: _Movements,
    *,
    period: int | None,
) -> dict[int, list[float]]:
    """Step -> for each weight, the largest difference of the twins' movement.

    If draws repeat after a period, a row moves by whole periods: elsewhere it would get
    another noise. If layers draw by themselves (None), rows keep their order.
    """
    generator = np.random.default_rng(setting.seed)
    unit = compute_round_off(one.model)
    spreads = {step: [0.0] * len(weights) for step, weights in reference.steps.items()}
    for number in range(1, TWINS + 1):
        begin_stage(f"measures rounding on one device ({number} of {TWINS})")
        batches = [_twin_batch(b, unit, generator, period) for b in setting.batches]
        one.load(start)
        for weight in one.model.trainable_weights:
            weight.assign(rounding.nudge(weight.numpy(), unit, generator))
        twin = _Movements(one.model)
        one.train(batches, twin.note)
        for step, weights in twin.steps.items():
            for index, value in enumerate(weights):
                after, before = reference.steps[step][index], reference.start[index]
                moved = rounding.difference(value, twin.start[index])
                expected = rounding.difference(after, before)
                found = rounding.largest_difference(moved, expected)
                spreads[step][index] = max(spreads[step][index], found)
    return spreads


def _twin_batch(
    batch: Batch, unit: float, generator: np.random.Generator, period: int | None
) -> Batch:
    if period is not None:
        batch = permute_rows(batch, period, generator)
    inputs, *others = batch if isinstance(batch, tuple) else (batch,)
    nudged = functools.partial(_nudged_input, unit=unit, generator=generator)
    inputs = tf.nest.map_structure(nudged, inputs)
    return (inputs, *others) if isinstance(batch, tuple) else inputs


def _nudged_input(leaf: Any, unit: float, generator: np.random.Generator) -> Any:
    if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return leaf
    values = leaf.numpy()
    # Whole numbers stay: their sums are exact, and they may be token ids.
    nudged = rounding.nudge(values, unit, generator)
    return tf.constant(np.where(values == np.round(values), values, nudged))


class _Distances:
    """The distance of each weight on each replica from the reference, by step."""

    def __init__(self, reference: _Movements):
        self._reference = reference
        self.steps: dict[int, list[float]] = {}
        self.first: list[np.ndarray] = []
        self.finite = True

    def note(self, step: int, weights: list[list[np.ndarray]]) -> None:
        if not self.first:
            self.first = [copies[0] for copies in weights]
        pairs = zip(weights, self._reference.steps[step], strict=True)
        self.steps[step] = [
            max(rounding.largest_difference(copy, expected) for copy in copies)
            for copies, expected in pairs
        ]
        for copies in weights:
            self.finite &= all(np.isfinite(rounding.largest(copy)) for copy in copies)


def _bounds(
    setting: CheckedTraining,
    model: keras.Model,
    reference: _Movements,
    spreads: dict[int, list[float]],
) -> dict[int, list[float]]:
    rows = max(row_count(batch) for batch in setting.batches)
    unit = compute_round_off(model)
    travel = [0.0] * len(reference.start)
    last = reference.start
    bounds: dict[int, list[float]] = {}
    for step, weights in sorted(reference.steps.items()):
        bounds[step] = []
        for index, value in enumerate(weights):
            travel[index] += rounding.largest_difference(value, last[index])
            stored = unit_round_off(value.dtype.name)
            bounds[step].append(
                rounding.bound(
                    spread=spreads[step][index],
                    step=step,
                    largest_weight=rounding.largest(value),
                    travel=travel[index] if stored else 0.0,
                    rows=rows,
                    variable_round_off=stored,
                    compute_round_off=max(unit, stored),
                )
            )
        last = weights
    return bounds


def _rows(
    model: keras.Model,
    reference: _Movements,
    distances: _Distances,
    bounds: dict[int, list[float]],
) -> tuple[VariableRow, ...]:
    trainable = {id(weight) for weight in model.trainable_weights}
    first_step = min(reference.steps)
    rows = []
    for index, weight in enumerate(model.weights):
        start = reference.start[index]
        pairs = {
            step: (distances.steps[step][index], bounds[step][index])
            for step in sorted(reference.steps)
        }
        excesses = {step: rounding.excess(*pair) for step, pair in pairs.items()}
        step = max(excesses, key=lambda step: excesses[step])
        over = [step for step, excess in excesses.items() if excess > 1]
        rows.append(
            VariableRow(
                path=weight.path,
                shape=tuple(weight.shape),
                trainable=id(weight) in trainable,
                largest_difference=pairs[step][0],
                bound=pairs[step][1],
                movement=max(
                    rounding.largest_difference(weights[index], start)
                    for weights in reference.steps.values()
                ),
                step=step,
                first_step_over=over[0] if over else None,
                update_ratio=_update_ratio(
                    distances.first[index], reference.steps[first_step][index], start
                ),
            )
        )
    return tuple(rows)


def _update_ratio(
    after: np.ndarray, expected: np.ndarray, start: np.ndarray
) -> float | None:
    length = float(np.linalg.norm(rounding.difference(expected, start)))
    if not length or not np.isfinite(length):
        return None
    return float(np.linalg.norm(rounding.difference(after, start))) / length
