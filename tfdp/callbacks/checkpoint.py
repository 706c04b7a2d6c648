"""`Checkpoint`: a `fit` that goes on where it was stopped, whatever stopped it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import warnings
from typing import Any

import keras

from tfdp._private.fit_frames import fit_around
from tfdp._private.keras_models import initial_epoch, set_initial_epoch
from tfdp.callbacks.kept_callbacks import kept_of, plain, put_back, unplain
from tfdp.callbacks.kept_random import put_back_random, random_now
from tfdp.callbacks.place_in_fit import Place
from tfdp.callbacks.stop_signals import StopSignals
from tfdp.checkpoint.checkpoint import Checkpoint as Files
from tfdp.checkpoint.checkpoint import Restored
from tfdp.checkpoint.entries import metrics_of
from tfdp.checkpoint.hosts import Hosts, hosts_of
from tfdp.checkpoint.meeting import Meeting
from tfdp.checks import is_number, is_whole
from tfdp.cluster import START_AGAIN, progress
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError

__all__ = ["Checkpoint"]

_fits = itertools.count()
TIME = "time"


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
      ConfigurationError: when an argument is not as above; when training starts: the
        model, or optimizer, is another one than in the checkpoints.
      DataError: when training starts: there are checkpoints, and none can be used, or
        the data has fewer batches than were trained on.

    Warns:
      CheckpointWarning: a checkpoint is damaged, and the one before was taken; one
        could not be written (a full disk), and training goes on; or the callbacks are
        others than before.

    Cost: training waits for a copy of what is saved in the host's memory; see
    `tfdp.checkpoint.Checkpoint`. Keras waits for each batch before it starts the next.

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
        # After all others, so that what is saved holds what they did.
        listed = around.callbacks.callbacks
        around.callbacks.callbacks = [c for c in listed if c is not self] + [self]
        self._others = [c for c in listed if c is not self]
        self._passes = around.passes
        self._hosts: Hosts = hosts_of(self.model.distribute_strategy)
        self._meeting = Meeting(self._hosts, f"fit {next(_fits)}")
        self._step, self._saved_step, self._batch = 0, -1, 0
        self._epoch_of_program = initial_epoch(self.model)
        self._is_first_epoch = True
        self._warn_of_order()
        self._passes.build(self.model)
        self.restored = self._files.restore(self.model)
        if self.restored is not None:
            self._go_on(self.restored)
        progress.note_resumed(self._step)
        self._signals = StopSignals(self._on_signal)
        self._saved_seconds = time.monotonic()

    def _warn_of_order(self) -> None:
        found = self._passes.without_seed
        if found:
            warnings.warn(
                f"The order of the data is another one after a restart ({found[0]}): a "
                "fit that goes on within an epoch would leave out other samples than "
                "it has trained on. Call keras.utils.set_random_seed(1) at the top of "
                "the program, before the data is made, or give the shuffle a seed.",
                CheckpointWarning,
                stacklevel=3,
            )

    def _go_on(self, restored: Restored) -> None:
        place = Place.of(restored)
        self._step = self._saved_step = restored.step
        self._put_back_metrics = metrics_of(self.model)
        epochs = self.params["epochs"]
        set_initial_epoch(self.model, epochs if place.has_stopped else place.epoch)
        if place.has_stopped or place.epoch >= epochs:
            warnings.warn(
                f"There is nothing to train: {restored.directory} holds this training "
                f"after {place.epoch} epochs"
                + (", when a callback had stopped it" if place.has_stopped else "")
                + ". Ask for more epochs, or give another training its own directory.",
                CheckpointWarning,
                stacklevel=2,
            )
        self._batch = place.batch
        if place.batch:
            self._passes.end_with(self.model, unplain(restored.program.get("logs")))
        self._passes.begin_at(
            place.passes_ended,
            place.batches_read,
            place.epoch,
            place.batch,
            place.batches_per_epoch,
        )
        self._say(
            f"tfdp: goes on from {restored.directory}: step {restored.step}, epoch "
            f"{place.epoch + 1}, batch {place.batch}"
            + (
                f"; reads {place.batches_read} batches again and leaves them out"
                if place.batches_read
                else ""
            )
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gives the others, and the metrics of the epoch, what they knew."""
        self._epoch = epoch
        if self._is_first_epoch and self.restored is not None:
            put_back_random(self.restored.program.get("random"))
            known = self.restored.program.get("callbacks")
            if not put_back(self._others, known):
                warnings.warn(
                    "History, EarlyStopping, ReduceLROnPlateau and ModelCheckpoint "
                    "begin anew: there are others, or in another order, than in the "
                    f"checkpoint {self.restored.directory}.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            if self._batch:
                self._put_back_metrics()
        if not self._is_first_epoch:
            self._batch = 0
        self._is_first_epoch = False
        # The order of the epoch is drawn after this.
        self._random = random_now()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Saves when it is time, and ends the training after a signal."""
        before, self._batch = self._batch, batch + 1
        self._step += self._batch - before
        progress.note_step(self._step)
        is_due = self._every_steps is not None and (
            self._step // self._every_steps
            > (self._step - (self._batch - before)) // self._every_steps
        )
        if self._signals.received is not None:
            self._meeting.ask(f"signal {self._signals.received}")
        elif self._every_seconds is not None and self._hosts.is_chief:
            if time.monotonic() - self._saved_seconds >= self._every_seconds:
                self._meeting.ask(TIME)
        self._logs = logs
        reason = self._meeting.after_step(self._step)
        if is_due or reason is not None:
            self._save(is_epoch_end=False)
        if reason is not None and reason != TIME:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves when it is time, and at the end of the training."""
        is_last = epoch + 1 >= self.params["epochs"] or self.model.stop_training
        is_due = self._every_epochs is not None and not (epoch + 1) % self._every_epochs
        if is_due or is_last:
            self._save(is_epoch_end=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until all is on the disk.

        Raises:
          DataError: the last checkpoint could not be written.
        """
        self._close()
        self._files.wait()

    def _close(self) -> None:
        self._signals.close()
        # Keras keeps it for every later fit of this model.
        set_initial_epoch(self.model, self._epoch_of_program)

    def _save(self, *, is_epoch_end: bool) -> None:
        try:
            self._files.wait()
        except DataError as error:
            warnings.warn(f"{error} Training goes on.", CheckpointWarning, stacklevel=2)
        self._saved_step, self._saved_seconds = self._step, time.monotonic()
        ended, read = self._passes.place(is_epoch_end)
        place = Place(
            epoch=self._epoch + is_epoch_end,
            batch=0 if is_epoch_end else self._batch,
            passes_ended=ended,
            batches_read=read,
            batches_per_epoch=self._passes.batches_per_epoch,
            has_stopped=bool(is_epoch_end and self.model.stop_training),
        )
        program = {
            "place": place.as_json(),
            "callbacks": kept_of(self._others),
            "logs": {} if is_epoch_end else plain(self._logs),
            "random": random_now() if is_epoch_end else self._random,
        }
        self._files.save(self.model, step=self._step, program=program)

    def _stop(self) -> None:
        """Ends the program, once the checkpoint is on the disk."""
        number = self._signals.received
        self._files.wait()
        self._close()
        self._say(f"tfdp: saved step {self._step} in {self._files.directory}; ends")
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(START_AGAIN)

    def _say(self, line: str) -> None:
        if self._hosts.is_chief:
            print(line, file=sys.stderr, flush=True)
