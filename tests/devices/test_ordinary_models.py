"""The analysis follows ordinary models, from the rows of a batch to their predictions.

What it does not follow it must say, so a model of everyday use that it loses would be
warned of for nothing; and a fault of its loss could not be told.
"""

import keras
import pytest
import tensorflow as tf

from tests.support.ordinary_models import MODELS
from tfdp.lint.analysis import Analysis
from tfdp.lint.registry import key_of
from tfdp.lint.values import ROW_SOURCE, Term


def value_of_predictions(model, x, rows):
    graph = tf.__internal__.FuncGraph("step")
    with graph.as_default():
        shape = (rows, *x.shape[1:])
        batch = tf.raw_ops.Placeholder(dtype=x.dtype, shape=shape)
        predictions = model(batch, training=True)
    return Analysis({key_of(batch): ROW_SOURCE}, rows).value(predictions)


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_predictions_is_of_its_own_row(name):
    keras.utils.set_random_seed(0)
    model, x = MODELS[name]()
    model(tf.constant(x))
    for rows in (None, len(x)):
        value = value_of_predictions(model, x, rows)
        assert value.terms == {Term.ROWS} and value.axes == (0,), value
        assert not value.lost and not value.cross and value.power == 0
