"""Rows of embeddings over two hosts of two replicas, beside one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import row_training
from tests.support.mpi import needs_mpi, run_by_mpi
from tests.support.row_training import LENGTH, ROWS, TRAININGS, WIDTH, WORDS
from tests.support.workers import Workers

MODULE = "tests.support.row_training"
ROW_BYTES = WIDTH * 4 + 4
# Of a step, besides rows: the gradients of the dense layer, numbers of rows and
# samples, and headers.
OTHER_BYTES = 1000
EPOCHS = 2


class DenseAdam(keras.optimizers.Adam):
    """Adam that gets the table's gradient as a whole."""

    def __init__(self):
        super().__init__(0.01, epsilon=1e-3)

    def apply(self, gradients, trainable_variables=None):
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return super().apply(dense, trainable_variables)


def check_all(path, repeated_rows):
    """The weights on both hosts; the bytes that they sent, by training and host."""
    sent = {}
    for name, training in TRAININGS.items():
        hosts, sent[name] = [], []
        for rank in range(2):
            with np.load(f"{path}.{name}.{rank}.npz") as file:
                hosts.append([file[key] for key in file.files if key != "sent"])
                sent[name].append(int(file["sent"]))
        squares_sum = repeated_rows == "sum" and name == "adam"
        alone = tf.distribute.get_strategy()
        expected = row_training.trained(
            training, alone, DenseAdam if squares_sum else None
        )
        for mine, theirs, one in zip(*hosts, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            # Up to 1536 rows of gradients below 0.01 are added, in up to four steps.
            np.testing.assert_allclose(mine, one, rtol=0, atol=2e-6)
    return sent


def check_bytes(sent, repeated_rows):
    words = row_training.few_words()
    added, as_they_come = [], []
    for host in range(2):
        mine = words[ROWS * host // 2 : ROWS * (host + 1) // 2]
        added.append(EPOCHS * len(np.unique(mine)) * ROW_BYTES)
        as_they_come.append(EPOCHS * ROWS // 2 * LENGTH * ROW_BYTES)
    of_adam = added if repeated_rows == "sum" else as_they_come
    for name, rows in [("sgd", added), ("adam", of_adam)]:
        for host in range(2):
            assert 0 <= sent[name][host] - rows[host] <= EPOCHS * OTHER_BYTES
    assert 2 * max(added) < min(as_they_come)
    # n bytes of the table in one step, and few rows in the other.
    for host in range(2):
        table = EPOCHS * WORDS * WIDTH * 4
        most = 5 * LENGTH * ROW_BYTES + 2 * OTHER_BYTES
        assert 0 <= sent["whole-table"][host] - table <= EPOCHS * most


@pytest.mark.worth_seconds(16)
@pytest.mark.parametrize("repeated_rows", ["auto", "sum"])
def test_over_sockets(tmp_path, repeated_rows):
    path = tmp_path / "rows"
    with Workers(2, MODULE, path, repeated_rows) as workers:
        outputs = workers.succeed()
    assert "engine sockets" in outputs[0]
    check_bytes(check_all(path, repeated_rows), repeated_rows)


@needs_mpi
@pytest.mark.slow
def test_over_mpi(tmp_path):
    path = str(tmp_path / "rows")
    printed = run_by_mpi(2, MODULE, path, "auto", TFDP_DEVICES_PER_WORKER="2")
    assert "engine mpi" in printed
    check_all(path, "auto")
