"""Workers on hosts that ssh reaches, one on each.

Each host runs `python -m tfdp.launch.remote`, which stops its worker when its standard
input, a pipe from this launcher, ends or breaks. The pipe's first line is the job's
key, as command lines are visible to all users of a host.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from tfdp.cluster.description import join_address
from tfdp.errors import ConfigurationError
from tfdp.launch.environment import UNBUFFERED, cluster_variables
from tfdp.launch.program import Program
from tfdp.launch.worker import WorkerCommand

CONNECT_SECONDS = 30
SSH = (
    "ssh",
    *("-o", "BatchMode=yes"),  # a password prompt would block forever
    *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),  # TCP alone tries for minutes
    *("-o", "ServerAliveInterval=5"),  # detects a dead connection after 15 s
    *("-o", "ServerAliveCountMax=3"),
)
ONLY_HERE = ("localhost", "127.", "::1")


def parse_hosts(text: str, any_may_be_first: bool = False) -> list[str]:
    """The hosts of `--hosts`: names or `user@name`, separated by commas.

    With `any_may_be_first` those before any host may drop out.
    """
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if not host or host.startswith("-") or any(c.isspace() for c in host):
            raise ConfigurationError(
                "--hosts needs names separated by commas, as node1,me@node2. "
                f"Received: {text!r}."
            )
        if hosts.count(host) > 1:
            raise ConfigurationError(
                f"--hosts names {host} twice. One worker on each host drives all its "
                "devices; for several on one machine use --workers without --hosts."
            )
    for host in hosts if any_may_be_first else hosts[:1]:
        if len(hosts) > 1 and _name(host).startswith(ONLY_HERE):
            raise ConfigurationError(
                f"--hosts: all workers connect to the first host; {host!r} is another "
                "machine on every host. Give its name in the network."
            )
    return hosts


def ssh_commands(
    program: Program,
    environment: Mapping[str, str],
    hosts: Sequence[str],
    *,
    folder: str,
    port: int,
    devices_per_worker: int | None,
    grace_seconds: float,
    job_key: str,
    restarts: int = 0,
) -> list[WorkerCommand]:
    """One ssh command per host; worker 0, the coordinator, is on the first.

    `environment` is of the local ssh processes; the workers get the remote login's, and
    the cluster's variables. `folder` is the working directory on every host. `job_key`
    is sent to the workers' standard input.
    """
    coordinator = join_address(_name(hosts[0]), port)
    return [
        WorkerCommand(
            rank,
            [
                *SSH,
                host,
                remote_command(
                    program,
                    cluster_variables(
                        len(hosts), rank, coordinator, devices_per_worker, restarts
                    ),
                    folder=folder,
                    grace_seconds=grace_seconds,
                ),
            ],
            environment,
            keeps_stdin=True,
            first_input=f"{job_key}\n".encode(),
        )
        for rank, host in enumerate(hosts)
    ]


def remote_command(
    program: Program, variables: Mapping[str, str], *, folder: str, grace_seconds: float
) -> str:
    """The quoted line for the remote shell: the same Python, the same folder."""
    settings = [
        f"{name}={value}" for name, value in {**UNBUFFERED, **variables}.items()
    ]
    words = [
        *("exec", "env", *settings),
        *(sys.executable, "-m", "tfdp.launch.remote", f"{grace_seconds:g}"),
        *program.command(sys.executable),
    ]
    return f"cd {shlex.quote(folder)} && {shlex.join(words)}"


def _name(host: str) -> str:
    return host.rpartition("@")[2]
