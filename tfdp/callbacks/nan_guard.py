"""`NaNGuard`: detects a non-finite loss or gradient in its step, and reacts."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.callbacks.other_callbacks import Logs, refuse_others
from tfdp.callbacks.step_count import StepCount, check_count, is_due
from tfdp.chain.compression import compression_entries
from tfdp.chain.finite_guard import FiniteGuard
from tfdp.checks import check_one_of
from tfdp.errors import ConfigurationError, NotFiniteError, NotFiniteWarning
from tfdp.step.find_optimizers import (
    innermost_optimizers,
    optimizers_of,
    optimizers_with_sync,
)
from tfdp.step.finite_trace import NotFinite, find_not_finite, weights_not_finite
from tfdp.step.observers import attach
from tfdp.strategies.gather_from_hosts import (
    first_rank_of,
    gather_from_hosts,
    places_of,
    refuse_without_graphs,
)

REACTIONS = ("raise", "skip", "rollback")
# Gradients of a replica that a message names.
MOST_NAMED = 3
WHAT = {"weight": "the weight", "input": "the input", "layer": "the output of layer"}
MOST_IN_A_ROW = 10
KEEP_EVERY_STEPS = 100
KEPT = ("skipped_steps", "rollbacks", "skipped_steps_of_epoch")


class NaNGuard(keras.callbacks.Callback):
    """Detects a NaN or infinite loss or gradient in the step in which it occurs.

    Such a step updates nothing on any replica: weights, optimizer state, moving
    statistics and metrics stay as they were. Then its batch is computed again, layer by
    layer on every replica, to report what is not finite in order of occurrence: a
    weight, the input (and which row), the first layer, the loss, the gradients; and the
    replica.

    `on_nan` decides what follows:

        "raise"       `NotFiniteError`, with the report
        "skip"        training continues with the next batch. The first time, a
                      `NotFiniteWarning` has the report; `skipped_steps` in the logs
                      counts. More than `most_in_a_row` consecutive ones: as "raise"
        "rollback"    as "skip", and weights and optimizer state (not a numeric learning
                      rate, which callbacks set) return to the last copy, taken every
                      `keep_every_steps` steps while all weights are finite. More than
                      `most_in_a_row` times to the same copy: as "raise"

    A loss scaler (`LossScaleOptimizer`, mixed_float16) handles non-finite gradients:
    that is no fault, unless the loss itself is not finite or the scale is down to 1.
    Under gradient accumulation the batch is skipped, and an update has the usual number
    of good ones. With `sync=` each group of replicas skips its own update, and hosts
    report and raise independently. With `steps_per_execution`, "raise" and "rollback"
    also skip the later steps of the same execution. If a later update of a step is not
    finite, earlier ones and weight averages are undone; but not updates or stores in a
    branch, loop or `tf.function` of the step.

    A weight made infinite by an update is detected with the next loss; weights that no
    loss depends on, and the optimizer state, at the end of each epoch and before a copy
    is taken. The cause is searched without XLA and with new random draws; the message
    says so if it does not recur. If the step cannot run again, the report covers
    weights and the input only. `keras.callbacks.TerminateOnNaN`
    checks the reported loss, a mean over the epoch so far, after the update.

    Args:
      on_nan: "raise", "skip" or "rollback".
      most_in_a_row: at least 1; None for 10. Not with "raise".
      keep_every_steps: at least 1; None for 100. With "rollback" only.

    Raises:
      ConfigurationError: an argument is not as above; when training starts: under a
        strategy that is not tfdp's or of a TPU, with `run_eagerly=True`, or another
        `NaNGuard`; with `sync=` and "rollback" or accumulate_steps above 1; with
        late updates (`tfdp.sync.Delayed`, `BoundedStaleness`), in the first step.
      NotFiniteError: while training, on all hosts; `findings` holds the report.

    Cost: per step a pass over the gradients and one all-reduce of a number; the
    training step is retraced when training begins and after it ends; Keras waits for
    each batch before it starts the next. "rollback", and several updates in a step: on
    each device the bytes of its weights and optimizer state. The report traces and
    runs a step of its own.

    ```python
    import keras
    import numpy as np
    import tfdp

    tfdp.use_virtual_devices(2)
    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.ones((16, 4), "float32")
    guard = tfdp.callbacks.NaNGuard(on_nan="skip")
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard])
    print(guard.skipped_steps)  # 0
    ```
    """

    def __init__(
        self,
        on_nan: str = "raise",
        *,
        most_in_a_row: int | None = None,
        keep_every_steps: int | None = None,
    ):
        super().__init__()
        check_one_of("on_nan", on_nan, REACTIONS)
        _check_count("most_in_a_row", most_in_a_row, on_nan, ("skip", "rollback"))
        _check_count("keep_every_steps", keep_every_steps, on_nan, ("rollback",))
        self.on_nan = on_nan
        self.most_in_a_row = most_in_a_row or MOST_IN_A_ROW
        self.keep_every_steps = keep_every_steps or KEEP_EVERY_STEPS
        #: Steps skipped in all fits.
        self.skipped_steps = 0
        #: Number of rollbacks.
        self.rollbacks = 0
        #: The last report.
        self.findings: list[NotFinite] = []
        self._guard: FiniteGuard | None = None
        self._copy: KeptCopy | None = None
        self._steps = StepCount()
        self._skipped_before = 0
        self._has_warned = False

    def on_train_begin(self, logs: Logs = None) -> None:
        _check_can_act(self.model, self.on_nan)
        refuse_others(self, (NaNGuard,), "skip steps")
        extended, stops = self.model.distribute_strategy.extended, self.on_nan != "skip"
        devices = len(extended.worker_devices)
        self._guard = FiniteGuard(self.model, extended.reducer, devices, stops=stops)
        self._detach = attach(self.model, self._guard)
        self.model.make_train_function(force=True)
        self._steps, self._has_warned = StepCount(), False
        self._copy = KeptCopy(self.model) if self.on_nan == "rollback" else None
        self._skipped_before = self.skipped_steps

    def state_to_keep(self) -> dict[str, Any]:
        of_epoch = self.skipped_steps - self._skipped_before
        numbers = (self.skipped_steps, self.rollbacks, of_epoch)
        return dict(zip(KEPT, numbers, strict=True))

    def take_back(self, state: dict[str, Any]) -> None:
        self.skipped_steps, self.rollbacks, of_epoch = (int(state[n]) for n in KEPT)
        self._skipped_before = self.skipped_steps - of_epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._steps.begin(batch)
        if not self._steps.done:
            # Not when training begins: other callbacks restore weights then.
            self._keep_copy()
        if self._guard is not None:
            self._guard.arm(self.model.steps_per_execution)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        before = self._steps.end(batch)
        if self._guard is None:
            return
        self._guard.arm(0)
        if not self._check_skipped() and self._is_due(before):
            self._keep_copy()
        self._count_in(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Checks all weights, and steps that ran before the end of the input."""
        self._check_skipped()
        found = self._bad_weights()
        if found:
            when = f"after step {self._steps.done} of this fit"
            self._report(found, when, is_enough=not self._can_roll_back())
            self._roll_back()
        self._count_in(logs)
        self._skipped_before = self.skipped_steps

    def on_train_end(self, logs: Logs = None) -> None:
        if self._guard is not None:
            self._detach()
        self._guard = self._copy = None
        self.model.make_train_function(force=True)

    def _check_skipped(self) -> bool:
        """Reacts to skipped steps; returns whether there were any."""
        skipped = None if self._guard is None else self._guard.read()
        if skipped is None:
            return False
        self.skipped_steps += skipped.steps
        when = f"in step {skipped.first} of this fit"
        is_enough = self.on_nan == "raise" or skipped.most_in_a_row > self.most_in_a_row
        if self.on_nan == "rollback":
            is_enough = not self._can_roll_back()
        if is_enough or not self._has_warned:
            # Before a rollback: with the weights of that step.
            self._report(self._find(), when, is_enough=is_enough)
        self._roll_back()
        self._guard.go_on()  # type: ignore[union-attr]
        return True

    def _report(self, found: list[NotFinite], when: str, *, is_enough: bool) -> None:
        self.findings = found
        message = describe_findings(found, self._places(), when)
        if is_enough:
            self.on_train_end()
            raise NotFiniteError(message, findings=found)
        self._has_warned = True
        warnings.warn(message, NotFiniteWarning, stacklevel=2)

    def _find(self) -> list[NotFinite]:
        first = first_rank_of(self.model.distribute_strategy)
        batches = self._guard.kept_batches()  # type: ignore[union-attr]
        return self._gather(find_not_finite(self.model, batches, first))

    def _bad_weights(self) -> list[NotFinite]:
        first = first_rank_of(self.model.distribute_strategy)
        return self._gather(weights_not_finite(self.model, first))

    def _gather(self, mine: list[NotFinite]) -> list[NotFinite]:
        """Findings of all hosts; in local training only of this one."""
        if _is_local_training(self.model):
            return mine
        strategy = self.model.distribute_strategy
        fields = [dataclasses.astuple(finding) for finding in mine]
        by_host = gather_from_hosts(strategy, fields, "what is not finite")
        return [NotFinite(*fields) for values in by_host for fields in values]

    def _places(self) -> list[str]:
        strategy = self.model.distribute_strategy
        if _is_local_training(self.model):
            return [""] * first_rank_of(strategy) + places_of(strategy)
        by_host = gather_from_hosts(strategy, places_of(strategy), "places of replicas")
        return [place for places in by_host for place in places]

    def _is_due(self, before: int) -> bool:
        """Whether to take a copy, given the number of steps before this execution."""
        is_first = self._copy is not None and not self._copy.is_taken
        return is_first or is_due(self.keep_every_steps, before, self._steps.done)

    def _keep_copy(self) -> None:
        copy = self._copy
        if copy is not None and copy.can_be_taken() and not self._bad_weights():
            copy.take()

    def _can_roll_back(self) -> bool:
        return self._copy is not None and self._copy.times_used < self.most_in_a_row

    def _roll_back(self) -> None:
        if self._copy is not None:
            self._copy.put_back()
            self.rollbacks += 1

    def _count_in(self, logs: Logs) -> None:
        if logs is not None and self.on_nan != "raise":
            logs["skipped_steps"] = self.skipped_steps - self._skipped_before


def _check_count(name: str, value: Any, on_nan: str, acts_with: Sequence[str]) -> None:
    check_count(name, value)
    if value is not None and on_nan not in acts_with:
        raise ConfigurationError(
            f"{name}={value} has no effect with on_nan={on_nan!r}. Remove it, or use "
            f"on_nan={acts_with[-1]!r}."
        )


def _is_local_training(model: keras.Model) -> bool:
    return bool(optimizers_with_sync(optimizers_of(model), model.distribute_strategy))


def _check_can_act(model: keras.Model, on_nan: str) -> None:
    refuse_without_graphs(model, "NaNGuard")
    if not _is_local_training(model):
        return
    if on_nan == "rollback":
        raise ConfigurationError(
            "on_nan='rollback' restores one moment of all replicas, but with sync=... "
            "groups of replicas train independently. Use 'skip', 'raise' or no sync."
        )
    if any(getattr(o, "accumulate_steps", 1) > 1 for o in optimizers_of(model)):
        raise ConfigurationError(
            "NaNGuard skips a batch of an accumulation, but with sync=... groups of "
            "replicas must make equal numbers of updates. Use one of the two."
        )


def describe_findings(
    found: Sequence[NotFinite], places: Sequence[str], when: str
) -> str:
    """Describes what is not finite, where, and what to do."""
    by_rank: dict[int, list[NotFinite]] = {}
    for finding in found:
        by_rank.setdefault(finding.rank, []).append(finding)
    clauses = [f"{places[r]}: {_describe_replica(f)}" for r, f in by_rank.items()] or [
        "computed again the batch was finite on every replica, so the cause is in "
        "random draws, in XLA or in summing gradients"
    ]
    return (
        f"A loss or a gradient is not finite {when}, which was skipped: "
        f"{'; '.join(clauses)}. If it is the input, check those rows; else try a "
        "smaller learning rate, clipping or a loss that is defined everywhere. "
        "NaNGuard(on_nan='skip') continues without such batches."
    )


def _describe_replica(findings: Sequence[NotFinite]) -> str:
    gradients = [finding.name for finding in findings if finding.kind == "gradient"]
    texts = [_describe(f) for f in findings if f.kind not in ("gradient", "unknown")]
    if gradients:
        more = len(gradients) - MOST_NAMED
        and_more = f" and {more} more" if more > 0 else ""
        texts.append(f"the gradient of {', '.join(gradients[:MOST_NAMED])}{and_more}")
    clauses = ["first " + ", then ".join(texts)] if texts else []
    clauses += [
        f"the rest is unknown: the batch could not be computed again ({finding.name})"
        for finding in findings
        if finding.kind == "unknown"
    ]
    return ", ".join(clauses)


def _describe(finding: NotFinite) -> str:
    if finding.kind == "loss":
        return "the loss"
    row = "" if finding.row is None else f", the first in row {finding.row}"
    return (
        f"{WHAT[finding.kind]} {finding.name} ({finding.nans} NaN and "
        f"{finding.infinities} infinite of {finding.numbers} numbers{row})"
    )


class KeptCopy:
    """Copies of a model's weights and optimizer state, on their devices.

    Not random states, which would repeat their draws, nor learning rates: a schedule
    depends on the step, and callbacks set a number.

    Cost: the bytes of all that on each device, from the next update on.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._kept: list[tuple[Any, int, tf.Tensor]] = []
        #: Rollbacks to this copy.
        self.times_used = 0

    def can_be_taken(self) -> bool:
        """Whether all state exists; a model may build itself late."""
        return self._model.built and all(o.built for o in optimizers_of(self._model))

    @property
    def is_taken(self) -> bool:
        return bool(self._kept)

    def take(self) -> None:
        """Replaces the copy by the current state."""
        # A read value keeps its buffer: an update then writes elsewhere.
        self._kept = [
            (variable, place, _copies_of(variable)[place].read_value())
            for variable, place in _copies(self._model)
        ]
        self.times_used = 0

    def put_back(self) -> None:
        """Restores the copy, if there is one."""
        # By variable: the first step may store optimizer state in other copies.
        for variable, place, value in self._kept:
            _copies_of(variable)[place].assign(value)
        kept = {id(variable) for variable, _, _ in self._kept}
        for copy in _residuals_of(self._model) if self._kept else ():
            if id(copy) not in kept:  # created since then, as zeros
                copy.assign(tf.zeros_like(copy))
        self.times_used += 1


def _copies_of(variable: Any) -> Sequence[tf.Variable]:
    copies: Sequence[tf.Variable] = getattr(variable, "values", (variable,))
    return copies


def _copies(model: keras.Model) -> Iterator[tuple[Any, int]]:
    """Every variable that devices of this process hold, shards too, and the place of
    each copy among its copies."""
    optimizers = optimizers_of(model)
    leaves = [leaf for owner in optimizers for leaf in innermost_optimizers(owner)]
    rates = [leaf.learning_rate for leaf in leaves]
    seen = {id(rate.value) for rate in rates if isinstance(rate, keras.Variable)}
    states = [optimizer.variables for optimizer in optimizers]
    # Not the model's variables: metrics and random states continue.
    for variable in itertools.chain(model.weights, *states):
        value: Any = variable.value
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield from ((value, place) for place in range(len(_copies_of(value))))
    yield from ((residual, 0) for residual in _residuals_of(model))


def _residuals_of(model: keras.Model) -> Iterator[tf.Variable]:
    """Residuals of compressed sums, which the first sum creates."""
    for optimizer in optimizers_of(model):
        for of_ranks in compression_entries(optimizer).values():
            yield from of_ranks.copies
