"""`Checkpoint`: a `fit` that goes on where it was stopped, whatever stopped it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
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
    set_initial_epoch,
    stand_in_for_logs,
)
from tfdp.callbacks.other_callbacks import BeforeOthers, refuse_others
from tfdp.callbacks.step_count import is_due
from tfdp.callbacks.training_state import (
    HiddenOptimizers,
    KeptInput,
    Place,
    arrays_of,
    kept_logs,
    kept_of,
    put_back,
    put_back_logs,
    put_back_random,
    random_now,
    warn_of_what_is_lost,
)
from tfdp.checkpoint.checkpoint import Checkpoint as Files
from tfdp.checkpoint.checkpoint import Restored
from tfdp.checkpoint.entries import state_of
from tfdp.checkpoint.hosts import Hosts, StepAgreement, hosts_of
from tfdp.checks import is_number, is_whole
from tfdp.cluster import START_AGAIN, progress
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError

_fits = itertools.count()
TIME = "time"


@contextlib.contextmanager
def _warns(what_now: str) -> Iterator[None]:
    """A warning in the place of an error: a training outlives its checkpoints."""
    try:
        yield
    except DataError as error:
        warnings.warn(f"{error} {what_now}", CheckpointWarning, stacklevel=4)


class Checkpoint(keras.callbacks.Callback):
    """Saves all that a `fit` is while it trains, and goes on from there when it starts.

    Run the same script again, and `fit` continues where the newest whole checkpoint
    was written, also within an epoch, with the progress bar at the right step: weights,
    optimizer, schedule, loss scale, seeds, metrics of the running epoch, history,
    `EarlyStopping` and `ReduceLROnPlateau`, and the place in the data. With as many
    replicas as before it ends, bit for bit, where an undisturbed run would have ended.

    Batches that were trained on before are read again and left out. That they are the
    same ones needs an order that the program decides: shuffles with a seed, or
    `keras.utils.set_random_seed(1)` at the top of the script.

    SIGTERM and SIGINT (Ctrl-C) save after the step that is under way, on all hosts
    after the same one. After SIGTERM the process ends with exit code 75, "start me
    again"; after SIGINT with KeyboardInterrupt. A second Ctrl-C does not wait.

    Args:
      directory: of the checkpoints, one that all hosts see; see
        `tfdp.checkpoint.Checkpoint`. For one training: give another one its own.
      every_steps: save after as many training steps, from 1.
      every_seconds: save when as many seconds have passed on worker 0, above 0.
      every_epochs: save after as many epochs, from 1. Without any of the three: 1.
      keep: how many whole checkpoints are left, from 1.
      on_signal: whether to save on SIGTERM and SIGINT.

    Raises:
      ConfigurationError: when an argument is not as above; when training starts: a host
        cannot write to the directory, or sees another one; the model, or optimizer, is
        another one than in the checkpoints.
      DataError: when training starts: there are checkpoints, and none can be used, or
        the data has fewer batches than were trained on.

    Warns:
      CheckpointWarning: a checkpoint is damaged, and the one before was taken; one
        could not be written (a full disk), or is being written for longer than
        `timeout_seconds`, and training goes on; or the callbacks are others than
        before.

    Cost: training waits for a copy of what is saved in the host's memory, which is kept
    for the next one until training ends; see `tfdp.checkpoint.Checkpoint`. Keras waits
    for each batch before it starts the next.

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
        for name, value in (("steps", every_steps), ("epochs", every_epochs)):
            if value is not None and not is_whole(value, least=1):
                raise ConfigurationError(
                    f"every_{name} must be an int of at least 1, or None. Received: "
                    f"{value!r}."
                )
        if every_seconds is not None and not (
            is_number(every_seconds) and 0 < every_seconds < float("inf")
        ):
            raise ConfigurationError(
                "every_seconds must be a number above 0, or None. Received: "
                f"{every_seconds!r}."
            )
        if not isinstance(on_signal, bool):
            raise ConfigurationError(f"on_signal is a bool. Received: {on_signal!r}.")
        if every_steps is every_seconds is every_epochs is None:
            every_epochs = 1
        self._files = Files(directory, keep)
        self._every_steps, self._every_epochs = every_steps, every_epochs
        self._every_seconds = every_seconds
        self._on_signal = on_signal
        #: What this training went on from; None: it began anew.
        self.restored: Restored | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Goes on from the newest checkpoint, if there is one.

        Raises:
          ConfigurationError, DataError: see the class.
        """
        around = fit_around(self.model)
        if around is None:
            raise ConfigurationError(
                "tfdp.callbacks.Checkpoint knows the place in the data of model.fit. "
                "In a loop of your own use tfdp.checkpoint.Checkpoint."
            )
        # After all others, so that what is saved holds what they did; and what they
        # knew is given back before one of them sees the first epoch.
        listed = around.callbacks.callbacks
        self._others = [
            c for c in listed if c is not self and not isinstance(c, BeforeOthers)
        ]
        keepers = (keras.callbacks.BackupAndRestore, Checkpoint)
        refuse_others(self, keepers, "restore the training")
        around.callbacks.callbacks = [
            *(BeforeOthers(self._give_back), *self._others, self)
        ]
        self._passes = around.passes
        self._first_epoch = initial_epoch(self.model) or around.initial_epoch
        self._logs: dict[str, Any] = {}
        self._hosts: Hosts = hosts_of(self.model.distribute_strategy)
        self._files.check_directory(self.model)
        self._input = KeptInput(self._passes.adapter, self._hosts)
        self._synchronization = StepAgreement(self._hosts, f"fit {next(_fits)}")
        self._step = self._batch = 0
        self._epoch_of_program = initial_epoch(self.model)
        self._is_first_epoch = True
        warn_of_what_is_lost(self.model, self._passes, self._on_signal)
        self._hidden = HiddenOptimizers(self.model)
        self._passes.build(self.model)
        self.restored = self._files.restore(self.model, must_exist=False)
        if self.restored is not None:
            self._go_on(self.restored)
        progress.note_resumed(self._step)
        is_within = functools.partial(is_within_fit, passes=self._passes)
        self._signals = StopSignals(self._on_signal, is_within)
        self._saved_seconds = time.monotonic()

    def _go_on(self, restored: Restored) -> None:
        place = Place.of(restored)
        self._step = restored.step
        self._place = place
        self._first_epoch = place.first_epoch
        self._put_back_state = state_of(self.model) if place.batch else lambda: None
        place.check_batches(self._passes.batches_per_epoch)
        epochs = self.params["epochs"]
        set_initial_epoch(self.model, epochs if place.has_stopped else place.epoch)
        if place.has_stopped or place.epoch >= epochs:
            warnings.warn(
                f"There is nothing to train: {restored.directory} holds this training "
                f"after {place.epoch} epochs. "
                + (
                    "A callback had stopped it: for another training, give it another "
                    "directory."
                    if place.has_stopped
                    else "Ask for more epochs, or give another training its own "
                    "directory."
                ),
                CheckpointWarning,
                stacklevel=2,
            )
        self._batch = place.batch
        is_placed = self._input.put_back(self._known("input"), place.batches_read)
        self._passes.begin_at(place, is_placed=is_placed)
        if place.batch:
            logs = put_back_logs(restored.program.get("logs"))
            stand_in_for_logs(self.model, logs)
        self._say(
            f"tfdp: goes on from {restored.directory}: step {restored.step}, epoch "
            f"{place.epoch + 1}, batch {place.batch}"
            + (
                f"; reads {place.batches_read} batches again and leaves them out"
                if place.batches_read and not is_placed
                else ""
            )
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes back what others did at the beginning of an epoch that goes on."""
        self._epoch = epoch
        # `fit` has read it, and Keras would keep it for every later one of this model.
        set_initial_epoch(self.model, self._epoch_of_program)
        if self._is_first_epoch and self._batch:
            # They have done so before what was saved: a schedule that multiplies the
            # learning rate would do it twice.
            self._put_back_state()
            put_back_random(self._known("random"))
        if not self._is_first_epoch:
            self._batch = 0
        self._is_first_epoch = False
        self._put_back_state = lambda: None
        # The order of the epoch is drawn after this.
        self._random = random_now()

    def _known(self, name: str) -> Any:
        return None if self.restored is None else self.restored.program.get(name)

    def _give_back(self) -> None:
        """Gives the others, once, what they knew."""
        if not self._is_first_epoch or self.restored is None:
            return
        put_back_random(self._known("random"))
        known = self._known("callbacks")
        try:
            forgotten = put_back(self._others, known, self.restored.arrays)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            forgotten = ["callbacks"]
        if forgotten:
            warnings.warn(
                f"{', '.join(forgotten)} begin anew: there are others, or in another "
                f"order, than in the checkpoint {self.restored.directory}.",
                CheckpointWarning,
                stacklevel=2,
            )

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Saves when it is time, and ends the training after a signal."""
        stand_in_for_logs(self.model, {})
        self._logs = dict(logs or {})
        before = self._step
        self._step += batch + 1 - self._batch
        self._batch = batch + 1
        progress.note_step(self._step)
        every = self._every_steps
        is_now = every is not None and is_due(every, before, self._step)
        if self._signals.received is not None:
            self._synchronization.ask(f"signal {self._signals.received}")
        elif self._every_seconds is not None and self._hosts.is_chief:
            if time.monotonic() - self._saved_seconds >= self._every_seconds:
                self._synchronization.ask(TIME)
        reason = self._synchronization.after_step(self._step)
        if is_now or reason is not None:
            self._save(is_epoch_end=False)
        if reason is not None and reason != TIME:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves when it is time, and at the end of the training."""
        stand_in_for_logs(self.model, {})
        is_last = epoch + 1 >= self.params["epochs"] or self.model.stop_training
        every = self._every_epochs
        is_now = every is not None and is_due(every, epoch, epoch + 1)
        # Several hosts may meet after a step only.
        is_asked = self._signals.received is not None and self._hosts.count == 1
        if is_now or is_last or is_asked:
            self._save(is_epoch_end=True)
        if is_asked and not is_last:
            self._stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until all is on the disk.

        Raises:
          DataError: the last checkpoint could not be written, and a signal ends the
            program.

        Warns:
          CheckpointWarning: it could not be written, and `fit` returns all the same:
            else the trained model would be lost.
        """
        if self._is_first_epoch and self.restored is not None:
            # There was nothing to train, and the program goes on as if it had been.
            self._passes.draw_again(self._place)
            self._give_back()
        self._close()
        if self._signals.received is not None:
            # In the last validation, say: all is saved, and the signal still holds.
            self._stop()
        with _warns("The trained model is in memory: save it elsewhere."):
            self._files.forget_copies()

    def _close(self) -> None:
        self._signals.close()
        set_initial_epoch(self.model, self._epoch_of_program)

    def _save(self, *, is_epoch_end: bool) -> None:
        self._saved_seconds = time.monotonic()
        self._hidden.warn_of_used()
        ended, read = self._passes.place(is_epoch_end)
        place = Place(
            epoch=self._epoch + is_epoch_end,
            batch=0 if is_epoch_end else self._batch,
            passes_ended=ended,
            batches_read=read,
            batches_per_epoch=self._passes.batches_per_epoch,
            has_stopped=bool(is_epoch_end and self.model.stop_training),
            first_epoch=self._first_epoch,
            drawn_before=self._passes.drawn_before,
        )
        program = {
            "place": place.as_json(),
            "callbacks": kept_of(self._others),
            "random": random_now() if is_epoch_end else self._random,
            "logs": kept_logs(self._logs),
            "input": self._input.kept(read),
        }
        with _warns("Training goes on."):
            self._files.save(
                self.model,
                step=self._step,
                program=program,
                arrays=arrays_of(self._others),
            )

    def _stop(self) -> None:
        """Ends the program, once the checkpoint is on the disk."""
        number = self._signals.received
        self._files.forget_copies()
        if number == signal.SIGTERM:
            self._signals.end()
        self._close()
        self._say(f"tfdp: saved step {self._step} in {self._files.directory}; ends")
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(START_AGAIN)

    def _say(self, line: str) -> None:
        if self._hosts.is_chief:
            print(line, file=sys.stderr, flush=True)


# Signals that ask a program to end, noted until the training can save.


# A program that has been told to end, and goes on, hears SIGTERM again after this time.
ENDING_SECONDS = 60.0


class StopSignals:
    """Notes SIGTERM and SIGINT; a second SIGINT does what it did before.

    A second SIGTERM does nothing: launchers send one to all when the first worker has
    saved and ended, and whoever will not wait sends SIGKILL.

    Args:
      is_active: whether to; only the main thread can.
      is_within: whether a frame is of the training that looks at the notes.
    """

    def __init__(self, is_active: bool, is_within: Callable[[FrameType | None], bool]):
        self._is_within = is_within
        #: The first that came.
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        if is_active and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.getsignal(number)
                # Whom nobody can put back, and what is ignored, stays.
                if before is not None and before != signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # After an error in `fit` nobody would ever look at a note.
        if self._is_within(frame):
            if self.received is None:
                self.received = number
                return
            if number == signal.SIGTERM:
                return
        self.close()
        signal.raise_signal(number)

    def end(self) -> None:
        """As `close`, and a SIGTERM that comes while the program ends does nothing.

        Slurm sends one to the workers that are left as soon as the first has ended; who
        died of it would not end with the code that asks to be started again.
        """
        before = self._before.get(signal.SIGTERM)
        self.close()
        if before is not None and signal.getsignal(signal.SIGTERM) == before:
            signal.signal(signal.SIGTERM, _Ending(before))
            # Python puts handlers of its own back before the process is gone.
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)

    def close(self) -> None:
        """Puts back what was there before."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)


class _Ending:
    """Takes SIGTERM for a while, and is then what was there before."""

    def __init__(self, before: Any):
        self._before = before
        self._until = time.monotonic() + ENDING_SECONDS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.signal(number, self._before)
            signal.raise_signal(number)
