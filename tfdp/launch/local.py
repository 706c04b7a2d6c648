"""Workers on this machine, and their shares of its GPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from tfdp.checks import integer_from
from tfdp.cluster.addresses import LOOPBACK
from tfdp.cluster.job_key import JOB_KEY
from tfdp.cluster.nvidia import ALLOW_GROWTH, VISIBLE, named_gpus, query_gpus
from tfdp.errors import ConfigurationError
from tfdp.launch.environment import cluster_variables, local_environment
from tfdp.launch.program import Program
from tfdp.launch.worker import WorkerCommand


def local_commands(
    program: Program,
    environment: Mapping[str, str],
    *,
    workers: int,
    port: int,
    devices_per_worker: int | None,
    cores: int,
    job_key: str,
    places: Sequence[int] | None = None,
    restarts: int = 0,
    workers_per_gpu: int = 1,
) -> list[WorkerCommand]:
    """One command per worker; they connect on the loopback interface.

    Args:
      workers: among which the machine's GPUs are divided, at least 1.
      places: numbers of the workers that run, rank 0 first; None: all. A place keeps
        its GPUs; those of an absent place stay unused, as they may be broken.
      restarts: how often the workers were started before.
      workers_per_gpu: how many share one GPU; they allocate its memory on demand.
    """
    coordinator = f"{LOOPBACK}:{port}"
    gpus = own_gpus(environment)
    if workers_per_gpu > 1:
        environment = dict([ALLOW_GROWTH]) | dict(environment)
    running = range(workers) if places is None else places
    return [
        WorkerCommand(
            rank,
            program.command(sys.executable),
            local_environment(
                environment,
                cluster_variables(
                    len(running), rank, coordinator, devices_per_worker, restarts
                )
                | share_of_gpus(gpus, workers, place, workers_per_gpu)
                | {JOB_KEY: job_key},
                workers=len(running),
                rank=rank,
                cores=cores,
            ),
        )
        for rank, place in enumerate(running)
    ]


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--workers-per-gpu`."""
    add, number = parser.add_argument, integer_from(1)
    what = "how many workers of this machine share each of its GPUs (default: 1)"
    add("--workers-per-gpu", type=number, default=1, metavar="N", help=what)


def check_gpu_options(places: Mapping[str, bool], options: argparse.Namespace) -> None:
    """Raises a ConfigurationError for `--workers-per-gpu` if `places` are elsewhere."""
    for name, is_given in places.items():
        if is_given and options.workers_per_gpu > 1:
            raise ConfigurationError(
                f"--workers-per-gpu has no effect with {name}: it divides the GPUs "
                "of this machine. Leave it out."
            )


def own_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES, else `nvidia-smi`, names."""
    named = named_gpus(environment)
    # UUIDs, as CUDA and the driver may count the GPUs in different orders.
    return query_gpus("uuid") if named is None else named


def share_of_gpus(
    gpus: Sequence[str], workers: int, rank: int, workers_per_gpu: int = 1
) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for one worker's equal share of the GPUs.

    With `workers_per_gpu` above 1, consecutive ranks share one. A ConfigurationError if
    the GPUs do not divide evenly.
    """
    if workers_per_gpu > 1:
        if not gpus:
            raise ConfigurationError(
                "--workers-per-gpu divides GPUs, and this machine has none that "
                f"nvidia-smi lists or {VISIBLE} names. Leave it out."
            )
        if workers != workers_per_gpu * len(gpus):
            raise ConfigurationError(
                f"--workers-per-gpu {workers_per_gpu} on {len(gpus)} GPUs is for "
                f"--workers {workers_per_gpu * len(gpus)}. Received: {workers}. Give "
                f"that, or set {VISIBLE} to the GPUs to use."
            )
        return {VISIBLE: gpus[rank // workers_per_gpu]}
    if workers == 1 or not gpus:
        return {}
    each, left = divmod(len(gpus), workers)
    if not each or left:
        raise ConfigurationError(
            f"{workers} workers cannot share {len(gpus)} GPUs evenly. Choose a number "
            f"that divides {len(gpus)} (one worker drives all GPUs), let some share "
            f"one (--workers-per-gpu), or set {VISIBLE} to the GPUs to use ('': CPU)."
        )
    return {VISIBLE: ",".join(gpus[rank * each : (rank + 1) * each])}
