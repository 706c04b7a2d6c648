"""Hugging Face datasets: rows by `to_tf_dataset`, trained by `fit`."""

from __future__ import annotations

import datasets
import keras

from benchmarks.downstream.cases import BATCH, EPOCHS, ROWS, Numbers, draw, integers


def _trained(rows: datasets.Dataset, columns: list[str], model: keras.Model) -> Numbers:
    batches = rows.to_tf_dataset(BATCH, columns, label_cols=["label"], shuffle=False)
    model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
    return dict(model.fit(batches, epochs=EPOCHS, verbose=0).history)


def one_column() -> Numbers:
    rows = datasets.Dataset.from_dict({"x": draw(ROWS, 6), "label": draw(ROWS)})
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    return _trained(rows, ["x"], model)


def two_columns_filtered_and_mapped() -> Numbers:
    words = integers(20, ROWS, 5)
    rows = datasets.Dataset.from_dict(
        {"words": words, "x": draw(ROWS, 5), "label": draw(ROWS)}
    )
    rows = rows.filter(lambda row: row["label"] > -1.0)
    rows = rows.map(lambda row: {"x": [2.0 * value for value in row["x"]]})
    tokens = keras.Input((5,), dtype="int32", name="words")
    x = keras.Input((5,), name="x")
    table = keras.layers.Embedding(20, 4)(tokens)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(table), x])
    model = keras.Model([tokens, x], keras.layers.Dense(1)(joined))
    return _trained(rows, ["words", "x"], model)


CASES = {
    function.__name__: function
    for function in (one_column, two_columns_filtered_and_mapped)
}
