"""`Prometheus`: what a scraper and the probes of a cluster get during a training."""

import socket
import time
import urllib.error
import urllib.request

import keras
import numpy as np
import pytest

import tfdp
from tests.support.parity import make_strategy
from tfdp.callbacks import Checkpoint, Prometheus
from tfdp.errors import ConfigurationError

ROWS = np.ones((24, 4), "float32")


def asked(endpoint, path, method="GET"):
    """The status and the text of an answer."""
    url = f"http://127.0.0.1:{endpoint.port}{path}"
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def figures(endpoint):
    status, text = asked(endpoint, "/metrics")
    assert status == 200
    lines = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in lines}


class Asking(keras.callbacks.Callback):
    """Asks at the begin of the training and after each epoch."""

    def __init__(self, endpoint):
        super().__init__()
        self.endpoint, self.found = endpoint, []

    def on_train_begin(self, logs=None):
        self.at_begin = [
            asked(self.endpoint, path)[0] for path in ("/ready", "/healthy")
        ]

    def on_epoch_end(self, epoch, logs=None):
        self.found.append((figures(self.endpoint), dict(logs)))


def trained(*callbacks, epochs=2):
    with make_strategy(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(
        *(ROWS, ROWS[:, :1]),
        batch_size=4,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
    )


def test_steps_logs_and_saves_of_a_training_that_resumes(tmp_path):
    endpoint = Prometheus(port=0, address="127.0.0.1")
    asking = Asking(endpoint)
    before = time.time()
    trained(Checkpoint(tmp_path / "run"), endpoint, asking)
    assert asking.at_begin == [503, 200]
    for epoch, (found, logs) in enumerate(asking.found):
        assert found['tfdp_step{worker="0"}'] == 6 * (epoch + 1)
        assert found['tfdp_epoch{worker="0"}'] == epoch
        loss = found['tfdp_log{name="loss",worker="0"}']
        assert loss == pytest.approx(logs["loss"])
        assert found['tfdp_steps_per_second{worker="0"}'] > 0
    assert asked(endpoint, "/healthy")[0] == 200  # while the program goes on
    endpoint = asking.endpoint = Prometheus(endpoint.port, "127.0.0.1")
    trained(Checkpoint(tmp_path / "run"), endpoint, asking, epochs=3)
    found, _ = asking.found[-1]
    assert found['tfdp_step{worker="0"}'] == 18
    assert found['tfdp_saved_step{worker="0"}'] >= 12
    assert before < found['tfdp_saved_timestamp_seconds{worker="0"}'] <= time.time()


def test_a_step_that_takes_too_long_is_not_healthy():
    endpoint = Prometheus(port=0, address="127.0.0.1", stalled_seconds=0.2)
    statuses = {}

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                statuses["before"] = asked(endpoint, "/ready")
                time.sleep(0.5)
                statuses["stalled"] = asked(endpoint, "/healthy")
                statuses["ready"] = asked(endpoint, "/ready")

    trained(endpoint, Slow(), epochs=1)
    assert statuses["ready"][0] == 200 and statuses["stalled"][0] == 503
    assert statuses["stalled"][1].startswith("not so: the last step ended")
    time.sleep(0.3)
    assert asked(endpoint, "/healthy")[0] == 200  # a training that is over


def test_other_requests_are_refused():
    endpoint = Prometheus(port=0, address="127.0.0.1")
    statuses = []

    class Others(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            statuses.append(asked(endpoint, "/metrics", "POST")[0])
            statuses.append(asked(endpoint, "/etc/passwd")[0])

    trained(endpoint, Others(), epochs=1)
    assert statuses == [405, 404]


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = Prometheus(taken.getsockname()[1], "127.0.0.1")
        with pytest.raises(ConfigurationError, match="its own port"):
            trained(endpoint)


def test_an_address_of_no_machine_is_told():
    endpoint = Prometheus(0, "not an address")
    with pytest.raises(ConfigurationError, match="address='not an address'"):
        trained(endpoint)


@pytest.mark.parametrize(
    "options",
    [{"port": -1}, {"port": 65536}, {"port": "80"}, {"stalled_seconds": 0}]
    + [{"stalled_seconds": float("nan")}],
)
def test_bad_arguments(options):
    with pytest.raises(tfdp.errors.ConfigurationError):
        Prometheus(**options)
