"""scikeras: estimators in scikit-learn's pipelines and searches."""

from __future__ import annotations

from typing import Any

import keras
from scikeras.wrappers import KerasClassifier, KerasRegressor
from sklearn.model_selection import GridSearchCV

from benchmarks.downstream.cases import BATCH, EPOCHS, ROWS, Numbers, draw, integers


def _build(outputs: int, loss: str) -> Any:
    layers = [keras.Input((4,)), keras.layers.Dense(8, "tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(outputs)])
    model.compile(keras.optimizers.SGD(1e-2), loss)
    return model


OPTIONS = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}


def regressor() -> Numbers:
    estimator = KerasRegressor(_build, model__outputs=1, model__loss="mse", **OPTIONS)
    x = draw(ROWS, 4)
    return {"predictions": estimator.fit(x, draw(ROWS)).predict(x)}


def classifier_by_grid_search() -> Numbers:
    loss = "sparse_categorical_crossentropy"
    estimator = KerasClassifier(_build, model__outputs=3, model__loss=loss, **OPTIONS)
    search = GridSearchCV(estimator, {"epochs": [1, 2]}, cv=3)
    search.fit(draw(ROWS, 4), integers(4, ROWS) - 1)
    return {"scores": search.cv_results_["mean_test_score"]}


CASES = {
    function.__name__: function for function in (regressor, classifier_by_grid_search)
}
