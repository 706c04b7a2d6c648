"""One replica does in a step what Keras does without a strategy, and nothing else."""

import collections
import json

import numpy as np
import pytest

from tests.support import newer_keras
from tests.support.fresh_python import run_python
from tests.support.one_replica import BATCH, NETWORKS, both, rows_of

# A step begins when its batch is there (`tfdp/step/batch_first.py`): one operation that
# computes nothing, and one constant that waits for it, and so is not shared with an
# equal one that does not.
MORE_OPERATIONS = {"NoOp": 1, "Const": 1}
# Weights are updated in packs: gradients are joined, and what changes is cut.
OF_PACKS = {"Const": 5, "ConcatV2": 1, "SplitV": 1, "Reshape": 18}


@pytest.mark.parametrize("name", NETWORKS)
def test_fit_equals_keras_bit_for_bit(name):
    found = []
    for model in both(name):
        x, y = rows_of(model)
        history = model.fit(
            *(x, y, BATCH),
            epochs=3,
            validation_data=(x[:5], y[:5]),
            verbose=0,
            shuffle=not newer_keras.GIVES_ARRAYS_OTHER_ORDERS,
        )
        found.append(
            [
                *model.get_weights(),
                *(variable.numpy() for variable in model.optimizer.variables),
                *map(np.asarray, history.history.values()),
                model.predict(x, BATCH, verbose=0),
                np.asarray(model.evaluate(x, y, BATCH, verbose=0)),
            ]
        )
    for of_keras, of_tfdp in zip(*found, strict=True):
        np.testing.assert_array_equal(of_tfdp, of_keras)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_runs_the_operations_of_keras(name):
    done = run_python("-m", "tests.support.one_replica", name)
    assert done.returncode == 0, done.stderr
    of_keras, of_tfdp = map(
        collections.Counter, json.loads(done.stdout.splitlines()[-1])
    )
    more = of_tfdp - of_keras
    allowed = collections.Counter(MORE_OPERATIONS) + collections.Counter(OF_PACKS)
    assert not more - allowed, more
    assert of_tfdp.total() <= of_keras.total() + len(MORE_OPERATIONS)


def test_a_loop_reads_the_iterator_that_keras_reads():
    """Each call of a step looks at it in Python; others take longer."""
    kinds = []
    for model in both("network"):
        x, y = rows_of(model)
        model.make_train_function()
        step, seen = model.train_function, []

        def noting(iterator, step=step, seen=seen):
            seen.append(type(iterator))
            return step(iterator)

        model.train_function = noting
        model.fit(x, y, BATCH, verbose=0)
        kinds.append(seen)
    assert kinds[0] == kinds[1] and len(kinds[0]) == 3
