"""`RunRecord`: records a `fit` in a small file, for `tfdp report`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import secrets
import time
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.frames import fits_around
from tfdp.callbacks.step_count import StepClock, warn_unless_first
from tfdp.callbacks.traffic import TrafficReader, transport_of
from tfdp.checks import is_number
from tfdp.cluster import restarts
from tfdp.cluster.machine import (
    describe_machine,
    installed_versions,
    resident_and_peak_bytes,
)
from tfdp.errors import ConfigurationError, RunRecordWarning
from tfdp.step.observers import StepMeter, attach
from tfdp.strategies.gather_from_hosts import gather_from_hosts
from tfdp.tools.runs.entries import (
    MOST_NAMES,
    MOST_TEXT,
    End,
    Entry,
    Epoch,
    Said,
    Start,
    Steps,
)
from tfdp.tools.runs.run_file import RunFile, steps_of_line

# Least time between memory queries, which cost as much as the rest of a step's record.
MEMORY_SECONDS = 0.1
MEMORY = ("resident_bytes", "peak_bytes", "device_bytes", "device_peak_bytes")


@dataclasses.dataclass
class _Line:
    """The steps of the next line."""

    most_steps: int  # writes the line after this many
    sent_before: tuple[int | None, int | None]  # bytes within and between hosts
    exchange_before: float | None  # seconds in exchanges before the line
    steps: int = 0
    batch: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    validation_seconds: float = 0.0
    longest_seconds: float = 0.0
    input_seconds: float | None = 0.0


class RunRecord(keras.callbacks.Callback):
    """Records a `fit` step by step, for `tfdp report`.

    Records for each step its duration, the time it waited for the batch and in
    exchanges with other workers, samples, bytes sent within and between hosts, memory
    and the loss; for each epoch Keras' metrics; and once the settings, versions and
    machines. `tfdp report DIRECTORY` makes a page of it: where the time went,
    stragglers, and advice.

    Every worker appends lines to its own file, `worker-0.jsonl` and so on: a killed
    process leaves its record up to then, and a restarted training continues the files.
    After 1,000 steps two of them share a line, after 3,000 four, and so on: a million
    steps are some 10,000 lines of 400 bytes, and a line for each epoch.

    Give it to every worker, as the first callback: time in callbacks after it counts as
    "between steps", not as a step. To show single steps on the same page, let
    `StepTimeline` write into the same directory.

    Args:
      directory: of this run only; created if missing. Hosts may have one each: copy the
        files together for the report.

    Raises:
      ConfigurationError: when training starts: the directory cannot be written.

    Warns:
      RunRecordWarning: a line could not be written (a full disk), and recording stops,
        though not the training; or another callback precedes it in the list.

    Cost: a trace of the step at the beginning and at the end of training, and some 0.3
    ms per step. Keras waits for each batch before it starts the next. Nothing without
    it.

    Omits what is unknown: samples and waiting for batches under a strategy that is not
    tfdp's, waiting for batches with `steps_per_execution` above 1, time in exchanges
    with `Communication(engine="tensorflow")` between hosts.

    ```python
    import tempfile

    import keras
    import numpy as np
    import tfdp

    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    folder = tempfile.mkdtemp()
    x = np.ones((64, 4), "float32")
    record = tfdp.callbacks.RunRecord(folder)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[record])
    print(record.path)  # and then: tfdp report FOLDER
    ```
    """

    def __init__(self, directory: str | os.PathLike[str]):
        super().__init__()
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            text = f"directory must be a path. Received: {directory!r}."
            raise ConfigurationError(text)
        self.directory = os.fspath(directory)
        #: This worker's file; None before training begins.
        self.path: os.PathLike[str] | None = None
        self._file: RunFile | None = None
        self._reader: TrafficReader | None = None
        self._meter: StepMeter | None = None
        self._clock: StepClock | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Writes the start; raises ConfigurationError, see the class."""
        self._began = self._ended = time.perf_counter()
        self._done = 0
        self._line: _Line | None = None
        self._epoch = 0
        self._is_within_epoch = False
        self._memory_read = -MEMORY_SECONDS
        self._pending_validation = self._validated = self._test_began = 0.0
        strategy = self.model.distribute_strategy
        cluster = getattr(strategy, "cluster", None)
        worker, workers = (0, 1) if cluster is None else (cluster.rank, cluster.workers)
        self._is_elastic = getattr(strategy, "elastic_hosts", None) is not None
        warn_unless_first(self)
        self._close()  # left open by a training that failed
        self._file = RunFile(self.directory, worker)
        self.path = self._file.path
        session, hosts = self._session(strategy)
        self._session_id = session
        self._write(
            Start(
                session,
                worker,
                workers,
                self._replicas(strategy, workers),
                platform.node()[:200],
                time.time(),
                self.params.get("steps") or None,
                restarts(),
                tuple(hosts) if worker == 0 else (),
                settings_of(self.model, self.params),
                {name: str(v) for name, v in installed_versions().items()},
                machine_facts(),
            )
        )
        self._begin_to_count(strategy)
        self._samples = self._samples_now()

    def _session(self, strategy: Any) -> tuple[str, list[str]]:
        """The name that all workers share for this start, and their machines."""
        mine = {"session": secrets.token_hex(8), "host": platform.node()[:200]}
        # Elastic hosts start independently and must not wait for each other.
        if self._is_elastic or not hasattr(strategy, "gather_bytes"):
            return mine["session"], [mine["host"]]
        found = gather_from_hosts(strategy, mine, "the record of the run")
        return str(found[0]["session"]), [str(each["host"]) for each in found]

    def _replicas(self, strategy: Any, workers: int) -> int:
        here = len(devices_here(strategy))
        return max(int(strategy.num_replicas_in_sync), here * workers)

    def _begin_to_count(self, strategy: Any) -> None:
        self._transport: Any = None
        with contextlib.suppress(ConfigurationError):  # no traffic count available
            self._transport = transport_of(self.model, "RunRecord")
            self._reader = TrafficReader(self._transport)
        if hasattr(strategy.extended, "current_step"):  # tfdp's own strategies
            self._meter = StepMeter()
            self._detach_meter = attach(self.model, self._meter)
            self.model.make_train_function(force=True)
        self._clock = StepClock(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._validated, self._is_within_epoch = epoch, 0.0, True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch
        if self._line is None:
            exchange, steps = self._exchange_seconds(), steps_of_line(self._done)
            self._line = _Line(steps, self._sent(), exchange)
        if self._clock is not None:
            self._clock.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records a step, and writes the line when it is full."""
        now, line, clock = time.perf_counter(), self._line, self._clock
        if line is None or clock is None:
            return
        steps = self._steps_made(batch)
        self._done += steps
        seconds = now - self._ended
        line.steps += steps
        line.batch = self._first_batch + steps
        line.seconds += seconds
        line.step_seconds += now - clock.began
        line.validation_seconds += self._pending_validation
        line.longest_seconds = max(line.longest_seconds, seconds)
        waited = self._input_seconds(now, clock)
        is_known = waited is not None and line.input_seconds is not None
        line.input_seconds = line.input_seconds + waited if is_known else None  # type: ignore[operator]
        self._pending_validation, self._ended = 0.0, now
        self._loss = (logs or {}).get("loss")
        if line.steps >= line.most_steps:
            self._write_line()

    def _steps_made(self, batch: int) -> int:
        """Steps made in the execution that ends; Keras counts the last one as full."""
        together = batch - self._first_batch + 1
        if together > 1 and self._meter is not None:
            return self._meter.steps - self._done
        epoch = self.params.get("steps")
        return min(together, epoch - self._first_batch) if epoch else together

    def _input_seconds(self, now: float, clock: StepClock) -> float | None:
        """Seconds from the start of a step until its batch arrived; None: unknown."""
        arrived = None if self._meter is None else self._meter.arrived_seconds
        # Within an execution of several steps only the last end is known.
        if arrived is None or self.model.steps_per_execution > 1:
            return None
        waited = arrived - clock.began_by_clock
        return min(max(0.0, waited), now - clock.began)

    def on_test_begin(self, logs: Any = None) -> None:
        """Ends the line, since validation sends bytes, too."""
        self._is_within_epoch = False
        self._write_line()
        self._test_began = time.perf_counter()

    def on_test_end(self, logs: Any = None) -> None:
        took = time.perf_counter() - self._test_began
        self._pending_validation += took
        self._validated += took

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._is_within_epoch = False
        self._write_line()
        numbers = {
            str(name)[:200]: float(value)
            for name, value in list((logs or {}).items())[:MOST_NAMES]
            if is_number(value)
        }
        self._write(
            Epoch(
                self._session_id,
                epoch,
                self._done,
                time.perf_counter() - self._began,
                self._validated,
                numbers,
            )
        )

    def note_straggler(self, step: int, text: str) -> None:
        """Records a sentence of `Stragglers` of the same `fit`."""
        self._write(Said(self._session_id, step, text))

    def on_train_end(self, logs: Any = None) -> None:
        self._write_line()
        seconds = time.perf_counter() - self._began
        self._write(End(self._session_id, self._done, seconds))
        is_metered = self._meter is not None
        self._close()
        if is_metered:
            self.model.make_train_function(force=True)

    def _close(self) -> None:
        for part in (self._file, self._reader, self._clock):
            if part is not None:
                part.close()
        if self._meter is not None:
            self._detach_meter()
        self._file = self._reader = self._meter = self._clock = None

    def _write_line(self) -> None:
        line, self._line = self._line, None
        if line is None or not line.steps:
            return
        samples_before, self._samples = self._samples, self._samples_now()
        within, between = map(_difference, self._sent(), line.sent_before)
        memory = dict(zip(MEMORY, self._memory(), strict=True))
        self._write(
            Steps(
                self._session_id,
                self._done,
                line.steps,
                self._epoch,
                line.batch,
                self._ended - self._began,
                line.seconds,
                line.step_seconds,
                line.validation_seconds,
                line.longest_seconds,
                line.input_seconds,
                _difference(self._exchange_seconds(), line.exchange_before),
                _difference(self._samples, samples_before),
                within,
                between,
                loss=float(self._loss) if is_number(self._loss) else None,
                **memory,
            )
        )

    def _sent(self) -> tuple[int | None, int | None]:
        if self._reader is None:
            return None, None
        within, between = self._reader.sent()
        # Elastic exchanges between hosts bypass the engine.
        return within, None if self._is_elastic else between

    def _exchange_seconds(self) -> float | None:
        if self._reader is None or self._is_elastic:
            return None
        if self._transport is None:
            return 0.0
        seconds: float | None = self._transport.seconds_between_hosts
        return seconds

    def _samples_now(self) -> int | None:
        return None if self._meter is None else self._meter.samples

    def _memory(self) -> tuple[int | None, ...]:
        """Memory of process and GPUs, now and peak; at most every MEMORY_SECONDS."""
        now = time.perf_counter()
        if now - self._memory_read < MEMORY_SECONDS and self._is_within_epoch:
            return None, None, None, None
        self._memory_read = now
        device = device_bytes(self.model.distribute_strategy) or (None, None)
        try:
            return *resident_and_peak_bytes(), *device
        except OSError:
            return None, None, *device

    def _write(self, entry: Entry) -> None:
        if self._file is None:
            return
        try:
            self._file.add(entry)
        except OSError as error:
            self._file.close()
            self._file = None
            warnings.warn(
                f"The run is recorded no further: {self.path} cannot be written "
                f"({error.strerror}). Training goes on.",
                RunRecordWarning,
                stacklevel=2,
            )


def _difference(now: Any, before: Any) -> Any:
    return None if now is None or before is None else max(0, now - before)


def settings_of(model: keras.Model, params: Mapping[str, Any]) -> dict[str, str]:
    """Strategy, exchange, model, optimizer and batch; `params` of Keras' callbacks."""
    strategy = model.distribute_strategy
    is_ours = type(strategy).__module__.startswith("tfdp.")
    found: dict[str, Any] = {
        "strategy": repr(strategy) if is_ours else type(strategy).__name__,
        "communication": getattr(strategy, "communication", None),
        "shard": getattr(strategy, "shard", None),
        "model": f"{model.name}{_weight_counts(model)}",
        "optimizer": _optimizer_classes(model.optimizer),
        "loss": _name_of(model.loss),
        "dtype policy": model.dtype_policy.name,
        "batch": _batch_size(model),
        "steps per epoch": params.get("steps"),
        "epochs": params.get("epochs"),
        "steps per execution": model.steps_per_execution,
        "compiled by XLA": model.jit_compile,
        "eager": model.run_eagerly,
    }
    return {n: str(v)[:MOST_TEXT] for n, v in found.items() if v is not None}


def machine_facts() -> dict[str, str]:
    """This machine: its name, system, processor, cores and memory."""
    facts = {"host": platform.node(), **describe_machine()}
    return {name: str(value)[:MOST_TEXT] for name, value in facts.items() if value}


def devices_here(strategy: Any) -> list[str]:
    """This process's devices of a strategy."""
    try:
        return [str(device) for device in strategy.extended.worker_devices]
    except (AttributeError, RuntimeError):
        # TensorFlow's default: the first GPU, if there is one.
        devices = tf.config.list_logical_devices()
        devices.sort(key=lambda device: device.device_type != "GPU")
        return [device.name for device in devices[:1]]


def device_bytes(strategy: Any) -> tuple[int, int] | None:
    """Memory in use and peak of the fullest GPU; None: no GPU is used."""
    names = [tf.DeviceSpec.from_string(device) for device in devices_here(strategy)]
    found = [
        tf.config.experimental.get_memory_info(f"GPU:{name.device_index}")
        for name in names
        if name.device_type == "GPU"
    ]
    if not found:
        return None
    return max(i["current"] for i in found), max(i["peak"] for i in found)


def _weight_counts(model: keras.Model) -> str:
    if not model.built:
        return ""
    # Shapes of sharded variables are global.
    count = sum(int(np.prod(weight.shape)) for weight in model.weights)
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    return f": {count:,} weights, {trainable:,} of them trained"


def _optimizer_classes(optimizer: Any) -> str | None:
    if optimizer is None:
        return None
    parts = [type(optimizer).__name__]
    while (optimizer := getattr(optimizer, "inner_optimizer", None)) is not None:
        parts.append(type(optimizer).__name__)
    return " of ".join(parts)


def _name_of(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(name or type(value).__name__)


def _batch_size(model: keras.Model) -> int | None:
    """Rows of a global batch, if `fit`'s data adapter states it."""
    for found in fits_around():
        if found["self"] is model:
            adapter = getattr(found["epoch_iterator"], "data_adapter", None)
            return getattr(adapter, "batch_size", None)
    return None
