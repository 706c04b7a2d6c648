"""`Autotune`: finds the fastest bucket sizes in the first steps of a training."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfdp.callbacks.other_callbacks import refuse_others
from tfdp.callbacks.step_count import StepCount
from tfdp.checks import check_whole, is_whole
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.link_speed import speed_of_sums
from tfdp.plan.buckets import Bucket
from tfdp.plan.communication import Communication
from tfdp.step.find_optimizers import optimizers_of, optimizers_with_sync
from tfdp.strategies.gather_from_hosts import gather_from_hosts, refuse_strategy
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.model import GradientSize, ModelProfile
from tfdp.tools.tune.proposal import COMPUTE_SHARE, TrialFacts, predicted_speed
from tfdp.tools.tune.space import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Setting,
    Space,
    TrialLayout,
    communication_line,
    knobs_of,
)
from tfdp.tools.tune.tuning import FINALISTS, LEAST_ROUNDS, ROUNDS, InOrder, Tuning
from tfdp.tools.tune.words import Terms, line_of_round, line_of_trial, outcome

# The first execution traces; the second one has cold caches.
WARM_UP_EXECUTIONS = 2
LEAST_EXECUTIONS = 3
OWN = Terms("the program's own sizes", "steps/s")


class Autotune(keras.callbacks.Callback):
    """Tries bucket sizes in the first steps of `fit`, and keeps the fastest.

    Each setting trains for some steps: first the program's own, then those that the
    simulator predicts to be fastest. The two best of them and the program's own are
    timed again in turn; the best replaces the program's own if the gain exceeds the
    differences between rounds (`tfdp.tools.tune.tuning`). All of these are ordinary
    training steps: no data is read twice. It logs what it tried, and ends with the
    `Communication(...)` to paste, which makes tuning unnecessary in the next training.

    On several hosts worker 0 times and decides, and all switch before the same step.
    Bucket sizes only decide which gradients travel together. Sums of two (two hosts, or
    two replicas under the engine "tensorflow") stay bitwise equal; with more, the order
    of additions depends on a gradient's place in its bucket, so the last bits may
    differ, as between two strategies with different sizes. `tfdp tune` tries engines,
    levels, shards and compression, too.

    On one replica, and with the engine "in_process", which sends each gradient alone,
    it logs that there is nothing to tune. After a restart from a checkpoint it tunes
    again.

    Args:
      steps: timed for each setting in each round, at least 3. With
        `steps_per_execution` whole executions are timed, at least 3.
      settings: to try in addition to the program's own, at least 1.
      rounds: that compare the best settings with the program's own, at least 2.
      sizes: pairs (bucket_bytes, first_bucket_bytes) to try; None: the simulator
        chooses. The program's own are always tried.

    Raises:
      ConfigurationError: an argument is invalid; when training starts: the strategy is
        not tfdp's or is of a TPU; `sync=` or `min_hosts`, where most steps send
        nothing; another `Autotune`; compression other than `wire_dtype`, which has
        error feedback; shard="gradients" or "parameters", where `bucket_bytes` also
        bounds the memory; `run_eagerly=True`.

    Cost: (settings + 1) + 3 rounds of `steps` + 2 steps at the speed of each setting,
    and a trace of the step and its graphs for each setting. Nothing afterwards. A
    training that ends before the tuning keeps its own sizes.

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
            check_whole(name, value, least)
        self.steps, self.settings, self.rounds = steps, settings, rounds
        self.sizes = None if sizes is None else checked_pairs(sizes)
        #: The result; None before the tuning ends.
        self.chosen: Communication | None = None
        #: The log.
        self.lines: list[str] = []
        self._tuning: Tuning | None = None
        self._reducer: Any = None
        self._own = Communication()

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts with the program's own sizes; raises ConfigurationError."""
        if self._tuning is not None:
            # A training that failed within a trial left the trial's sizes.
            self._reducer.communication = self._own
        self.lines, self.chosen, self._tuning = [], None, None
        strategy = self.model.distribute_strategy
        refuse_strategy(strategy, "Autotune")
        reason = why_refused(self.model)
        if reason is not None:
            raise ConfigurationError(f"Autotune cannot act here: {reason}")
        refuse_others(self, (Autotune,), "set sizes of buckets", of_strategy=True)
        self._reducer = strategy.extended.reducer
        self._own = self._reducer.communication
        reason = why_nothing_acts(self._reducer)
        if reason is not None:
            self.chosen = self._own
            self._log(f"Autotune has nothing to tune: {reason}")
            return
        sizes = self._own.bucket_bytes, self._own.first_bucket_bytes
        self._own_setting = Setting(*sizes)
        self._space = space_of(self.model, self._reducer)
        self._functions: dict[Setting, Any] = {}
        self._steps = StepCount()
        self._tuning = Tuning(
            self._own_setting,
            finalists=FINALISTS,
            rounds=self.rounds,
            most_trials=1 + self.settings,
        )
        self._begin(self._own_setting)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._tuning is None:
            return
        self._steps.begin(batch)
        self._start_seconds = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Times the execution, and switches to the next setting when due."""
        if self._tuning is None:
            return
        seconds = time.perf_counter() - self._start_seconds
        before = self._steps.end(batch)
        self._left_to_warm_up -= 1
        if self._left_to_warm_up < 0:
            self._seconds.append(seconds / (self._steps.done - before))
        executions = math.ceil(self.steps / int(self.model.steps_per_execution))
        if len(self._seconds) >= max(LEAST_EXECUTIONS, executions):
            self._end_of_setting(self._tuning)

    def on_train_end(self, logs: Any = None) -> None:
        """Restores the program's own sizes if the tuning has not ended."""
        if self._tuning is None:
            return
        self._log(
            f"Autotune: the training ended after {len(self._tuning.trials)} settings, "
            "before one was chosen; its own sizes stay. Train for longer, or use fewer "
            "settings, steps or rounds."
        )
        self._finish(self._own_setting)

    def _begin(self, setting: Setting) -> None:
        self._seconds: list[float] = []
        self._left_to_warm_up = WARM_UP_EXECUTIONS
        self._start_seconds = time.perf_counter()
        self._use(setting)

    def _use(self, setting: Setting) -> None:
        self._reducer.communication = dataclasses.replace(
            self._own,
            bucket_bytes=setting.bucket_bytes,
            first_bucket_bytes=setting.first_bucket_bytes,
        )
        if setting in self._functions:
            self.model.train_function = self._functions[setting]
        else:
            self.model.make_train_function(force=True)
            self._functions[setting] = self.model.train_function

    def _end_of_setting(self, tuning: Tuning) -> None:
        setting = tuning.setting
        was_searching, first = tuning.is_searching, tuning.trials[0]
        trial = next(t for t in tuning.trials if t.setting == setting)
        tuning.note(1 / self._from_chief(statistics.median(self._seconds)))
        if trial is first and was_searching:
            pairs = chosen_pairs(
                self._space,
                self._own_setting,
                1 / (trial.speed or 1.0),
                link=getattr(self.model.distribute_strategy, "link", None),
                most=self.settings,
                sizes=self.sizes,
            )
            settings = [Setting(*pair) for pair in self._from_chief(pairs)]
            tuning.search(InOrder(settings), {})
        if was_searching:
            number = tuning.trials.index(trial)
            self._log(line_of_trial(number, trial, first, self._space, OWN))
        else:
            self._log(line_of_round(trial, first, OWN))
        tuning.go_on()
        if tuning.setting is not None:
            self._begin(tuning.setting)
            return
        verdict = tuning.verdict()
        for line in outcome(verdict, tuning.trials, OWN):
            self._log(line)
        self._finish(verdict.winner)
        self._log(f"communication={communication_line(self._reducer.communication)}")

    def _from_chief(self, value: Any) -> Any:
        """Worker 0's value, on all hosts."""
        strategy = self.model.distribute_strategy
        found = gather_from_hosts(strategy, {"autotune": value}, "tuning")[0]
        if not isinstance(found, dict) or "autotune" not in found:
            raise CollectiveError(
                "Worker 0 does not tune where this worker does. Give every worker the "
                "same callbacks, in the same order."
            )
        return found["autotune"]

    def _finish(self, setting: Setting) -> None:
        self._use(setting)
        self.chosen = self._reducer.communication
        self._tuning, self._functions = None, {}

    def _log(self, line: str) -> None:
        self.lines.append(line)
        if getattr(self.model.distribute_strategy, "is_chief", True):
            print(f"tfdp: {line}", flush=True)


def checked_pairs(sizes: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """Pairs (bucket_bytes, first_bucket_bytes); raises ConfigurationError."""
    found = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in sizes)
    for pair in found:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not all(is_whole(size, least=1) for size in pair):
            raise ConfigurationError(
                "sizes must be pairs (bucket_bytes, first_bucket_bytes) of ints of at "
                f"least 1. Received: {pair!r}."
            )
    if not found:
        raise ConfigurationError(
            "sizes must contain at least one pair. Received: none."
        )
    return found


def why_refused(model: keras.Model) -> str | None:
    """Why `Autotune` must not act on trainings of `model`; None: it may."""
    strategy = model.distribute_strategy
    if model.run_eagerly:
        return (
            "the model was compiled with run_eagerly=True, where there are no buckets. "
            "Compile with run_eagerly=False, or leave the callback out."
        )
    is_elastic = getattr(strategy, "elastic_hosts", None) is not None
    if is_elastic or optimizers_with_sync(optimizers_of(model), strategy):
        return (
            "with sync= (LocalSGD, DiLoCo) most steps send nothing, so the time of a "
            "few steps does not measure the outer steps. Leave the callback out."
        )
    if strategy.extended.reducer.compressed is not None:
        return (
            "compression has error feedback from step to step. `tfdp tune "
            "--allow-lossy` tries settings with it, in separate trainings."
        )
    if strategy.shard in ("gradients", "parameters"):
        return (
            f"with shard={strategy.shard!r} bucket_bytes also bounds what is in "
            "memory at once, and a larger value may not fit. Use `tfdp tune --memory`."
        )
    return None


def why_nothing_acts(reducer: Any) -> str | None:
    """Why bucket sizes make no difference; None: they do."""
    if reducer.transport.replicas == 1:
        return "one replica sends nothing."
    if not reducer.transport.reduces_buckets:
        return (
            f"the engine {reducer.transport.name!r} sends each gradient alone, so "
            "there are no buckets. `tfdp tune` tries other engines."
        )
    return None


def space_of(model: keras.Model, reducer: Any) -> Space:
    """The sizes that make different buckets of the model's gradients."""
    topology = reducer.transport.topology
    place = TrialLayout(
        topology.hosts,
        topology.devices_per_host,
        rows=topology.num_replicas,
        automatic_engine=reducer.transport.name,
    )
    gradients = []
    for variable in model.trainable_variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        elements = math.prod(variable.shape)
        bits = int("".join(sign for sign in dtype if sign.isdigit()) or 32)
        # Assumes a layer's work proportional to its weights: enough to rank sizes.
        gradients.append(GradientSize(elements * bits // 8, float(elements), dtype))
    if not gradients:
        raise ConfigurationError("Autotune: the model has no weights to train.")
    profile = ModelProfile(model.name, tuple(gradients))
    knobs = {n: v for n, v in knobs_of(place).items() if n.endswith("_bytes")}
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
    """The sizes to try, the most promising first.

    Collective: it times the link between hosts, and worker 0's result counts.

    Args:
      space: of the model.
      own: the program's own setting.
      step_seconds: of a step with `own`.
      link: between hosts; None: there is one.
      most: the length of the result.
      sizes: pairs to choose from; None: all that make a difference.
    """
    between = None
    if link is not None and link.workers > 1:
        speed = speed_of_sums(link)
        latency, rate = speed.latency_seconds, speed.bytes_per_second
        between = Link(latency, rate, compute_share=COMPUTE_SHARE)
    if sizes is not None:
        candidates = [Setting(*pair) for pair in sizes]
    else:
        pairs = [(b, f) for b in BUCKET_BYTES for f in FIRST_BUCKET_BYTES]
        candidates = [*space.settings, *(Setting(*pair) for pair in pairs)]
    facts = TrialFacts(space.model, step_seconds, between)
    tried: set[tuple[Bucket, ...]] = {space.buckets(own)}
    found: list[Setting] = []
    for setting in sorted(
        candidates,
        key=lambda each: -round(predicted_speed(each, facts, space.place, own), 9),
    ):
        # Settings with equal buckets are the same training.
        if (buckets := space.buckets(setting)) not in tried:
            tried.add(buckets)
            found.append(setting)
    return [(each.bucket_bytes, each.first_bucket_bytes) for each in found[:most]]
