"""`NaNGuard`: notices a NaN in its step, says where it began, and what then."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.callbacks.gather_from_hosts import (
    first_rank_of,
    gather_from_hosts,
    places_of,
    refuse_strategy,
)
from tfdp.callbacks.other_callbacks import refuse_others
from tfdp.callbacks.step_count import StepCount, is_due
from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError, NotFiniteError, NotFiniteWarning
from tfdp.sharding.variables import ShardedVariable
from tfdp.step.compression import STATE
from tfdp.step.find_optimizers import innermost_optimizers, optimizers_of
from tfdp.step.finite_guard import FiniteGuard, LeftOut
from tfdp.step.finite_trace import Finding, find_not_finite, weights_not_finite
from tfdp.step.observers import attach, detach

REACTIONS = ("raise", "skip", "rollback")
MOST_IN_A_ROW = 10
KEEP_EVERY_STEPS = 100
KEPT = ("skipped_steps", "rollbacks", "skipped_steps_of_epoch")


class NaNGuard(keras.callbacks.Callback):
    """Notices that a loss or a gradient is NaN or infinite in the step where it is.

    Such a step updates nothing, on no replica: weights, the optimizer's state, moving
    statistics and metrics are afterwards what they were before. Then its batch is
    computed once more, layer by layer on every replica, and what is not finite is told
    in the order in which it came about: a weight, the input (and which row), the first
    layer, the loss, the gradients, and on which replica.

    `on_nan` says what follows:

        "raise"       `NotFiniteError`, with all of that
        "skip"        training goes on with the next batch. The first time a
                      `NotFiniteWarning` tells the cause; `skipped_steps` in the logs
                      counts. More than `most_in_a_row` one after the other: as "raise"
        "rollback"    as "skip", and weights and the optimizer's state go back to the
                      last copy of them, which is taken every `keep_every_steps` steps,
                      while all weights are finite; not a learning rate that is a
                      number, which callbacks set. More than `most_in_a_row` times to
                      the same copy: as "raise"

    A loss scaler (`LossScaleOptimizer`, mixed_float16) finds gradients that are not
    finite by itself and halves its scale: that is no fault, unless the loss itself is
    not finite or the scale is down to 1. Under gradient accumulation the batch is left
    out, and an update has as many good ones as ever. With `sync=` each group of
    replicas leaves out its own update. With `steps_per_execution` "raise" and
    "rollback" leave out what comes after such a step in the same execution, too.

    In a step with several updates what one has changed is put back where a later one
    finds something, with averages of weights that the step takes itself; not what is
    updated, or stored, in a branch, a loop or a `tf.function` of the step.

    A weight that an update itself made infinite is noticed with the next loss; one that
    no loss depends on, and the optimizer's state, at the end of each epoch and before a
    copy is taken. Hosts that train apart (`sync=`) tell and raise each their own.
    The cause is looked for without XLA and with new random draws; where it does not
    show again, the message says so; where the step cannot run eagerly (some with
    `sync=`), it tells of weights and the input only. `keras.callbacks.TerminateOnNaN`
    looks at the reported loss, a mean over the epoch so far, when the update has been
    made.

    Args:
      on_nan: "raise", "skip" or "rollback".
      most_in_a_row: at least 1; None for 10. Not with "raise".
      keep_every_steps: at least 1; None for 100. With "rollback" only.

    Raises:
      ConfigurationError: when an argument is not as above; when training starts: under
        a strategy that is not tfdp's, or is of a TPU, with `run_eagerly=True`; beside
        another `NaNGuard`; of
        `sync=`, with "rollback" (the copies of several groups are of several moments)
        and with accumulate_steps above 1 (groups would count apart).
      NotFiniteError: while training, on all hosts; its `findings` hold what was found.

    Cost: in each step a pass over the gradients and one sum of a number over all
    replicas; the training step is traced once more, when training begins and after it
    has ended; Keras waits for each batch before it starts the next. "rollback", and
    several updates in a step: on each device as many bytes as it has weights and state
    of optimizers. To find the cause
    takes an eager step.

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
        if on_nan not in REACTIONS:
            raise ConfigurationError(
                f"on_nan must be one of {', '.join(map(repr, REACTIONS))}. Received: "
                f"{on_nan!r}."
            )
        _check_count("most_in_a_row", most_in_a_row, on_nan, ("skip", "rollback"))
        _check_count("keep_every_steps", keep_every_steps, on_nan, ("rollback",))
        self.on_nan = on_nan
        self.most_in_a_row = most_in_a_row or MOST_IN_A_ROW
        self.keep_every_steps = keep_every_steps or KEEP_EVERY_STEPS
        #: Steps whose update was left out, in all fits.
        self.skipped_steps = 0
        #: How often weights went back to a copy.
        self.rollbacks = 0
        #: What was found last.
        self.findings: list[Finding] = []
        self._guard: FiniteGuard | None = None
        self._copy: KeptCopy | None = None
        self._steps = StepCount()
        self._skipped_before = 0
        self._has_warned = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to look: in graphs, which are therefore built anew.

        Raises:
          ConfigurationError: where they cannot.
        """
        strategy = self.model.distribute_strategy
        _refuse_what_cannot_act(self.model, self.on_nan)
        refuse_others(self, (NaNGuard,), "leave steps out")
        self._guard = FiniteGuard(
            self.model,
            strategy.extended.reducer,
            len(strategy.extended.worker_devices),
            stops=self.on_nan != "skip",
        )
        attach(self.model, self._guard)
        self.model.make_train_function(force=True)
        self._steps, self._has_warned = StepCount(), False
        self._copy = KeptCopy(self.model) if self.on_nan == "rollback" else None
        self._skipped_before = self.skipped_steps

    def state_to_keep(self) -> dict[str, Any]:
        """What a checkpoint of the training keeps: what was left out so far."""
        of_epoch = self.skipped_steps - self._skipped_before
        numbers = (self.skipped_steps, self.rollbacks, of_epoch)
        return dict(zip(KEPT, numbers, strict=True))

    def take_back(self, state: dict[str, Any]) -> None:
        """Goes on counting from there."""
        self.skipped_steps, self.rollbacks, of_epoch = (int(state[n]) for n in KEPT)
        self._skipped_before = self.skipped_steps - of_epoch

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Lets the graphs act."""
        self._steps.begin(batch)
        if not self._steps.done:
            # Not when training begins: other callbacks restore weights there.
            self._keep_copy()
        if self._guard is not None:
            self._guard.arm(self.model.steps_per_execution)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Looks whether a step was left out, and does what `on_nan` says.

        Raises:
          NotFiniteError: where that is to raise.
        """
        before = self._steps.end(batch)
        if self._guard is None:
            return
        self._guard.arm(0)
        if not self._left_out() and self._is_due(before):
            self._keep_copy()
        self._count_in(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at all weights, and at steps that came before the end of the input.

        Raises:
          NotFiniteError: when one is not finite, and there is no copy to go back to.
        """
        self._left_out()
        found = self._bad_weights()
        if found:
            when = f"after step {self._steps.done} of this fit"
            self._tell(found, when, is_enough=not self._can_roll_back())
            self._roll_back()
        self._count_in(logs)
        self._skipped_before = self.skipped_steps

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Looks no more; the next training builds graphs that do not, either."""
        if self._guard is not None:
            detach(self.model, self._guard)
        self._guard = self._copy = None
        self.model.make_train_function(force=True)

    def _left_out(self) -> bool:
        """Whether steps were left out since the last time; reacts if so."""
        left_out = None if self._guard is None else self._guard.read()
        if left_out is not None:
            self._react(left_out)
        return left_out is not None

    def _react(self, left_out: LeftOut) -> None:
        self.skipped_steps += left_out.steps
        when = f"in step {left_out.first} of this fit"
        is_enough = (
            self.on_nan == "raise" or left_out.most_in_a_row > self.most_in_a_row
        )
        if self.on_nan == "rollback":
            is_enough = not self._can_roll_back()
        if is_enough or not self._has_warned:
            # Before anything goes back: with the weights of that step.
            self._tell(self._find(), when, is_enough=is_enough)
        self._roll_back()
        self._guard.go_on()  # type: ignore[union-attr]

    def _tell(self, found: list[Finding], when: str, *, is_enough: bool) -> None:
        self.findings = found
        message = in_words(found, self._places(), when)
        if is_enough:
            self.on_train_end()
            raise NotFiniteError(message, findings=found)
        self._has_warned = True
        warnings.warn(message, NotFiniteWarning, stacklevel=2)

    def _find(self) -> list[Finding]:
        first = first_rank_of(self.model.distribute_strategy)
        batches = self._guard.kept_batches()  # type: ignore[union-attr]
        return self._told(find_not_finite(self.model, batches, first))

    def _bad_weights(self) -> list[Finding]:
        first = first_rank_of(self.model.distribute_strategy)
        return self._told(weights_not_finite(self.model, first))

    def _told(self, mine: list[Finding]) -> list[Finding]:
        """What all hosts found; each its own, where hosts train apart."""
        if _trains_apart(self.model):
            return mine
        everybody = gather_from_hosts(
            self.model.distribute_strategy,
            [dataclasses.astuple(finding) for finding in mine],
            "what is not finite",
        )
        return [Finding(*fields) for told in everybody for fields in told]

    def _places(self) -> list[str]:
        strategy = self.model.distribute_strategy
        if _trains_apart(self.model):
            return [""] * first_rank_of(strategy) + places_of(strategy)
        told = gather_from_hosts(
            strategy, places_of(strategy), "the places of replicas"
        )
        return [place for places in told for place in places]

    def _is_due(self, before: int) -> bool:
        """Whether to take a copy after good steps, of which there were `before`."""
        is_first = self._copy is not None and not self._copy.is_taken
        return is_first or is_due(self.keep_every_steps, before, self._steps.done)

    def _keep_copy(self) -> None:
        copy = self._copy
        if copy is not None and copy.can_be_taken() and not self._bad_weights():
            copy.take()

    def _can_roll_back(self) -> bool:
        return self._copy is not None and self._copy.times_used < self.most_in_a_row

    def _roll_back(self) -> None:
        """Goes back to the last copy, where copies are taken."""
        if self._copy is not None:
            self._copy.put_back()
            self.rollbacks += 1

    def _count_in(self, logs: dict[str, Any] | None) -> None:
        if logs is not None and self.on_nan != "raise":
            logs["skipped_steps"] = self.skipped_steps - self._skipped_before


def _check_count(name: str, value: Any, on_nan: str, acts_with: Sequence[str]) -> None:
    if value is None:
        return
    if not is_whole(value, least=1):
        raise ConfigurationError(
            f"{name} must be an int of at least 1, or None. Received: {value!r}."
        )
    if on_nan not in acts_with:
        raise ConfigurationError(
            f"{name}={value} has nothing to act on with on_nan={on_nan!r}. Leave it "
            f"out, or use on_nan={acts_with[-1]!r}."
        )


def _trains_apart(model: keras.Model) -> bool:
    return any(getattr(o, "sync", None) is not None for o in optimizers_of(model))


def _refuse_what_cannot_act(model: keras.Model, on_nan: str) -> None:
    refuse_strategy(model.distribute_strategy, "NaNGuard")
    if model.run_eagerly or tf.config.functions_run_eagerly():
        raise ConfigurationError(
            "NaNGuard acts in graphs, and the model runs eagerly. Compile it with "
            "run_eagerly=False (without tf.config.run_functions_eagerly(True)), or "
            "leave the callback out."
        )
    if not _trains_apart(model):
        return
    if on_nan == "rollback":
        raise ConfigurationError(
            "on_nan='rollback' goes back to one moment of all replicas, and with "
            "sync=... groups of them train apart and meet at others. Use 'skip' or "
            "'raise', or leave sync out."
        )
    if any(getattr(o, "accumulate_steps", 1) > 1 for o in optimizers_of(model)):
        raise ConfigurationError(
            "NaNGuard leaves a batch out of an accumulation, and with sync=... groups "
            "of replicas, which meet after equal numbers of updates, would count "
            "apart. Use accumulate_steps=1, or leave sync out."
        )


# What `NaNGuard` found, in words.


# A message names so many gradients of a replica.
MOST_NAMED = 3
WHAT = {
    "weight": "the weight",
    "input": "the input",
    "layer": "the output of layer",
}


def in_words(found: Sequence[Finding], places: Sequence[str], when: str) -> str:
    """What is not finite, where, and what to do."""
    by_rank: dict[int, list[Finding]] = {}
    for finding in found:
        by_rank.setdefault(finding.rank, []).append(finding)
    clauses = [
        f"{places[rank]}: {_in_order(findings)}" for rank, findings in by_rank.items()
    ]
    if not clauses:
        clauses = [
            "computed once more the batch was finite on every replica, so the cause "
            "is in its random draws, in XLA or in adding gradients up"
        ]
    return (
        f"A loss or a gradient is not finite {when}, which was left out: "
        f"{'; '.join(clauses)}. If it is the input, look at those rows; else a smaller "
        "learning rate, clipping or a loss that is defined everywhere helps. "
        "NaNGuard(on_nan='skip') goes on without such batches."
    )


def _in_order(findings: Sequence[Finding]) -> str:
    gradients = [finding for finding in findings if finding.kind == "gradient"]
    apart = ("gradient", "unknown")
    words = [_words(finding) for finding in findings if finding.kind not in apart]
    if gradients:
        named = ", ".join(finding.name for finding in gradients[:MOST_NAMED])
        more = len(gradients) - MOST_NAMED
        and_more = f" and {more} more" if more > 0 else ""
        words.append(f"the gradient of {named}{and_more}")
    clauses = ["first " + ", then ".join(words)] if words else []
    clauses += [
        f"more is not known, as the batch could not be computed again ({finding.name})"
        for finding in findings
        if finding.kind == "unknown"
    ]
    return ", ".join(clauses)


def _words(finding: Finding) -> str:
    if finding.kind == "loss":
        return "the loss"
    row = "" if finding.row is None else f", the first in row {finding.row}"
    return (
        f"{WHAT[finding.kind]} {finding.name} ({finding.nans} NaN and "
        f"{finding.infinities} infinite of {finding.numbers} numbers{row})"
    )


# `KeptCopy`: weights and the optimizer's state as they were, on their devices.


class KeptCopy:
    """Keeps what training has made of a model, and gives it back.

    Random states are left as they are: the same draws would come once more. So are
    learning rates: a schedule knows its step, and a number is what callbacks have set.

    Args:
      model: made under a strategy of tfdp.

    Cost: the bytes of all that on each device, from the next update on.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._kept: list[tuple[tf.Variable, tf.Tensor]] = []
        #: How often the copy was given back since it was taken.
        self.times_used = 0

    def can_be_taken(self) -> bool:
        """Whether all that training makes is there; a model may build itself late."""
        return self._model.built and all(o.built for o in optimizers_of(self._model))

    @property
    def is_taken(self) -> bool:
        """Whether there is something to go back to."""
        return bool(self._kept)

    def take(self) -> None:
        """Keeps what everything is now, in the place of what was kept before."""
        # Read values are kept as they are: an update then writes elsewhere.
        self._kept = [(copy, copy.read_value()) for copy in _copies(self._model)]
        self.times_used = 0

    def put_back(self) -> None:
        """Makes everything what it was; nothing, before the first copy."""
        for copy, value in self._kept:
            copy.assign(value)
        known = {id(copy) for copy, _ in self._kept}
        for copy in _left_by_sums(self._model) if self._kept else ():
            if id(copy) not in known:  # made since then, with zeros
                copy.assign(tf.zeros_like(copy))
        self.times_used += 1


def _copies(model: keras.Model) -> Iterator[tf.Variable]:
    """Every copy and every shard that a device of this process holds."""
    optimizers = optimizers_of(model)
    leaves = [leaf for owner in optimizers for leaf in innermost_optimizers(owner)]
    rates = [leaf.learning_rate for leaf in leaves]
    seen = {id(rate.value) for rate in rates if isinstance(rate, keras.Variable)}
    states = [optimizer.variables for optimizer in optimizers]
    # Not the model's variables: metrics and random states go on.
    for variable in itertools.chain(model.weights, *states):
        value: Any = variable.value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, ShardedVariable):
            yield from (value.shard(rank) for rank in _ranks(model))
        else:
            yield from getattr(value, "values", (value,))
    yield from _left_by_sums(model)


def _left_by_sums(model: keras.Model) -> Iterator[tf.Variable]:
    """What compressed sums keep from step to step: made by the first of them."""
    for optimizer in optimizers_of(model):
        state = getattr(optimizer, STATE, None)
        if state is not None:
            yield from state.copies


def _ranks(model: keras.Model) -> range:
    return range(len(model.distribute_strategy.extended.worker_devices))
