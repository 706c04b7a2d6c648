"""Starts the processes of one arm and gives them turns, from the benchmark's side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.bench.processes.arms import GROUP_ARMS, find_mpiexec
from benchmarks.bench.request import Request
from tfdp.cluster.addresses import LOOPBACK, free_port
from tfdp.cluster.job_key import JOB_KEY, make_job_key
from tfdp.errors import CollectiveError
from tfdp.launch.environment import cluster_variables, local_environment
from tfdp.launch.handover import mpi_command
from tfdp.launch.program import Program
from tfdp.tools.measuring.two_hosts import ADDRESSES, TwoHosts
from tfdp.tools.processes.children import Children, ProcessFailed

LEAVE_SECONDS = 5.0
POLL_SECONDS = 0.2
GLOO_CARD = "GLOO_SOCKET_IFNAME"


@dataclasses.dataclass
class Figures:
    """One arm's figures by repeat: seconds of a call.

    `sent_bytes`: of a call, by a host, where there is a network.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: list[float] = dataclasses.field(default_factory=list)


class Group:
    """The processes of `arm`, on `hosts` or here; `close` ends them.

    `budget_seconds`: for everything together.
    """

    def __init__(
        self,
        request: Request,
        arm: str,
        budget_seconds: float,
        hosts: TwoHosts | None = None,
    ):
        self.arm = arm
        self._calls = request.calls
        self._budget_seconds = self._left_seconds = budget_seconds
        replicas = request.workers * request.devices
        row = self._row = GROUP_ARMS[arm]
        self.workers = replicas if row.is_flat else request.workers
        if row.start == "single":
            self.workers = 1
        self._devices_per_worker = 1 if row.is_flat else request.devices
        self._network = hosts
        self._folder = tempfile.TemporaryDirectory(prefix="tfdp-bench-")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"{self._folder.name}/control")
        self._server.listen(self.workers)
        self._connections: dict[int, socket.socket] = {}
        self.children = Children(self._folder.name)
        self._request = request
        self._is_closed = self._has_failed = False
        self._job_key = make_job_key()
        #: What each worker reported when it was ready, by rank.
        self.answers: list[dict[str, Any]] = []
        self.figures = Figures()

    def start(self) -> None:
        """Waits until all workers are ready; CollectiveError if one ends."""
        start = time.monotonic()
        for command, environment in self._commands():
            self.children.start(command, environment)
        while len(self._connections) < self.workers:
            self._accept(start)
        self._left_seconds -= time.monotonic() - start
        self.answers = self._receive_all()

    def turn(self) -> None:
        """Takes the figures of one repeat; CollectiveError as `start`.

        Seconds are those of the slowest worker.
        """
        before = self._sent_bytes()
        self._send_to_all(self._calls)
        answers = self._receive_all()
        self.figures.seconds.append(max(answer["seconds"] for answer in answers))
        if self._network is not None:
            # One untimed call more; see `time_in_turn`.
            share = (self._sent_bytes() - before) / (self._calls + 1)
            self.figures.sent_bytes.append(share)

    def close(self) -> None:
        """Ends all processes, by force if necessary."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._has_failed:
            with contextlib.suppress(OSError, ProcessFailed):  # gone already
                self._send_to_all(0)
                self.children.wait(LEAVE_SECONDS)
        for connection in self._connections.values():
            connection.close()  # ends the worker, see `Control`
        self._server.close()
        self.children.end(LEAVE_SECONDS)
        self._folder.cleanup()

    def _sent_bytes(self) -> float:
        """Bytes a host has sent so far, the mean of both."""
        if self._network is None:
            return 0.0
        return sum(self._network.sent_bytes(host) for host in (0, 1)) / 2

    def _commands(self) -> list[tuple[list[str], dict[str, str]]]:
        hosts = [
            ADDRESSES[self._host_of(rank)] if self._network else LOOPBACK
            for rank in range(self.workers)
        ]
        addresses = [f"{host}:{free_port()}" for host in hosts]
        cores = sorted(os.sched_getaffinity(0))
        has_core_each = len(cores) >= self._request.workers
        ranks = range(self.workers) if has_core_each else ()
        orders = {
            "request": dataclasses.asdict(self._request),
            "arm": self.arm,
            "place": {
                "workers": self.workers,
                "addresses": addresses,
                "devices_per_worker": self._devices_per_worker,
                "timeout_seconds": self._budget_seconds,
            },
            "cores": [cores[self._host_of(rank)] for rank in ranks],
            "control_path": f"{self._folder.name}/control",
        }
        program = Program(self._row.member, (json.dumps(orders),), is_module=True)
        if self._row.start == "mpi":
            _, *rest = mpi_command(
                program,
                workers=self.workers,
                devices_per_worker=self._devices_per_worker,
            )
            return [([find_mpiexec() or "mpiexec", *rest], dict(os.environ))]
        return [
            self._command(program, rank, addresses[0], len(cores))
            for rank in range(self.workers)
        ]

    def _command(
        self, program: Program, rank: int, coordinator: str, cores: int
    ) -> tuple[list[str], dict[str, str]]:
        variables = cluster_variables(
            self.workers, rank, coordinator, self._devices_per_worker
        )
        variables[JOB_KEY] = self._job_key
        environment = local_environment(
            os.environ, variables, workers=self.workers, rank=rank, cores=cores
        )
        command = program.command(sys.executable)
        if self._network is None:
            # gloo would look up the card of the machine's name.
            return list(command), {**environment, GLOO_CARD: "lo"}
        host = self._host_of(rank)
        environment[GLOO_CARD] = self._network.cards[host]
        return self._network.command(host, *command), environment

    def _host_of(self, rank: int) -> int:
        """Workers are split equally over hosts; without `hosts` over cores."""
        return rank * self._request.workers // max(self.workers, self._request.workers)

    def _accept(self, start: float) -> None:
        self._server.settimeout(POLL_SECONDS)
        try:
            connection, _ = self._server.accept()
        except TimeoutError:
            for number, process in enumerate(self.children.processes):
                if process.poll() is not None:
                    reason = f"a process ended with exit code {process.returncode}"
                    raise self._failure(reason, number) from None
            if time.monotonic() - start > self._left_seconds:
                raise self._failure(self._timeout_text()) from None
            return
        self._connections[_read_line(connection)["rank"]] = connection

    def _send_to_all(self, calls: int) -> None:
        for connection in self._connections.values():
            connection.sendall(json.dumps({"calls": calls}).encode() + b"\n")

    def _receive_all(self) -> list[dict[str, Any]]:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.workers:
            start = time.monotonic()
            waiting = [c for c, rank in ranks.items() if rank not in answers]
            ready, _, _ = select.select(waiting, [], [], max(self._left_seconds, 0))
            self._left_seconds -= time.monotonic() - start
            if not ready:
                raise self._failure(self._timeout_text())
            for connection in ready:
                rank = ranks[connection]
                try:
                    answers[rank] = _read_line(connection)
                except (OSError, ValueError) as error:
                    raise self._failure(f"worker {rank} ended", rank) from error
        return [answers[rank] for rank in range(self.workers)]

    def _timeout_text(self) -> str:
        return f"not done within its {self._budget_seconds:g} s; it was stopped"

    def _failure(self, reason: str, rank: int = 0) -> CollectiveError:
        self._has_failed = True
        # mpiexec is a single process, with the output of all workers.
        number = min(rank, len(self.children.processes) - 1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its last lines are then written.
            self.children.processes[number].wait(1.0)
        return CollectiveError(str(self.children.failure([number], reason)))


def _read_line(connection: socket.socket) -> dict[str, Any]:
    # A worker sends one short line and then waits: nothing follows it.
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError("the other side has closed the connection")
        data += part
    return json.loads(data)
