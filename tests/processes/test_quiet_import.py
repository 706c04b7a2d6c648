"""TensorFlow without what it and Keras import besides, in a process of its own."""

from tests.support.fresh_python import run_python

PROGRAM = """
import sys

from tfdp.strategies.quiet import NOT_NEEDED_FOR_A_STEP, import_tensorflow_quietly

import_tensorflow_quietly(without=NOT_NEEDED_FOR_A_STEP)
assert not set(NOT_NEEDED_FOR_A_STEP) & set(sys.modules)

import keras
import numpy as np

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 4)), np.ones(8), verbose=0)
for name in NOT_NEEDED_FOR_A_STEP:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert "halted" not in str(error), error  # not installed, and not hidden
print("done")
"""


def test_what_is_left_out_can_be_imported_later():
    # Without what hides them in every process of a test.
    done = run_python("-c", PROGRAM, environment={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


STARTED_BY_A_TEST = """
import sys

import keras
import tensorflow

from tfdp.strategies.quiet import NOT_NEEDED_FOR_A_STEP

assert not set(NOT_NEEDED_FOR_A_STEP) & set(sys.modules)
import jax

import matplotlib
import sklearn

print("done")
"""


def test_what_tests_start_goes_without_it():
    done = run_python("-c", STARTED_BY_A_TEST)
    assert "done" in done.stdout, done.stderr
