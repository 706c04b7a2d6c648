"""What other callbacks know, as a checkpoint of a `fit` keeps it."""

from __future__ import annotations

import itertools
import math
import random
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.grain_inputs import grain_input_of, own_state_of, shards_of
from tfdp._private.keras_fit import PassesOfData
from tfdp._private.keras_models import layers_within
from tfdp.checkpoint.checkpoint import Restored
from tfdp.checkpoint.hosts import Hosts
from tfdp.checks import is_number, is_whole
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError
from tfdp.files.checked_json import is_count
from tfdp.step.find_optimizers import optimizers_of

# Plain numbers. The weights that EarlyStopping holds are arrays, see `arrays_of`.
BEST = "best_weights"
ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: (
        *("best", "epochs_since_last_save", "_current_epoch"),
        *("_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
}


@runtime_checkable
class KeepsState(Protocol):
    """A callback that says itself what it knows, in plain numbers and lists."""

    def state_to_keep(self) -> dict[str, Any]:
        """What it knows after a step."""

    def take_back(self, state: dict[str, Any]) -> None:
        """Knows that again, before an epoch begins."""


# By which they stand in what is kept.
NAMES = {kind.__name__ for kind in (keras.callbacks.History, *ATTRIBUTES)}


def kept_of(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """What each of them that is known here knows, as JSON can hold it, in order."""
    return [[_name_of(callback), _kept(callback)] for callback in _known(callbacks)]


def _known(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """Keras' own, and behind them those that know by themselves what to keep."""
    callbacks = list(callbacks)
    of_keras = [c for c in callbacks if _kind_of(c) is not None]
    return [*of_keras, *filter(_is_own, callbacks)]


def _is_own(callback: keras.callbacks.Callback) -> bool:
    return _kind_of(callback) is None and isinstance(callback, KeepsState)


def _kind_of(callback: keras.callbacks.Callback) -> type | None:
    kinds = (keras.callbacks.History, *ATTRIBUTES)
    return next((kind for kind in kinds if isinstance(callback, kind)), None)


def _name_of(callback: keras.callbacks.Callback) -> str:
    return (_kind_of(callback) or type(callback)).__name__


def _kept(callback: keras.callbacks.Callback) -> dict[str, Any]:
    if _is_own(callback):
        return {name: _plain(v) for name, v in callback.state_to_keep().items()}
    if isinstance(callback, keras.callbacks.History):
        history = {name: _plain(values) for name, values in callback.history.items()}
        return {"epoch": _plain(callback.epoch), "history": history}
    for kind, names in ATTRIBUTES.items():
        if isinstance(callback, kind):
            found = {n: getattr(callback, n) for n in names if hasattr(callback, n)}
            return {name: _plain(value) for name, value in found.items()}
    return {}


def arrays_of(
    callbacks: Iterable[keras.callbacks.Callback],
) -> dict[str, np.ndarray]:
    """The best weights that `EarlyStopping` holds, by name."""
    return {
        f"callback{number}/{place}": np.asarray(weight)
        for number, callback in enumerate(_known(callbacks))
        for place, weight in enumerate(getattr(callback, BEST, None) or ())
        if isinstance(callback, keras.callbacks.EarlyStopping)
    }


def put_back(
    callbacks: Iterable[keras.callbacks.Callback],
    kept: Any,
    arrays: Mapping[str, np.ndarray],
) -> list[str]:
    """Gives callbacks what they knew.

    Args:
      callbacks: in their order.
      kept: what `kept_of` returned.
      arrays: and `arrays_of`.

    Returns:
      The names of those that were given nothing. Of Keras' it is all of them where the
      list is another one now.
    """
    known = _known(callbacks)
    entries = list(kept) if isinstance(kept, list) else []
    own = list(filter(_is_own, known))
    forgotten = []
    for callback in own:
        name = _name_of(callback)
        entry = next((e for e in entries if e[0] == name and name not in NAMES), None)
        if entry is None:
            forgotten.append(name)
            continue
        entries.remove(entry)
        try:
            callback.take_back({name: _numbers(v) for name, v in entry[1].items()})
        except Exception:  # of another version: the others go on all the same
            forgotten.append(_name_of(callback))
    of_keras = [callback for callback in known if callback not in own]
    found = [entry for entry in entries if entry[0] in NAMES]
    if [name for name, _ in found] != list(map(_name_of, of_keras)):
        return [*map(_name_of, of_keras), *forgotten]
    for number, (callback, (_, state)) in enumerate(zip(of_keras, found, strict=True)):
        _give(callback, state, number, arrays)
    return forgotten


def _give(
    callback: keras.callbacks.Callback,
    known: Any,
    number: int,
    arrays: Mapping[str, np.ndarray],
) -> None:
    if isinstance(callback, keras.callbacks.EarlyStopping):
        names = itertools.takewhile(
            arrays.__contains__,
            (f"callback{number}/{place}" for place in itertools.count()),
        )
        setattr(callback, BEST, [arrays[name] for name in names] or None)
    if isinstance(callback, keras.callbacks.History):
        callback.epoch = list(known["epoch"])
        callback.history = {n: _numbers(v) for n, v in known["history"].items()}
        return
    for kind, found in ATTRIBUTES.items():
        if isinstance(callback, kind):
            for name in found:
                if name in known:
                    setattr(callback, name, _numbers(known[name]))


def kept_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers in the logs of a step, as JSON can hold them."""
    return {
        name: _plain(value)
        for name, value in logs.items()
        if isinstance(value, int | float | np.number)
    }


def put_back_logs(kept: Any) -> dict[str, Any]:
    """What `kept_logs` returned; empty when that is not what came."""
    try:
        return {str(name): _numbers(value) for name, value in kept.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _plain(value: Any) -> Any:
    """A value that JSON can hold: infinities and NaN as text."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | str):
        return value
    array = np.asarray(value)
    if array.ndim:
        return _plain(array.tolist())
    number = array.item()
    if isinstance(number, float) and not math.isfinite(number):
        return {"float": repr(number)}
    return number


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    if isinstance(value, dict):
        return float(value["float"])
    return value


# What the input of a `fit` knows of its own place, as a checkpoint keeps it.


SHARDS, STATES = "shards", "states"


class KeptInput:
    """The state of a `grain` input that `fit` trains on; of others nothing.

    Args:
      adapter: Keras' data adapter of what is read.
      hosts: who read together.
    """

    def __init__(self, adapter: Any, hosts: Hosts):
        self._hosts = hosts
        source = grain_input_of(adapter)
        self._shards = 1 if source is None else shards_of(source)[1]
        self._own = None if source is None else own_state_of(adapter)
        if self._own is not None:
            self._own.keep()

    def kept(self, batches: int) -> dict[str, Any] | None:
        """What JSON can hold of it; call it on all hosts.

        Args:
          batches: how many were trained on in the pass that goes on.
        """
        if self._own is None:
            return None
        state = (batches and self._own.state_after(batches)) or ""
        texts = [state]
        if self._shards > 1:
            texts = self._hosts.texts(state, "states of the input")
        return {SHARDS: self._shards, STATES: texts}

    def put_back(self, kept: Any, batches: int) -> bool:
        """Lets the next pass begin where it was; false: it has to be read as far.

        Args:
          kept: what `kept` returned, from outside.
          batches: how many of the pass come before.

        Raises:
          ConfigurationError: another number of shards is read now.
          DataError: it is the state of another input.
        """
        shards, states = _checked(kept)
        if batches and shards != self._shards:
            raise ConfigurationError(
                f"The grain input has {self._shards} shards, and had {shards} when the "
                "checkpoint was written in the middle of a pass over it: each shard "
                "has its own samples in an order of its own, so that no place in "
                "others is the same. Go on with as many hosts as before, or read all "
                "of the input on every host (grain.sharding.NoSharding())."
            )
        if self._own is None or not batches or len(states) != max(shards, 1):
            return False
        state = states[self._hosts.rank if shards > 1 else 0]
        # All or none: who reads again would be late.
        if not all(states):
            return False
        self._own.begin_next_at(batches, state)
        return True


def _checked(kept: Any) -> tuple[int, list[str]]:
    """The number of shards, and the states; of what makes no sense, none."""
    if not isinstance(kept, dict) or not is_count(kept.get(SHARDS)):
        return 1, []
    states = kept.get(STATES)
    if not isinstance(states, list) or not all(isinstance(s, str) for s in states):
        return kept[SHARDS], []
    return kept[SHARDS], states


# The states of Python's and NumPy's global generators, as JSON can hold them.
#
# Keras shuffles the batches of a `PyDataset` by Python's, at the beginning of each
# epoch.


WORDS = 624


def random_now() -> dict[str, Any]:
    """Both states."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state()
    name, keys, place, has_gauss, cached = state
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), keys.tolist(), int(place), int(has_gauss), float(cached)],
    }


def put_back_random(said: Any) -> bool:
    """Gives both what `random_now` returned; false when that is not what came."""
    try:
        version, words, gauss = said["python"]
        name, keys, place, has_gauss, cached = said["numpy"]
        are_words = all(is_whole(word, 0, 2**32 - 1) for word in (*words, *keys))
        if not are_words or len(keys) != WORDS or name != "MT19937":
            return False
        if not (is_whole(place, 0, WORDS) and is_number(cached)):
            return False
        random.setstate((version, tuple(words), gauss))
        state = (name, np.array(keys, np.uint32), place, int(bool(has_gauss)), cached)
        np.random.set_state(state)
    except (KeyError, TypeError, ValueError):
        return False
    return True


# What a checkpoint of a `fit` cannot keep, said when the training begins.


class HiddenOptimizers:
    """Optimizers that only a part of the model holds, and whether a step uses them.

    A discriminator that was compiled by itself has one. Most are never called, so it
    is said when one was.

    Args:
      model: that is trained.
    """

    def __init__(self, model: keras.Model):
        known = {id(optimizer) for optimizer in optimizers_of(model)}
        self._hidden = [
            (layer.name, optimizer, int(optimizer.iterations.numpy()))
            for layer in layers_within(model)
            for optimizer in optimizers_of(layer)
            if id(optimizer) not in known
        ]

    def warn_of_used(self) -> None:
        """Once for each."""
        used = [h for h in self._hidden if int(h[1].iterations.numpy()) != h[2]]
        self._hidden = [hidden for hidden in self._hidden if hidden not in used]
        for name, optimizer, _ in used:
            warnings.warn(
                f"{optimizer.name!r}, the optimizer of {name!r}, is not saved, and "
                "this training uses it. Make it an attribute of the trained model: "
                f"model.its_optimizer = model.{name}.optimizer.",
                CheckpointWarning,
                stacklevel=4,
            )


def warn_of_what_is_lost(
    model: keras.Model, passes: PassesOfData, on_signal: bool
) -> None:
    """Warns of each thing that would not be the same after a restart.

    Args:
      model: that is trained.
      passes: what it is trained on.
      on_signal: whether signals are to be noted.
    """
    said = [*_of_data(passes), *_of_model(model)]
    if on_signal and threading.current_thread() is not threading.main_thread():
        said.append(
            "Signals save nothing: fit does not run in the main thread, to which they "
            "come. Pass on_signal=False, and save by every_seconds."
        )
    for text in said:
        warnings.warn(text, CheckpointWarning, stacklevel=4)


def _of_data(passes: PassesOfData) -> Iterator[str]:
    found = passes.without_seed
    if found:
        yield (
            f"The order of the data is another one after a restart ({found[0]}): a "
            "fit that goes on within an epoch would leave out other samples than "
            "it has trained on. Call keras.utils.set_random_seed(1) at the top of "
            "the program, before the data is made, or give the shuffle a seed."
        )
    if passes.shares_order:
        yield (
            "validation_data reads the same shuffle as the training data, which mixes "
            "the two and makes the order another one after a restart. Shuffle after "
            "they are split, or with reshuffle_each_iteration=False."
        )


def _of_model(model: keras.Model) -> Iterator[str]:
    for layer in layers_within(model):
        for name, value in vars(layer).items():
            if isinstance(value, tf.Variable | tf.random.Generator):
                kind = type(value).__name__
                yield (
                    f"{name} of {layer.name!r} is not saved: Keras does not know a "
                    f"TensorFlow {kind} as a part of the model. Use add_weight, or "
                    "keras.random.SeedGenerator."
                )


# Where a `fit` is: the epoch, and the place in its data.


@dataclass(frozen=True)
class Place:
    """What comes next.

    Args:
      epoch: to go on with, from 0.
      batch: of the epoch, from 0.
      passes_ended: over the data.
      batches_read: of the pass that goes on.
      batches_per_epoch: as Keras knew them; None: it did not.
      has_stopped: whether a callback had stopped the training.
      first_epoch: at which the training began, from 0.
      drawn_before: how often the order of the data was drawn before it began.
    """

    epoch: int
    batch: int
    passes_ended: int
    batches_read: int
    batches_per_epoch: int | None
    has_stopped: bool
    first_epoch: int
    drawn_before: int

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    @classmethod
    def of(cls, restored: Restored) -> Place:
        """The place that a checkpoint holds.

        Raises:
          DataError: it holds none: another program wrote it.
        """
        said: Any = restored.program.get("place")
        try:
            place = cls(**said)
        except TypeError:
            place = None
        if place is None or not all(
            is_count(number)
            for number in (
                *(place.epoch, place.batch, place.passes_ended, place.batches_read),
                *(place.batches_per_epoch or 0, place.first_epoch, place.drawn_before),
            )
        ):
            raise DataError(
                f"{restored.directory} says nothing of the place in the data: "
                "tfdp.callbacks.Checkpoint did not write it. Read it by "
                "tfdp.checkpoint.Checkpoint(directory).restore(model), and give the "
                "callback a directory of its own."
            )
        return place

    def check_batches(self, now: int | None) -> None:
        """Refuses other batches within an epoch: other samples would be left out.

        Args:
          now: how many batches an epoch has, as Keras knows them; None: it does not.

        Raises:
          DataError: other ones than before, in the middle of an epoch.

        Warns:
          CheckpointWarning: other ones than before, between two epochs.
        """
        was = self.batches_per_epoch
        if was is None or now is None or was == now:
            return
        if self.batch or self.batches_read:
            raise DataError(
                f"An epoch has {now} batches here, and had {was} when the checkpoint "
                f"was written, in the middle of one: leaving out {self.batches_read} "
                "would leave out other samples. Give the data and the batch size that "
                "it began with, or this training a directory of its own."
            )
        warnings.warn(
            f"An epoch has {now} batches from now on, and had {was} before: the data, "
            "or the batch size, is another one.",
            CheckpointWarning,
            stacklevel=3,
        )
