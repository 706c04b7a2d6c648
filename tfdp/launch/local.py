"""Workers on this machine."""

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
    """One command per worker; they meet on the loopback interface.

    Args:
      workers: among which the machine's GPUs are shared, at least 1.
      places: those of them that run, rank 0 first; None: all. A place keeps its GPUs,
        and what another one leaves is left: it may be broken.
      restarts: how often they have been started before.
      workers_per_gpu: that share one; they take its memory as they need it.

    Raises:
      ConfigurationError: when the machine's GPUs do not go round evenly.
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


# The GPUs of this machine, shared out among its workers.


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the option of `tfdp launch` that is about this machine's GPUs."""
    parser.add_argument(
        "--workers-per-gpu",
        type=integer_from(1),
        default=1,
        metavar="N",
        help="so many workers of this machine share each of its GPUs (default: 1)",
    )


def refuse_gpu_words(places: Mapping[str, bool], options: argparse.Namespace) -> None:
    """Where workers do not run on this machine.

    Args:
      places: options that start workers elsewhere, and whether they were given.
      options: of `tfdp launch`.

    Raises:
      ConfigurationError: when one of them comes with `--workers-per-gpu`.
    """
    for name, is_given in places.items():
        if is_given and options.workers_per_gpu > 1:
            raise ConfigurationError(
                f"--workers-per-gpu has no effect with {name}: it shares out the GPUs "
                "of this machine. Leave it out."
            )


def own_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a program started here would see, as CUDA names them.

    Args:
      environment: of the program.

    Returns:
      What CUDA_VISIBLE_DEVICES lists, where it is set; else what `nvidia-smi` lists;
      nothing where there is no such program.
    """
    named = named_gpus(environment)
    # Unique names: CUDA and the driver may count the GPUs in different orders.
    return query_gpus("uuid") if named is None else named


def share_of_gpus(
    gpus: Sequence[str], workers: int, rank: int, workers_per_gpu: int = 1
) -> dict[str, str]:
    """The variable that leaves one worker its own part of the GPUs; each as many.

    Args:
      gpus: of the machine.
      workers: on this machine.
      rank: of the worker.
      workers_per_gpu: that share one; above 1, neighbours by rank have one GPU each.

    Raises:
      ConfigurationError: when the GPUs do not go round evenly.

    >>> share_of_gpus(["0", "1", "2", "3"], workers=2, rank=1)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    if workers_per_gpu > 1:
        if not gpus:
            raise ConfigurationError(
                "--workers-per-gpu shares out GPUs, and this machine has none that "
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
            f"of workers that divides {len(gpus)} (one worker drives all GPUs), let "
            f"some share one (--workers-per-gpu), or set {VISIBLE}: to nothing for the "
            "CPU, or to the GPUs to use."
        )
    return {VISIBLE: ",".join(gpus[rank * each : (rank + 1) * each])}
