"""`Checkpoint`: saves a `fit`, and resumes it after any stop."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras

from tfdp._private.keras_fit import fit_around, is_within_fit
from tfdp._private.keras_models import (
    initial_epoch,
    set_epoch_end_logs,
    set_initial_epoch,
)
from tfdp.callbacks.other_callbacks import BeforeOthers, Logs, refuse_others
from tfdp.callbacks.step_count import check_count, is_due
from tfdp.callbacks.training_state import (
    FitPosition,
    HiddenOptimizers,
    arrays_of,
    kept_logs,
    kept_of,
    place_of_host,
    put_back,
    put_back_logs,
    put_back_random,
    random_now,
    warn_of_unsaved_state,
)
from tfdp.checkpoint.checkpoint import Checkpoint as Files
from tfdp.checkpoint.checkpoint import Restored
from tfdp.checkpoint.entries import state_of
from tfdp.checkpoint.hosts import Hosts, StepAgreement, hosts_of
from tfdp.checks import is_number
from tfdp.cluster import START_AGAIN, progress
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError
from tfdp.step.find_optimizers import optimizers_of

_fits = itertools.count()
TIME = "time"
# Until then a program that is exiting ignores SIGTERM.
ENDING_SECONDS = 60.0


@contextlib.contextmanager
def _warns(what_now: str) -> Iterator[None]:
    """Turns an error into a warning: training continues without the checkpoint."""
    try:
        yield
    except DataError as error:
        warnings.warn(f"{error} {what_now}", CheckpointWarning, stacklevel=4)


class Checkpoint(keras.callbacks.Callback):
    """Saves the whole state of a `fit` while it trains, and resumes from it.

    Run the same script again, and `fit` resumes from the newest whole checkpoint, also
    within an epoch, with the progress bar at the right step: weights, optimizer,
    schedule, loss scale, seeds, metrics of the running epoch, history, `EarlyStopping`
    and `ReduceLROnPlateau`, and the place in the data. With the same number of replicas
    the result is bit-identical to an uninterrupted run.

    Batches that were trained on are read again and skipped. For them to be the same
    ones the program must decide the order: shuffles with a seed, or
    `keras.utils.set_random_seed(1)` at the top of the script.

    SIGTERM and SIGINT (Ctrl-C) save after the current step, the same one on all hosts
    (with `sync=Asynchronous()` each host's own).
    After SIGTERM the process exits with code 75, "restart me"; after SIGINT with
    KeyboardInterrupt. A second Ctrl-C does not wait.

    Args:
      directory: of this training's checkpoints; all hosts must see it; see
        `tfdp.checkpoint.Checkpoint`.
      every_steps: save after this many training steps, from 1. A save that is due
        after the last step of an epoch is made when the epoch ends.
      every_seconds: save when this many seconds have passed on worker 0, above 0.
      every_epochs: save after this many epochs, from 1. Without any of the three: 1.
      keep: how many whole checkpoints to keep, from 1.
      on_signal: whether to save on SIGTERM and SIGINT.

    Raises:
      ConfigurationError: an argument is not as above; when training starts: a host
        cannot write to the directory, or sees another one; the model, or optimizer,
        differs from the checkpoint's.
      DataError: when training starts: there are checkpoints, but none can be used, or
        the data has fewer batches than were trained on.

    Warns:
      CheckpointWarning: a checkpoint is damaged, and the one before is used; one could
        not be written, or takes longer than `timeout_seconds`, and training continues;
        or the callbacks differ from before.

    Cost: training waits for a copy of the state in host memory, which is reused until
    training ends. Keras waits for each batch before it starts the next.

    ```python
    import tempfile

    import keras
    import numpy as np
    import tfdp

    keras.utils.set_random_seed(1)
    folder = tempfile.mkdtemp()


    def train(epochs):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        callback = tfdp.callbacks.Checkpoint(folder, every_steps=2)
        data = np.ones((8, 4)), np.ones((8, 1))
        return model.fit(
            *data, batch_size=2, epochs=epochs, verbose=0, callbacks=[callback]
        )


    train(epochs=1)
    print(train(epochs=2).epoch)  # goes on with the second epoch: [0, 1]
    ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        keep: int = 2,
        on_signal: bool = True,
    ):
        super().__init__()
        check_count("every_steps", every_steps)
        check_count("every_epochs", every_epochs)
        if every_seconds is not None and not (
            is_number(every_seconds) and 0 < every_seconds < float("inf")
        ):
            raise ConfigurationError(
                "every_seconds must be a number above 0, or None. Received: "
                f"{every_seconds!r}."
            )
        if not isinstance(on_signal, bool):
            raise ConfigurationError(
                f"on_signal must be a bool. Received: {on_signal!r}."
            )
        if every_steps is every_seconds is every_epochs is None:
            every_epochs = 1
        self._files = Files(directory, keep)
        self._every_steps, self._every_epochs = every_steps, every_epochs
        self._every_seconds = every_seconds
        self._on_signal = on_signal
        #: What this training resumed from; None: it started from scratch.
        self.restored: Restored | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Resumes from the newest checkpoint, if there is one."""
        around = fit_around(self.model)
        if around is None:
            raise ConfigurationError(
                "tfdp.callbacks.Checkpoint works in model.fit only. In a custom loop "
                "use tfdp.checkpoint.Checkpoint."
            )
        # Last of all, to save what the others did; the others get their state back
        # before any of them sees the first epoch.
        listed = [c for c in around.callbacks.callbacks if c is not self]
        self._others = [c for c in listed if not isinstance(c, BeforeOthers)]
        keepers = (keras.callbacks.BackupAndRestore, Checkpoint)
        refuse_others(self, keepers, "restore the training")
        first = BeforeOthers(self._restore_others)
        around.callbacks.callbacks = [first, *self._others, self]
        self._passes = around.passes
        self._first_epoch = initial_epoch(self.model) or around.initial_epoch
        self._logs: dict[str, Any] = {}
        self._hosts: Hosts = hosts_of(self.model.distribute_strategy)
        self._files.check_directory(self.model)
        from tfdp.data.grain import KeptInput  # where there is a fit to store

        self._input = KeptInput(self._passes.adapter, self._hosts)
        # With `sync=Asynchronous()` hosts make steps, and save, at their own pace.
        trainings = [getattr(o, "rounds", None) for o in optimizers_of(self.model)]
        # Others have no such method; its module is loaded only where it is used.
        paced = [one for one in trainings if hasattr(one, "make_equal_to_save")]
        self._own_pace = paced[0] if paced else None
        if self._own_pace is not None:
            self._own_pace.save = functools.partial(self._after_step, have_met=True)
            self._own_pace.poll = self._poll
        name, in_step = f"fit {next(_fits)}", self._own_pace is None
        self._agreement = StepAgreement(self._hosts, name, in_step=in_step)
        self._step = self._batch = 0
        self._epoch_of_program = initial_epoch(self.model)
        self._is_first_epoch, self._is_due = True, False
        self._batches_before: int | None = None
        warn_of_unsaved_state(self.model, self._passes, self._on_signal)
        self._hidden = HiddenOptimizers(self.model)
        self._passes.build(self.model)
        self.restored = self._files.restore(self.model, must_exist=False)
        if self.restored is not None:
            self._resume(self.restored)
        progress.note_resumed(self._step)
        is_within = functools.partial(is_within_fit, passes=self._passes)
        self._signals = StopSignals(self._on_signal, is_within)
        self._saved_seconds = time.monotonic()

    def _resume(self, restored: Restored) -> None:
        if self._own_pace is not None:
            restored = place_of_host(restored, self._hosts)
        place = FitPosition.of(restored)
        self._place, self._first_epoch = place, place.first_epoch
        self._step, self._batch = restored.step, place.batch
        self._put_back_state = state_of(self.model) if place.batch else lambda: None
        place.check_batches(self._passes.batches_per_epoch)
        epochs = self.params["epochs"]
        set_initial_epoch(self.model, epochs if place.has_stopped else place.epoch)
        if place.has_stopped or place.epoch >= epochs:
            remedy = "Request more epochs, or use another directory."
            if place.has_stopped:
                remedy = "A callback had stopped it: use another directory."
            warnings.warn(
                f"There is nothing to train: {restored.directory} holds this training "
                f"after {place.epoch} epochs. {remedy}",
                CheckpointWarning,
                stacklevel=2,
            )
        is_placed = self._input.put_back(self._saved("input"), place.batches_read)
        self._passes.begin_at(place, is_placed=is_placed)
        if place.batch:
            logs = put_back_logs(restored.program.get("logs"))
            set_epoch_end_logs(self.model, logs)
        skips = ""
        if place.batches_read and not is_placed:
            skips = f"; reads {place.batches_read} batches again and skips them"
        if place.passes_read and self._passes.reads_passes_again:
            # Its shuffles depend on how far each pass was read.
            skips += f"; reads {place.passes_read} whole passes over the data again"
        self._print(
            f"tfdp: resumes from {restored.directory}: step {restored.step}, epoch "
            f"{place.epoch + 1}, batch {place.batch}{skips}"
        )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Undoes what other callbacks did at the start of an epoch that is resumed."""
        self._epoch = epoch
        # `fit` has read it, and Keras would use it in every later `fit` of this model.
        set_initial_epoch(self.model, self._epoch_of_program)
        if self._is_first_epoch and self._batch:
            # They did so before the save: a schedule could multiply the rate twice.
            self._put_back_state()
            put_back_random(self._saved("random"))
            self._show_place()
        if not self._is_first_epoch:
            self._batch = 0
        self._is_first_epoch = False
        self._put_back_state = lambda: None
        # The order of the epoch is drawn after this.
        self._random = random_now()

    def _show_place(self) -> None:
        """Tells Keras' progress bar of unknown length where it is: at the last batch
        none follows, and it would print neither this epoch nor the next ones."""
        for callback in self._others:
            is_bar = isinstance(callback, keras.callbacks.ProgbarLogger)
            if is_bar and self.params["steps"] is None:
                callback.on_train_batch_end(self._batch - 1)

    def _saved(self, name: str) -> Any:
        return None if self.restored is None else self.restored.program.get(name)

    def _restore_others(self) -> None:
        """Restores the other callbacks' state, once."""
        if not self._is_first_epoch or self.restored is None:
            return
        put_back_random(self._saved("random"))
        saved = self._saved("callbacks")
        try:
            missed = put_back(self._others, saved, self.restored.arrays)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            missed = ["callbacks"]
        if missed:
            warnings.warn(
                f"{', '.join(missed)} start from scratch: the callbacks, or their "
                f"order, differ from the checkpoint {self.restored.directory}.",
                CheckpointWarning,
                stacklevel=2,
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Saves when due, and ends the training after a signal."""
        set_epoch_end_logs(self.model, {})
        self._logs = dict(logs or {})
        before = self._step
        self._step += batch + 1 - self._batch
        self._batch = batch + 1
        progress.note_step(self._step)
        every = self._every_steps
        is_now = every is not None and is_due(every, before, self._step)
        self._poll()
        if self._own_pace is not None and self._hosts.count > 1 and is_now:
            is_now = False
            if self._hosts.is_chief:
                self._agreement.request(TIME)
        if self._every_seconds is not None and self._hosts.is_chief:
            if time.monotonic() - self._saved_seconds >= self._every_seconds:
                self._agreement.request(TIME)
        batches = self._batches_before or self._passes.batches_per_epoch
        is_last = batches is not None and self._batch >= batches
        self._after_step(is_now, is_last=is_last and self._own_pace is None)

    def _poll(self) -> None:
        if self._signals.received is not None:
            self._agreement.request(f"signal {self._signals.received}")

    def _after_step(
        self, is_now: bool = False, *, is_last: bool = False, have_met: bool = False
    ) -> None:
        """Saves if due; `is_last`: the end of the epoch is near, and saves instead."""
        reason = self._agreement.after_step(self._step)
        if reason is not None and self._own_pace is not None and not have_met:
            self._own_pace.make_equal_to_save()
        has_signal = reason is not None and reason != TIME
        is_now = is_now or reason is not None or self._is_due
        self._is_due = is_now and is_last and not has_signal
        if is_now and not self._is_due:
            self._save(is_epoch_end=False)
        if has_signal:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Saves when due, and at the end of the training."""
        set_epoch_end_logs(self.model, {})
        is_last = epoch + 1 >= self.params["epochs"] or self.model.stop_training
        every = self._every_epochs
        is_now = every is not None and is_due(every, epoch, epoch + 1)
        is_now = is_now or self._is_due
        # Keras counts a batch more where it learns the end by looking for it.
        self._is_due, self._batches_before = False, self._batch
        # Several hosts agree after a step only.
        has_signal = self._signals.received is not None and self._hosts.count == 1
        if is_now or is_last or has_signal:
            self._save(is_epoch_end=True)
        if has_signal and not is_last:
            self._stop()

    def on_train_end(self, logs: Logs = None) -> None:
        """Waits until everything is on disk.

        A failed save only warns, so that `fit` returns the trained model; after a
        signal it raises `DataError`.
        """
        if self._is_first_epoch and self.restored is not None:
            # There was nothing to train; the program continues as if it had been.
            self._passes.draw_again(self._place, is_over=True)
            self._restore_others()
        self._close()
        if self._signals.received is not None:
            # Such as in the last validation: all is saved, but the signal holds.
            self._stop()
        with _warns("The trained model is in memory: save it elsewhere."):
            self._files.forget_copies()

    def _close(self) -> None:
        self._signals.close()
        if self._own_pace is not None:
            self._own_pace.save = self._own_pace.poll = lambda: None
        set_initial_epoch(self.model, self._epoch_of_program)

    def _save(self, *, is_epoch_end: bool) -> None:
        self._saved_seconds = time.monotonic()
        self._hidden.warn_of_used()
        passes = self._passes.place(is_epoch_end)
        if self._own_pace is not None and self.params["steps"] is None:
            # A step may have found the end of the data.
            passes["batches_read"] = min(passes["batches_read"], self._batch)
        place = FitPosition(
            epoch=self._epoch + is_epoch_end,
            batch=0 if is_epoch_end else self._batch,
            **passes,
            batches_per_epoch=self._passes.batches_per_epoch,
            has_stopped=bool(is_epoch_end and self.model.stop_training),
            first_epoch=self._first_epoch,
            drawn_before=self._passes.drawn_before,
            read_before=self._passes.read_before,
        )
        program = {
            "place": place.as_json(),
            "callbacks": kept_of(self._others),
            "random": random_now() if is_epoch_end else self._random,
            "logs": kept_logs(self._logs),
            "input": self._input.kept(place.batches_read),
        }
        step = self._step
        if self._own_pace is not None:
            own = json.dumps({"step": step, "place": place.as_json()})
            places = list(map(json.loads, self._hosts.texts(own, "places of hosts")))
            program["places"], step = places, places[0]["step"]
        arrays = arrays_of(self._others)
        with _warns("Training continues."):
            self._files.save(self.model, step=step, program=program, arrays=arrays)

    def _stop(self) -> None:
        """Ends the program once the checkpoint is on disk."""
        number = self._signals.received
        self._files.forget_copies()
        if number == signal.SIGTERM:
            self._signals.end()
        self._close()
        self._print(
            f"tfdp: saved step {self._step} in {self._files.directory}; exits. The "
            "same command goes on from there"
        )
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(START_AGAIN)

    def _print(self, line: str) -> None:
        if self._hosts.is_chief:
            print(line, file=sys.stderr, flush=True)


class StopSignals:
    """Records SIGTERM and SIGINT; a second SIGINT calls the previous handler.

    A second SIGTERM does nothing: launchers send one to all workers when the first has
    saved and exited; SIGKILL ends a worker at once. Only the main thread can override
    handlers. `is_within` returns whether a frame belongs to the training.
    """

    def __init__(self, is_active: bool, is_within: Callable[[FrameType | None], bool]):
        self._is_within = is_within
        #: The first signal received.
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        if is_active and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.getsignal(number)
                # Ignored signals, and handlers that Python cannot restore, stay.
                if before is not None and before != signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # After an error in `fit` nothing reads `received`.
        if self._is_within(frame):
            if self.received is None:
                self.received = number
                return
            if number == signal.SIGTERM:
                return
        self.close()
        signal.raise_signal(number)

    def end(self) -> None:
        """Does what `close` does, and ignores SIGTERM while the program exits.

        Slurm sends one to the other workers as soon as the first has exited; it would
        replace the exit code that requests a restart.
        """
        before = self._before.get(signal.SIGTERM)
        self.close()
        if before is not None and signal.getsignal(signal.SIGTERM) == before:
            signal.signal(signal.SIGTERM, _Ending(before))
            # Python restores its handlers before the process is gone.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)

    def close(self) -> None:
        """Restores the previous handlers."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)


class _Ending:
    """Ignores SIGTERM for a while, and then calls the previous handler."""

    def __init__(self, before: Any):
        self._before = before
        self._until = time.monotonic() + ENDING_SECONDS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.signal(number, self._before)
            signal.raise_signal(number)
