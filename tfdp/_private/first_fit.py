"""A user's script that runs until its first `fit`: what is replaced, what is read."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.distribution import ModelParallel
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split

from tfdp.errors import ConfigurationError
from tfdp.seams.replace import class_attribute, replace_for_good
from tfdp.seams.table import (
    DEVICE_MESH,
    LAYOUT_MAP,
    MODEL,
    OPTIMIZER,
    STRATEGY,
    TENSORFLOW_CONTEXT,
    TENSORFLOW_GRAPHS,
)

# Keras' default number of rows, for arrays.
BATCH_ROWS = 32
ARRAYS = "ArrayDataAdapter"
# Methods and properties that configure devices and threads.
DEVICE_METHODS = (
    "set_logical_device_configuration",
    "set_visible_devices",
    "set_memory_growth",
)
SAVE_METHODS = ("save", "save_weights")
DEVICE_PROPERTIES = ("intra_op_parallelism_threads", "inter_op_parallelism_threads")
# What a strategy of the running script is replaced by; at most one.
_stand_ins: list[Any] = []
# What the last script gave as `layout=`, or to Keras' set_distribution; at most one.
_layouts: list[Any] = []
# The stages of a pipeline that the last script has made, and the micro-batches.
_pipelines: list[tuple[Any, int]] = []


def running_stand_in() -> Any:
    """The object that strategies of a running script become; None: none runs."""
    return _stand_ins[-1] if _stand_ins else None


def note_layout(given: Any) -> None:
    """Keeps a `LayoutMap` or `ModelParallel` of the running script, for a command."""
    if isinstance(given, keras.distribution.LayoutMap | ModelParallel):
        _layouts[:] = [given]


def note_pipeline(runs: Any, micro_batches: int) -> bool:
    """Keeps the stages that a running script makes, for a command; False: none runs."""
    if running_stand_in() is not None:
        _pipelines[:] = [(runs, micro_batches)]
    return running_stand_in() is not None


def noted_pipeline() -> tuple[Any, int] | None:
    """The stages of the last script that a command has run; None: it has none."""
    return _pipelines[-1] if _pipelines else None


def noted_layout() -> Any:
    """The layout of the last script that a command has run; None: it has none."""
    return _layouts[-1] if _layouts else None


@contextlib.contextmanager
def running_a_script(
    strategy: Any,
    fit: Callable[[dict[str, Any]], None],
    apply: Callable[[], None],
    before_save: Callable[[], None],
) -> Iterator[None]:
    """Replaces a script's strategies, `fit` and device settings within the context.

    Args:
      strategy: the result of each construction of a strategy.
      fit: called instead of `fit` of any model, with the arguments by name.
      apply: called instead of `apply` of any optimizer.
      before_save: called before a model, or its weights, are saved.
    """
    replace_for_good(STRATEGY, "__new__", _strategy_or_stand_in)
    tf.distribute.get_strategy()  # TensorFlow makes its default before the script

    def new_fit(original: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(original)
        return lambda *args, **kwargs: fit(signature.bind(*args, **kwargs).arguments)

    def new_apply(original: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args, **kwargs: apply()

    def new_save(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            before_save()
            return original(*args, **kwargs)

        return save

    hooks: list[tuple[str, str, Callable[[Any], Any]]] = [
        (MODEL, "fit", new_fit),
        (OPTIMIZER, "apply", new_apply),
        *((MODEL, name, new_save) for name in SAVE_METHODS),
        # Keras' clear_session would drop the scope around the script.
        (TENSORFLOW_GRAPHS, "reset_default_graph", _nothing),
        *((TENSORFLOW_CONTEXT, name, _nothing) for name in DEVICE_METHODS),
        *((TENSORFLOW_CONTEXT, name, _read_only) for name in DEVICE_PROPERTIES),
    ]
    _layouts.clear()
    _stand_ins.append(strategy)
    try:
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(class_attribute(*hook))
            yield
    finally:
        _stand_ins.pop()


@contextlib.contextmanager
def lenient_layouts() -> Iterator[dict[str, str]]:
    """Lets meshes name any number of devices, and maps leave out what Keras refuses.

    Yields, for each rule that Keras refuses, what it says.
    """
    refused: dict[str, str] = {}

    def set_item(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def setitem(layout_map: Any, rule: str, layout: Any) -> None:
            try:
                original(layout_map, rule, layout)
            except ValueError as error:
                refused[rule] = str(error)

        return setitem

    def any_devices(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(mesh: Any, shape: Any, axis_names: Any, devices: Any = None) -> None:
            devices = [f"cpu:{i}" for i in range(math.prod(shape))]
            original(mesh, shape, axis_names, devices)

        return init

    with class_attribute(LAYOUT_MAP, "__setitem__", set_item):
        with class_attribute(DEVICE_MESH, "__init__", any_devices):
            yield refused


def _strategy_or_stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(kind: type, *arguments: Any, **options: Any) -> Any:
        note_layout(options.get("layout"))
        return _stand_ins[-1] if _stand_ins else object.__new__(kind)

    return new


def _nothing(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda *arguments, **options: None


def _read_only(original: property) -> property:
    return property(original.fget, lambda context, value: None)


def input_of_fit(given: Mapping[str, Any], batches: int) -> tuple[Any, int | None]:
    """The data of a call, weighted by its `class_weight`, and the rows of a batch.

    Args:
      given: arguments of `fit` by name; the missing ones have their defaults.
      batches: how many batches to read of data other than arrays, at least 1.

    Returns:
      Arrays `(x, y, sample_weight)` without those for validation, and their batch
      size, at most all rows; or a list of batches as
      the step gets them, and None.

    Raises:
      ConfigurationError: the data is distributed already, or has no batch.
      ValueError: Keras does not accept the data.
    """
    names = ("x", "y", "sample_weight", "class_weight")
    parts = {name: given.get(name) for name in names}
    if isinstance(parts["x"], tf.distribute.DistributedDataset):
        raise ConfigurationError(
            "fit was called with a dataset that is distributed already, of a part of "
            "each batch. Give it the plain dataset of global batches."
        )
    rows = given.get("batch_size") or BATCH_ROWS
    split = given.get("validation_split")
    if split and given.get("validation_data") is None:
        arrays = tuple(parts[name] for name in names[:3])
        trained_on, _ = train_validation_split(arrays, split)
        parts |= dict(zip(names[:3], trained_on, strict=True))
    adapter = get_data_adapter(**parts, batch_size=rows)
    if type(adapter).__name__ == ARRAYS:
        whole = len(keras.tree.flatten(parts["x"])[0])
        rows = max(1, min(rows, whole))
        if parts["class_weight"] is None:
            return (parts["x"], parts["y"], parts["sample_weight"]), rows
        adapter = get_data_adapter(**parts, batch_size=max(whole, 1))
        [batch] = adapter.get_tf_dataset().take(1)
        return batch, rows
    if isinstance(parts["x"], tf.data.Dataset):
        found = list(adapter.get_tf_dataset().take(batches))
    else:
        found = list(itertools.islice(adapter.get_numpy_iterator(), batches))
        if getattr(adapter, "enqueuer", None) is not None:
            adapter.on_epoch_end()  # ends the processes and threads of a PyDataset
    if not found:
        raise ConfigurationError("The data of fit has no batch.")
    return found, None
