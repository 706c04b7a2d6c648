"""Saves take their copies in the memory of those before, and training gives it back."""

import keras
import numpy as np

import tfdp
from tfdp.checkpoint.checkpoint import Copies


def test_copies_are_taken_in_the_memory_of_those_before():
    copies = Copies()
    values = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4), "c": np.array(7)}
    first = copies.take({name: lambda v=v: v for name, v in values.items()})
    kept = {name: copy for name, copy in first.items()}
    values["a"] += 1
    assert first["a"][0, 0] == 0.0
    # Another shape, one that is gone, and one that is new.
    values["b"] = np.zeros(5, np.float32)
    values["d"] = values.pop("c").astype("int8")
    second = copies.take({name: lambda v=v: v for name, v in values.items()})
    assert second.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(second[name], value)
        assert second[name].dtype == value.dtype
    assert second["a"] is kept["a"] and second["b"] is not kept["b"]


def test_what_is_not_contiguous_is_copied_as_it_is():
    turned = np.arange(12.0).reshape(3, 4).T
    copy = Copies().take({"turned": lambda: turned})["turned"]
    np.testing.assert_array_equal(copy, turned)
    assert copy.flags.c_contiguous and not np.shares_memory(copy, turned)


def test_training_gives_the_memory_back(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = tfdp.callbacks.Checkpoint(tmp_path, every_steps=1)
    copies = callback._files._copies
    during = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: during.append(len(copies._kept))
    )
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[callback, look])
    assert during[0] > 0 and not copies._kept
