"""keras-tuner: searches whose trials train under the strategy of its own option."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import keras_tuner

from benchmarks.downstream.cases import BATCH, EPOCHS, ROWS, Numbers, draw


def _build(hyperparameters: Any) -> keras.Model:
    units = hyperparameters.Int("units", 4, 12, step=4)
    layers = [keras.Input((6,)), keras.layers.Dense(units, "tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    rate = hyperparameters.Float("rate", 1e-3, 1e-2, sampling="log")
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def _searched(make: Any, strategy: Any, **most: int) -> Numbers:
    """Returns the scores of the trials, and what the best model predicts.

    The tuner opens the scope itself for each trial. Within one that is open already it
    calls Keras' clear_session, which breaks the end of any strategy's scope.
    """
    x, y = draw(ROWS, 6), draw(ROWS, 1)
    with tempfile.TemporaryDirectory() as folder:
        tuner = make(
            _build,
            objective="val_loss",
            seed=3,
            directory=folder,
            distribution_strategy=strategy,
            **most,
        )
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        tuner.search(x, y, epochs=EPOCHS, validation_data=(x, y), **options)
        trials = tuner.oracle.get_best_trials(3)
        best = tuner.get_best_models(1)[0]
        return {
            "scores": [trial.score for trial in trials],
            "best": best.predict(x, verbose=0),
        }


def random_search(strategy: Any) -> Numbers:
    return _searched(keras_tuner.RandomSearch, strategy, max_trials=3)


def bayesian_optimization(strategy: Any) -> Numbers:
    return _searched(keras_tuner.BayesianOptimization, strategy, max_trials=3)


def hyperband(strategy: Any) -> Numbers:
    return _searched(keras_tuner.Hyperband, strategy, max_epochs=3)


CASES = {
    function.__name__: function
    for function in (random_search, bayesian_optimization, hyperband)
}
