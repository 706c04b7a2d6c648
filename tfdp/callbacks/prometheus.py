"""`Prometheus`: an HTTP endpoint with the figures of a training, and for probes."""

from __future__ import annotations

import collections
import math
import socketserver
import threading
import time
import wsgiref.simple_server
from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfdp.callbacks.other_callbacks import Logs
from tfdp.callbacks.step_count import StepCount
from tfdp.checks import check_whole, is_number
from tfdp.cluster import progress
from tfdp.errors import ConfigurationError, MissingDependencyError

#: Rates are those of this time, or of the steps since the training began.
RATE_SECONDS = 30.0
#: A peer that connects and says nothing is left alone after this time.
PEER_SECONDS = 10.0
TEXT = ("Content-Type", "text/plain; charset=utf-8")


class Prometheus(keras.callbacks.Callback):
    """Serves the step, its rate, losses, slow workers and saves to Prometheus.

    GET /metrics gives, in Prometheus' text format:

        tfdp_step                       steps since the training began, saves included
        tfdp_steps_per_second           of the last 30 s
        tfdp_epoch                      the current epoch, from 0
        tfdp_log{name="loss"}           each value of the logs of the last step or epoch
        tfdp_saved_step                 the step of the newest complete Checkpoint
        tfdp_saved_timestamp_seconds    when it was complete, by the system clock

    With `Stragglers` before it in `callbacks=`, the logs have `straggler_worker`. GET
    /healthy answers 200 unless a step takes longer than `stalled_seconds`, and GET
    /ready answers 200 from the first step on: both else 503. The endpoint stays until
    the process ends.

    Args:
      port: the TCP port, 1 to 65535; each worker of one machine needs its own. 0: a
        free one, which `port` is from then on.
      address: where to listen: "" on all interfaces, "127.0.0.1" for this machine.
        Anyone who reaches the port reads the figures.
      stalled_seconds: the longest step that is healthy, above 0. The first step, which
        traces and compiles, counts as well.

    Raises:
      ConfigurationError: for a bad argument; when training begins: the port is taken.
      MissingDependencyError: without `pip install prometheus-client`.

    Cost: a few microseconds in a step, and one thread; a request takes a millisecond.

    ```python
    import urllib.request

    import keras
    import numpy as np
    import tfdp

    class Scrape(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            url = f"http://127.0.0.1:{endpoint.port}/metrics"
            print(urllib.request.urlopen(url).read().decode().splitlines()[2])

    endpoint = tfdp.callbacks.Prometheus(port=0, address="127.0.0.1")
    with tfdp.auto_strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[endpoint, Scrape()])
    # tfdp_step{worker="0"} 8.0
    ```
    """

    def __init__(
        self, port: int = 9400, address: str = "", stalled_seconds: float = 1800.0
    ):
        super().__init__()
        check_whole("port", port, least=0, most=65535)
        if not is_number(stalled_seconds) or not 0 < stalled_seconds < math.inf:
            raise ConfigurationError(
                "stalled_seconds must be a number of seconds above 0. Received: "
                f"{stalled_seconds!r}."
            )
        try:
            import prometheus_client
        except ImportError:
            raise MissingDependencyError(
                "tfdp.callbacks.Prometheus needs prometheus_client, the client library "
                "of Prometheus: pip install prometheus-client."
            ) from None
        self.port, self._address = port, address
        self._stalled_seconds = stalled_seconds
        registry = prometheus_client.CollectorRegistry()

        def gauge(name: str, about: str, *labels: str) -> Any:
            own = ("worker", *labels)
            return prometheus_client.Gauge(
                f"tfdp_{name}", about, own, registry=registry
            )

        self._gauges = {
            "step": gauge("step", "Steps since the training began."),
            "rate": gauge("steps_per_second", "Steps per second, of the last 30 s."),
            "epoch": gauge("epoch", "The current epoch, from 0."),
            "log": gauge("log", "A value of the logs.", "name"),
            "saved": gauge("saved_step", "The step of the newest checkpoint."),
            "saved_at": gauge("saved_timestamp_seconds", "When it was complete."),
        }
        self._metrics = prometheus_client.make_wsgi_app(registry)

    def on_train_begin(self, logs: Logs = None) -> None:
        cluster = getattr(self.model.distribute_strategy, "cluster", None)
        self._worker = str(0 if cluster is None else cluster.rank)
        self._count = StepCount()
        now_seconds = time.monotonic()
        self._steps = collections.deque([(now_seconds, 0)])
        self._last_seconds, self._is_ready = now_seconds, False
        self._is_over = False
        self.port = _serve(self._address, self.port, self._answer)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._gauges["epoch"].labels(self._worker).set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._count.begin(batch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._count.end(batch)
        self._last_seconds, self._is_ready = time.monotonic(), True
        self._steps.append((self._last_seconds, self._count.done))
        oldest = self._last_seconds - RATE_SECONDS
        while len(self._steps) > 2 and self._steps[1][0] < oldest:
            self._steps.popleft()
        self._set_logs(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        # Validation, and callbacks at the end of an epoch, are no step.
        self._last_seconds = time.monotonic()
        self._set_logs(logs)

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._last_seconds = time.monotonic()

    def on_train_end(self, logs: Logs = None) -> None:
        # A program that evaluates and exports is no training that has stalled.
        self._is_over = True

    def _set_logs(self, logs: Logs) -> None:
        for name, value in (logs or {}).items():
            if is_number(value):
                self._gauges["log"].labels(self._worker, name).set(value)

    def _answer(
        self, environment: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        """The WSGI application; in a thread of each request."""
        path, method = environment["PATH_INFO"], environment["REQUEST_METHOD"]
        if method != "GET":
            start("405 Method Not Allowed", [TEXT])
            return [b"GET only\n"]
        if path == "/metrics":
            self._refresh()
            found: Iterable[bytes] = self._metrics(environment, start)
            return found
        if path == "/ready":
            is_so, text = self._is_ready, "steps are made"
        elif path == "/healthy":
            seconds = time.monotonic() - self._last_seconds
            is_so = self._is_over or seconds <= self._stalled_seconds
            text = f"the last step ended {seconds:.0f} s ago"
        else:
            start("404 Not Found", [TEXT])
            return [b"/metrics, /healthy, /ready\n"]
        start("200 OK" if is_so else "503 Service Unavailable", [TEXT])
        return [f"{'' if is_so else 'not so: '}{text}\n".encode()]

    def _refresh(self) -> None:
        """Sets what no step sets."""
        own, steps = progress.own_progress(), list(self._steps)
        (begin, before), (_, done) = steps[0], steps[-1]
        seconds = max(time.monotonic() - begin, 1e-9)
        self._gauges["rate"].labels(self._worker).set((done - before) / seconds)
        self._gauges["step"].labels(self._worker).set(done + (own.resumed_step or 0))
        if own.saved_step is not None and own.saved_seconds is not None:
            age_seconds = time.monotonic() - own.saved_seconds
            self._gauges["saved"].labels(self._worker).set(own.saved_step)
            self._gauges["saved_at"].labels(self._worker).set(time.time() - age_seconds)


class _Server(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = PEER_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: a scraper asks every few seconds."""


# The servers of this process, by address and port; each serves until the process ends.
_servers: dict[tuple[str, int], _Server] = {}


def _serve(address: str, port: int, answer: Callable[..., Any]) -> int:
    """Lets `answer` answer from now on; returns the port."""
    server = _servers.get((address, port))
    if server is None:
        try:
            server = _Server((address, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"Prometheus(port={port}, address={address!r}) cannot listen there: "
                f"{error.strerror}. Give an address of this machine ('': all), and "
                "each worker of a machine its own port, as in Prometheus(port=9400 + "
                "strategy.cluster.rank)."
            ) from error
        _servers[address, server.server_port] = server
        threading.Thread(target=server.serve_forever, daemon=True).start()
    server.set_app(answer)
    return server.server_port
