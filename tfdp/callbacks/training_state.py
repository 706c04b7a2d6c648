"""The state of a `fit` in a checkpoint: callbacks, input, random generators, place."""

from __future__ import annotations

import itertools
import math
import random
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_fit import PassesOfData
from tfdp._private.keras_models import layers_within
from tfdp.checkpoint.checkpoint import Restored
from tfdp.checkpoint.hosts import Hosts
from tfdp.checks import is_number, is_whole
from tfdp.errors import CheckpointWarning, DataError
from tfdp.files.checked_json import is_count
from tfdp.step.find_optimizers import optimizers_of

# Words in the state of a Mersenne Twister.
WORDS = 624
# Attributes with plain numbers; `arrays_of` has the weights in EarlyStopping.
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
    """A callback with its own state, as plain numbers and lists."""

    def state_to_keep(self) -> dict[str, Any]:
        """Returns the state after a step."""

    def take_back(self, state: dict[str, Any]) -> None:
        """Restores the state, before an epoch begins."""


NAMES = {kind.__name__ for kind in (keras.callbacks.History, *ATTRIBUTES)}


def kept_of(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """The state of each supported callback, as JSON, in order."""
    return [[_name_of(callback), _kept(callback)] for callback in _supported(callbacks)]


def _supported(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """Supported callbacks: Keras' first, then those that implement `KeepsState`."""
    callbacks = list(callbacks)
    of_keras = [c for c in callbacks if _kind_of(c) is not None]
    return [*of_keras, *filter(_is_own, callbacks)]


def _is_own(callback: keras.callbacks.Callback) -> bool:
    return _kind_of(callback) is None and isinstance(callback, KeepsState)


def _kind_of(callback: keras.callbacks.Callback) -> Any:
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
    names = ATTRIBUTES[_kind_of(callback)]
    return {n: _plain(getattr(callback, n)) for n in names if hasattr(callback, n)}


def arrays_of(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, np.ndarray]:
    """The best weights that `EarlyStopping` holds, by name."""
    return {
        f"callback{number}/{place}": np.asarray(weight)
        for number, callback in enumerate(_supported(callbacks))
        for place, weight in enumerate(getattr(callback, BEST, None) or ())
        if isinstance(callback, keras.callbacks.EarlyStopping)
    }


def put_back(
    callbacks: Iterable[keras.callbacks.Callback],
    kept: Any,
    arrays: Mapping[str, np.ndarray],
) -> list[str]:
    """Restores the state of callbacks from `kept_of` and `arrays_of`.

    Returns the names of callbacks that were not restored; of Keras' it is all or none,
    none restored if the list differs.
    """
    supported = _supported(callbacks)
    entries = list(kept) if isinstance(kept, list) else []
    own = list(filter(_is_own, supported))
    missed = []
    for callback in own:
        name = _name_of(callback)
        entry = next((e for e in entries if e[0] == name and name not in NAMES), None)
        if entry is None:
            missed.append(name)
            continue
        entries.remove(entry)
        try:
            callback.take_back({name: _from_plain(v) for name, v in entry[1].items()})
        except Exception:  # state of another version
            missed.append(name)
    of_keras = [callback for callback in supported if callback not in own]
    found = [entry for entry in entries if entry[0] in NAMES]
    if [name for name, _ in found] != list(map(_name_of, of_keras)):
        return [*map(_name_of, of_keras), *missed]
    for number, (callback, (_, state)) in enumerate(zip(of_keras, found, strict=True)):
        _restore(callback, state, number, arrays)
    return missed


def _restore(
    callback: keras.callbacks.Callback,
    state: Any,
    number: int,
    arrays: Mapping[str, np.ndarray],
) -> None:
    if isinstance(callback, keras.callbacks.EarlyStopping):
        names = (f"callback{number}/{place}" for place in itertools.count())
        found = itertools.takewhile(arrays.__contains__, names)
        setattr(callback, BEST, [arrays[name] for name in found] or None)
    if isinstance(callback, keras.callbacks.History):
        callback.epoch = list(state["epoch"])
        callback.history = {n: _from_plain(v) for n, v in state["history"].items()}
        return
    for name in ATTRIBUTES[_kind_of(callback)]:
        if name in state:
            setattr(callback, name, _from_plain(state[name]))


def kept_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers in the logs of a step, as JSON."""
    numbers = int | float | np.number
    return {n: _plain(v) for n, v in logs.items() if isinstance(v, numbers)}


def put_back_logs(kept: Any) -> dict[str, Any]:
    """The inverse of `kept_logs`; empty if the input is invalid."""
    try:
        return {str(name): _from_plain(value) for name, value in kept.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _plain(value: Any) -> Any:
    """A JSON value: infinities and NaN as text."""
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


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(part) for part in value]
    if isinstance(value, dict):
        return float(value["float"])
    return value


def random_now() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators, as JSON.

    Keras shuffles the batches of a `PyDataset` by Python's at the start of an epoch.
    """
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state()
    name, keys, place, has_gauss, cached = state
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), keys.tolist(), int(place), int(has_gauss), float(cached)],
    }


def put_back_random(state: Any) -> bool:
    """Restores the states of `random_now`; false if the input is invalid."""
    try:
        version, words, gauss = state["python"]
        name, keys, place, has_gauss, cached = state["numpy"]
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


class HiddenOptimizers:
    """Optimizers in parts of the model, such as a discriminator compiled by itself.

    Most are never called, so it warns only after a step used one.
    """

    def __init__(self, model: keras.Model):
        saved = {id(optimizer) for optimizer in optimizers_of(model)}
        self._hidden = [
            (layer.name, optimizer, int(optimizer.iterations.numpy()))
            for layer in layers_within(model)
            for optimizer in optimizers_of(layer)
            if id(optimizer) not in saved
        ]

    def warn_of_used(self) -> None:
        """Warns once for each hidden optimizer that this training uses."""
        used = [h for h in self._hidden if int(h[1].iterations.numpy()) != h[2]]
        self._hidden = [hidden for hidden in self._hidden if hidden not in used]
        for name, optimizer, _ in used:
            warnings.warn(
                f"{optimizer.name!r}, the optimizer of {name!r}, is not saved, but "
                "this training uses it. Make it an attribute of the trained model: "
                f"model.its_optimizer = model.{name}.optimizer.",
                CheckpointWarning,
                stacklevel=4,
            )


def warn_of_unsaved_state(
    model: keras.Model, passes: PassesOfData, on_signal: bool
) -> None:
    """Warns of each thing that will differ after a restart."""
    texts = [*_of_data(passes), *_of_model(model)]
    if on_signal and threading.current_thread() is not threading.main_thread():
        texts.append(
            "Signals save nothing: fit does not run in the main thread, which receives "
            "them. Pass on_signal=False, and save by every_seconds."
        )
    for text in texts:
        warnings.warn(text, CheckpointWarning, stacklevel=4)


def _of_data(passes: PassesOfData) -> Iterator[str]:
    found = passes.without_seed
    if found:
        yield (
            f"The order of the data changes after a restart ({found[0]}): a fit that "
            "resumes within an epoch would skip other samples than it has trained on. "
            "Call keras.utils.set_random_seed(1) at the top of the program, before "
            "the data is created, or give the shuffle a seed."
        )
    if passes.shares_order:
        yield (
            "validation_data reads the same shuffle as the training data, which mixes "
            "the two and changes the order after a restart. Shuffle after the split, "
            "or with reshuffle_each_iteration=False."
        )


def _of_model(model: keras.Model) -> Iterator[str]:
    for layer in layers_within(model):
        for name, value in vars(layer).items():
            if isinstance(value, tf.Variable | tf.random.Generator):
                kind = type(value).__name__
                yield (
                    f"{name} of {layer.name!r} is not saved: Keras does not track a "
                    f"TensorFlow {kind}. Use add_weight, or "
                    "keras.random.SeedGenerator."
                )


def place_of_host(restored: Restored, hosts: Hosts) -> Restored:
    """Puts the step and place of this host into what hosts saved at their own pace."""
    places: Any = restored.program.get("places")
    if not isinstance(places, list) or not places:
        return restored
    if len(places) != hosts.count and any(one != places[0] for one in places):
        warnings.warn(
            f"{len(places)} hosts wrote {restored.directory} at their own pace, and "
            f"there are {hosts.count} now: all begin at the place of worker 0, so some "
            "samples of this epoch may come twice, and others not at all.",
            CheckpointWarning,
            stacklevel=4,
        )
    own = places[hosts.rank if len(places) == hosts.count else 0]
    program = {**restored.program, "place": own["place"]}
    return replace(restored, step=own["step"], program=program)


@dataclass(frozen=True)
class FitPosition:
    """The place in `fit` and in its data from which to resume; numbers start at 0."""

    epoch: int
    batch: int  # of the epoch
    passes_begun: int  # over the data
    passes_ended: int
    passes_read: int  # ended ones of which a batch was read
    batches_read: int  # of the current pass
    batches_per_epoch: int | None  # None: Keras could not determine them
    has_stopped: bool  # whether a callback had stopped the training
    first_epoch: int  # at which the training began
    drawn_before: int  # passes over the data before it began
    read_before: int  # those of which a batch was read

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, restored: Restored) -> FitPosition:
        """The place in a checkpoint; `DataError` if it has none."""
        state: Any = restored.program.get("place")
        try:
            place = cls(**state)
        except TypeError:
            place = None
        if place is None or not all(
            is_count(number)
            for number in (
                *(place.epoch, place.batch, place.batches_read, place.first_epoch),
                *(place.passes_begun, place.passes_ended, place.passes_read),
                *(place.batches_per_epoch or 0, place.drawn_before, place.read_before),
            )
        ):
            raise DataError(
                f"{restored.directory} has no place in the data: "
                "tfdp.callbacks.Checkpoint did not write it. Read it with "
                "tfdp.checkpoint.Checkpoint(directory).restore(model), and give the "
                "callback another directory."
            )
        return place

    def check_batches(self, now: int | None) -> None:
        """Compares the batches per epoch, `now`; None: unknown.

        Raises:
          DataError: they differ, and the place is within an epoch or a pass.

        Warns:
          CheckpointWarning: they differ, and the place is between two epochs.
        """
        was = self.batches_per_epoch
        if was is None or now is None or was == now:
            return
        if self.batch or self.batches_read:
            raise DataError(
                f"An epoch has {now} batches here, and had {was} when the checkpoint "
                f"was written, within an epoch: {self.batches_read} skipped batches "
                "would be other samples. Use the data and batch size that it began "
                "with, or give this training another directory."
            )
        warnings.warn(
            f"An epoch has {now} batches from now on, and had {was} before: the data "
            "or the batch size has changed.",
            CheckpointWarning,
            stacklevel=3,
        )
