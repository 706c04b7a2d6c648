"""`Autotune`: finds the sizes of buckets that train fastest, in the first steps."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfdp.callbacks.gather_from_hosts import gather_from_hosts, refuse_strategy
from tfdp.callbacks.other_callbacks import refuse_others
from tfdp.callbacks.step_count import StepCount
from tfdp.checks import is_whole
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.link_speed import speed_of_sums
from tfdp.plan.buckets import Bucket
from tfdp.plan.communication import Communication
from tfdp.step.find_optimizers import optimizers_of
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.model import Gradient, ModelProfile
from tfdp.tools.tune.proposal import TrialFacts, predicted_speed
from tfdp.tools.tune.space import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Place,
    Setting,
    Space,
    communication_line,
    knobs_of,
)
from tfdp.tools.tune.tuning import FINALISTS, LEAST_ROUNDS, ROUNDS, InOrder, Tuning
from tfdp.tools.tune.words import Terms, line_of_round, line_of_trial, outcome

# The first execution traces; the one after it meets cold caches.
WARM_UP_EXECUTIONS = 2
LEAST_EXECUTIONS = 3
OWN = Terms("the program's own sizes", "steps/s")


class Autotune(keras.callbacks.Callback):
    """Tries sizes of buckets in the first steps of `fit`, and goes on with the best.

    Each setting trains for some steps: first the program's own, then those that the
    simulator takes to be fastest here. The two best of them and the program's own are
    timed again in turn, and the best stays if it beats the program's own by more than
    the rounds differ (`tfdp.tools.tune.tuning`); else nothing changes. Every step
    is one of the training: no data is read twice, and weights, optimizer and metrics go
    on.
    It says what it tried, and ends with the `Communication(...)` to paste, which spares
    the next training all of it.

    On several hosts all switch before the same step: worker 0 times and decides, and
    tells the others. What a step computes stays the same: sizes say only which
    gradients travel together. Where two add up (two hosts, or two replicas under the
    engine "tensorflow") not a bit changes; among more, the order of additions depends
    on where in its bucket a gradient lies, so that sums may differ in their last bits,
    as between two strategies with other sizes. Engines, levels, shards and compression
    are not touched: `tfdp tune` tries them.

    It does nothing, and says so, on one replica, and where the engine "in_process"
    hands over each gradient alone. After a restart from a checkpoint it tunes anew.

    Args:
      steps: that are timed for each setting in each round, at least 3. With
        `steps_per_execution` whole executions are timed, at least 3 of them.
      settings: that are tried beside the program's own, at least 1.
      rounds: in which the best and the program's own meet, at least 2.
      sizes: pairs (bucket_bytes, first_bucket_bytes) to try; None: the simulator
        chooses them. The program's own are always tried.

    Raises:
      ConfigurationError: when an argument is not as above; when training starts: under
        a strategy that is not tfdp's or is of a TPU; with `sync=` or `min_hosts`,
        where most steps send nothing; beside another `Autotune`; with compression
        other than `wire_dtype`, which keeps what it did not send; with
        shard="gradients" or "parameters", where `bucket_bytes` also bounds the memory;
        and with `run_eagerly=True`.

    Cost: (settings + 1) + 3 rounds of `steps` + 2 steps, at the speed of what is tried,
    and one more trace of the step for each setting, whose graphs are held meanwhile.
    Nothing afterwards. A training that ends before it has ended keeps its own sizes.

    ```python
    import keras
    import numpy as np
    import tfdp

    tfdp.use_virtual_devices(2)
    packed = tfdp.Communication(engine="tensorflow")
    with tfdp.DataParallelStrategy(communication=packed).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((400, 4), "float32")
    tune = tfdp.callbacks.Autotune(steps=3, rounds=2, sizes=[(4096, 1024)])
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[tune])
    print(tune.chosen)
    ```
    """

    def __init__(
        self,
        *,
        steps: int = 10,
        settings: int = 5,
        rounds: int = ROUNDS,
        sizes: Sequence[tuple[int, int]] | None = None,
    ):
        super().__init__()
        for name, value, least in (
            ("steps", steps, LEAST_EXECUTIONS),
            ("settings", settings, 1),
            ("rounds", rounds, LEAST_ROUNDS),
        ):
            if not is_whole(value, least=least):
                raise ConfigurationError(
                    f"{name} must be an int of at least {least}. Received: {value!r}."
                )
        self.steps, self.settings, self.rounds = steps, settings, rounds
        self.sizes = None if sizes is None else checked_pairs(sizes)
        #: What the training goes on with; None before that is known.
        self.chosen: Communication | None = None
        #: What was tried, and what came of it, in words.
        self.lines: list[str] = []
        self._tuning: Tuning | None = None
        self._pipeline: Any = None
        self._own = Communication()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins with the program's own sizes.

        Raises:
          ConfigurationError: where it cannot act.
        """
        if self._tuning is not None:
            # A training that an error has ended left the sizes of a trial behind.
            self._pipeline.communication = self._own
        self.lines, self.chosen, self._tuning = [], None, None
        strategy = self.model.distribute_strategy
        refuse_strategy(strategy, "Autotune")
        reason = why_refused(self.model)
        if reason is not None:
            raise ConfigurationError(f"Autotune cannot act here: {reason}")
        refuse_others(self, (Autotune,), "set sizes of buckets", of_strategy=True)
        self._pipeline = strategy.extended.reducer
        self._own = self._pipeline.communication
        reason = why_nothing_acts(self._pipeline)
        if reason is not None:
            self.chosen = self._own
            self._tell(f"Autotune has nothing to tune: {reason}")
            return
        self._own_setting = Setting(
            bucket_bytes=self._own.bucket_bytes,
            first_bucket_bytes=self._own.first_bucket_bytes,
        )
        self._space = space_of(self.model, self._pipeline)
        self._functions: dict[Setting, Any] = {}
        self._steps = StepCount()
        self._tuning = Tuning(
            self._own_setting,
            finalists=FINALISTS,
            rounds=self.rounds,
            most_trials=1 + self.settings,
        )
        self._begin(self._own_setting)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Notes when an execution begins."""
        if self._tuning is None:
            return
        self._steps.begin(batch)
        self._start_seconds = time.perf_counter()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Times the execution, and switches when the setting was timed for long enough.

        Raises:
          CollectiveError: another host has other callbacks.
        """
        if self._tuning is None:
            return
        seconds = time.perf_counter() - self._start_seconds
        before = self._steps.end(batch)
        self._left_to_warm_up -= 1
        if self._left_to_warm_up < 0:
            self._seconds.append(seconds / (self._steps.done - before))
        if len(self._seconds) >= self._executions:
            self._end_of_setting(self._tuning)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Goes back to the program's own sizes where the tuning has not ended."""
        if self._tuning is None:
            return
        self._tell(
            f"Autotune: the training ended after {len(self._tuning.trials)} settings, "
            "before one could be chosen; its own sizes stay. Train for longer, or give "
            "fewer settings, steps or rounds."
        )
        self._finish(self._own_setting)

    @property
    def _executions(self) -> int:
        """That are timed for a setting."""
        together = int(self.model.steps_per_execution)
        return max(LEAST_EXECUTIONS, math.ceil(self.steps / together))

    def _begin(self, setting: Setting) -> None:
        """From the next step on, `setting`."""
        self._seconds: list[float] = []
        self._left_to_warm_up = WARM_UP_EXECUTIONS
        self._start_seconds = time.perf_counter()
        self._use(setting)

    def _use(self, setting: Setting) -> None:
        self._pipeline.communication = dataclasses.replace(
            self._own,
            bucket_bytes=setting.bucket_bytes,
            first_bucket_bytes=setting.first_bucket_bytes,
        )
        if setting in self._functions:
            # Traced already, and as good as on the first day.
            self.model.train_function = self._functions[setting]
        else:
            self.model.make_train_function(force=True)
            self._functions[setting] = self.model.train_function

    def _end_of_setting(self, tuning: Tuning) -> None:
        setting = tuning.setting
        was_searching, first = tuning.is_searching, tuning.trials[0]
        trial = next(t for t in tuning.trials if t.setting == setting)
        tuning.note(1 / self._told(statistics.median(self._seconds)))
        if trial is first and was_searching:
            pairs = self._told(self._candidates(1 / (trial.speed or 1.0)))
            settings = [Setting(*pair) for pair in pairs]
            tuning.search(InOrder(settings), {})
        if was_searching:
            number = tuning.trials.index(trial)
            self._tell(line_of_trial(number, trial, first, self._space, OWN))
        else:
            self._tell(line_of_round(trial, first, OWN))
        tuning.go_on()
        if tuning.setting is not None:
            self._begin(tuning.setting)
            return
        verdict = tuning.verdict()
        for line in outcome(verdict, tuning.trials, OWN):
            self._tell(line)
        self._finish(verdict.winner)
        self._tell(f"communication={communication_line(self._pipeline.communication)}")

    def _candidates(self, step_seconds: float) -> list[tuple[int, int]]:
        """Pairs of sizes to try, the most promising first."""
        return chosen_pairs(
            self._space,
            self._own_setting,
            step_seconds,
            link=getattr(self.model.distribute_strategy, "link", None),
            most=self.settings,
            sizes=self.sizes,
        )

    def _told(self, mine: Any) -> Any:
        """What worker 0 has, on all hosts, which are all here."""
        strategy = self.model.distribute_strategy
        told = gather_from_hosts(strategy, {"autotune": mine}, "tuning")[0]
        if not isinstance(told, dict) or "autotune" not in told:
            raise CollectiveError(
                "Worker 0 does not tune where this worker does. Give every worker the "
                "same callbacks, in the same order."
            )
        return told["autotune"]

    def _finish(self, setting: Setting) -> None:
        self._use(setting)
        self.chosen = self._pipeline.communication
        self._tuning, self._functions = None, {}

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        if getattr(self.model.distribute_strategy, "is_chief", True):
            print(f"tfdp: {line}", flush=True)


# Where sizes of buckets can be tried online, and which.


# What the cores do while a sum crosses a link; the simulator's order hardly asks.
COMPUTE_SHARE = 0.5


def checked_pairs(sizes: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """Pairs (bucket_bytes, first_bucket_bytes).

    Raises:
      ConfigurationError: they are none, or there are none.
    """
    found = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in sizes)
    for pair in found:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not all(is_whole(size, least=1) for size in pair):
            raise ConfigurationError(
                "sizes must be pairs (bucket_bytes, first_bucket_bytes) of ints of at "
                f"least 1. Received in it: {pair!r}."
            )
    if not found:
        raise ConfigurationError("sizes must hold a pair at least. Received: none.")
    return found


def why_refused(model: keras.Model) -> str | None:
    """Why nothing may be tried in trainings of `model`; None: it may."""
    strategy = model.distribute_strategy
    if model.run_eagerly:
        return (
            "the model was compiled with run_eagerly=True, where there are no buckets. "
            "Compile with run_eagerly=False, or leave the callback out."
        )
    if getattr(strategy, "living", None) is not None or any(
        getattr(optimizer, "sync", None) is not None
        for optimizer in optimizers_of(model)
    ):
        return (
            "with sync= (LocalSGD, DiLoCo) most steps send nothing, and what a few "
            "steps take says nothing of the meetings. Leave the callback out."
        )
    if strategy.extended.reducer.compressed is not None:
        return (
            "what compression did not send is kept from step to step. `tfdp tune "
            "--allow-lossy` tries settings with it, in trainings of their own."
        )
    if strategy.shard in ("gradients", "parameters"):
        return (
            f"with shard={strategy.shard!r} bucket_bytes also bounds what is in "
            "memory at once, and a larger one may not fit. `tfdp tune --memory` tries "
            "what does."
        )
    return None


def why_nothing_acts(pipeline: GradientPipeline) -> str | None:
    """Why sizes of buckets make no difference; None: they do."""
    if pipeline.engine.replicas == 1:
        return "one replica sends nothing."
    if not pipeline.engine.reduces_buckets:
        return (
            f"the engine {pipeline.engine.name!r} hands over each gradient alone, so "
            "there are no buckets. `tfdp tune` tries other engines."
        )
    return None


def space_of(model: keras.Model, pipeline: GradientPipeline) -> Space:
    """The sizes that make different buckets of the model's gradients."""
    topology = pipeline.engine.topology
    place = Place(
        topology.hosts,
        topology.devices_per_host,
        rows=topology.num_replicas,
        automatic_engine=pipeline.engine.name,
    )
    gradients = []
    for variable in model.trainable_variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        elements = math.prod(variable.shape)
        bits = int("".join(sign for sign in dtype if sign.isdigit()) or 32)
        # A layer's work grows with its weights, near enough for an order.
        gradients.append(Gradient(elements * bits // 8, float(elements), dtype))
    if not gradients:
        raise ConfigurationError("Autotune: the model has no weights to train.")
    profile = ModelProfile(model.name, tuple(gradients))
    knobs = {
        name: values
        for name, values in knobs_of(place).items()
        if name.endswith("_bytes")
    }
    return Space(place, knobs, profile)


def chosen_pairs(
    space: Space,
    own: Setting,
    step_seconds: float,
    *,
    link: HostLink | None,
    most: int,
    sizes: Sequence[tuple[int, int]] | None,
) -> list[tuple[int, int]]:
    """The sizes to try beside the program's own, the most promising first.

    All hosts must ask, since their link is timed; what worker 0 gets is what counts.

    Args:
      space: of the model.
      own: the program's own.
      step_seconds: of a step with these.
      link: between hosts; None: there is one.
      most: how many.
      sizes: pairs that the program names; None: all that make a difference.
    """
    between = None
    if link is not None and link.workers > 1:
        speed = speed_of_sums(link)
        between = Link(
            speed.latency_seconds, speed.bytes_per_second, compute_share=COMPUTE_SHARE
        )
    if sizes is not None:
        candidates = [Setting(*pair) for pair in sizes]
    else:
        pairs = [(b, f) for b in BUCKET_BYTES for f in FIRST_BUCKET_BYTES]
        candidates = [*space.settings, *(Setting(*pair) for pair in pairs)]
    facts = TrialFacts(_required(space.model), step_seconds, between)
    tried: set[tuple[Bucket, ...]] = {space.buckets(own)}
    found: list[Setting] = []
    for setting in sorted(
        candidates,
        key=lambda each: -round(predicted_speed(each, facts, space.place, own), 9),
    ):
        # Those that make the same buckets are the same training.
        if (buckets := space.buckets(setting)) not in tried:
            tried.add(buckets)
            found.append(setting)
    return [(each.bucket_bytes, each.first_bucket_bytes) for each in found[:most]]


def _required(model: ModelProfile | None) -> ModelProfile:
    if model is None:
        raise RuntimeError("a space without a model")
    return dataclasses.replace(model)
