"""Callbacks that report elsewhere: MLflow's, and Keras' for TensorBoard."""

from __future__ import annotations

import pathlib
import tempfile

import keras
import mlflow
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.downstream.cases import ROWS, Numbers, draw, fit


def _model() -> keras.Model:
    layers = [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
    return model


def _reported(run_id: str) -> Numbers:
    client = mlflow.MlflowClient()
    names = client.get_run(run_id).data.metrics
    return {
        name: [entry.value for entry in client.get_metric_history(run_id, name)]
        for name in sorted(names)
        if "time" not in name
    }


def mlflow_callback() -> Numbers:
    """The history of each metric, as its server has it."""
    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
        with mlflow.start_run() as run:
            callback = mlflow.keras.MlflowCallback(run)
            fit(_model(), draw(ROWS, 6), draw(ROWS, 1), callbacks=[callback])
        return _reported(run.info.run_id)


def mlflow_autolog_with_its_model() -> Numbers:
    """What autolog reports, and what the model that it stores predicts."""
    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
        mlflow.set_experiment(
            experiment_id=mlflow.create_experiment(
                "here", pathlib.Path(folder, "artifacts").as_uri()
            )
        )
        mlflow.tensorflow.autolog(log_datasets=False)
        try:
            with mlflow.start_run() as run:
                fit(_model(), draw(ROWS, 6), draw(ROWS, 1))
            loaded = mlflow.tensorflow.load_model(f"runs:/{run.info.run_id}/model")
        finally:
            mlflow.tensorflow.autolog(disable=True)
        predicted = loaded.predict(draw(ROWS, 6), verbose=0)
        return {**_reported(run.info.run_id), "loaded": predicted}


def tensorboard_callback() -> Numbers:
    """The numbers of each scalar, read from the files of events."""
    with tempfile.TemporaryDirectory() as folder:
        callback = keras.callbacks.TensorBoard(folder, histogram_freq=1)
        fit(_model(), draw(ROWS, 6), draw(ROWS, 1), callbacks=[callback])
        events = EventAccumulator(f"{folder}/train")
        events.Reload()
        tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("epoch_")]
        return {
            tag: [tf.make_ndarray(event.tensor_proto) for event in events.Tensors(tag)]
            for tag in tags
        }


CASES = {
    function.__name__: function
    for function in (
        mlflow_callback,
        mlflow_autolog_with_its_model,
        tensorboard_callback,
    )
}
