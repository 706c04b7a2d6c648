"""`find_cluster`: all claims that the environment makes, checked and combined."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from tfdp.cluster.claim import Claim, integer, present
from tfdp.cluster.description import Cluster
from tfdp.cluster.job_key import find_job_key
from tfdp.cluster.launchers import (
    read_kubernetes,
    read_mpich,
    read_open_mpi,
    read_tfdp,
    read_torchrun,
)
from tfdp.cluster.node_names import with_slurm_address
from tfdp.cluster.slurm import read_slurm
from tfdp.cluster.tf_config import read_tf_config
from tfdp.errors import ClusterError

__all__ = ["READERS", "find_cluster"]

# The first that knows the rank is believed; the others must agree with it.
READERS: tuple[Callable[[Mapping[str, str]], Claim | None], ...] = (
    read_tfdp,
    read_tf_config,
    read_slurm,
    read_kubernetes,
    read_open_mpi,
    read_mpich,
    read_torchrun,
)
MPI_SOURCES = ("Open MPI", "MPICH")


def find_cluster(environment: Mapping[str, str] | None = None) -> Cluster | None:
    """The cluster that the environment names, or None.

    Looked for in this order: `tfdp launch` (TFDP_WORKERS, TFDP_RANK,
    TFDP_COORDINATOR), TF_CONFIG, Slurm, Kubernetes, Open MPI, MPICH, torchrun.
    TFDP_COORDINATOR and TFDP_WORKERS also complete what another launcher leaves out;
    TFDP_JOB_KEY is the job's key, whoever started it.
    A launcher of one process around another launcher, as a Slurm allocation with one
    task (or one per node) around `mpiexec`, is no contradiction. TFDP_WORKERS=1 means
    alone, whatever else is set.

    A Slurm node whose name cannot be looked up here is given the address that Slurm
    has for it (`scontrol show node`).

    Args:
      environment: variables by name; None takes those of this process. With a mapping
        no name is looked up and nobody is asked.

    Raises:
      ClusterError: when a variable has no sense, two launchers contradict each
        other, or a part is missing; the message says what was found.

    >>> cluster = find_cluster({"RANK": "1", "WORLD_SIZE": "2",
    ...                         "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    >>> cluster.rank, cluster.workers, cluster.coordinator, cluster.source
    (1, 2, 'node1:29500', 'torchrun')
    """
    is_own = environment is None
    environment = os.environ if environment is None else environment
    devices = integer(
        present(environment, "TFDP_DEVICES_PER_WORKER"),
        "TFDP_DEVICES_PER_WORKER",
        least=1,
    )
    claims = [claim for read in READERS if (claim := read(environment)) is not None]
    claims = _without_surroundings(claims)
    if not claims:
        return None
    _refuse_contradictions(claims)
    cluster = _combine(claims, devices, find_job_key(environment))
    if is_own and cluster.source == "Slurm" and "TFDP_COORDINATOR" not in environment:
        return with_slurm_address(cluster)
    return cluster


def _without_surroundings(claims: Sequence[Claim]) -> list[Claim]:
    """The claims without those of launchers that merely surround another one."""
    alone = [claim for claim in claims if claim.workers == 1]
    if any(claim.source == "tfdp" for claim in alone):
        return [claim for claim in alone if claim.source == "tfdp"]
    inner = [claim for claim in claims if claim.workers != 1]
    if any(claim.source == "tfdp" and claim.rank is not None for claim in inner):
        # `tfdp launch` in pod 0: the job may have no other, no variable tells.
        inner = [c for c in inner if (c.workers, c.rank) != (None, 0)]
    if not any(claim.rank is not None for claim in inner):
        # Nobody but the lone process knows a rank: it is alone, if nobody objects.
        inner = list(claims)
    mpi = next((claim for claim in inner if claim.source in MPI_SOURCES), None)
    if mpi is None:
        return inner
    # mpiexec starts one daemon per node with srun, and its processes inherit the
    # variables of that step.
    return [
        claim
        for claim in inner
        if not (claim.one_task_per_node and claim.contradicts(mpi))
    ]


def _refuse_contradictions(claims: Sequence[Claim]) -> None:
    for place, claim in enumerate(claims):
        for other in claims[place + 1 :]:
            if claim.contradicts(other):
                raise ClusterError(
                    f"{claim.source} and {other.source} contradict each other: "
                    f"{claim.variables}, but {other.variables}. Start the program "
                    "with one of them, and unset the variables of the other."
                )


def _combine(
    claims: Sequence[Claim], devices: int | None, job_key: str | None
) -> Cluster:
    chosen = next((claim for claim in claims if claim.rank is not None), claims[0])
    # TFDP_COORDINATOR is for the user to set, so it comes before the chosen one's.
    by_preference = [
        *(claim for claim in claims if claim.source == "tfdp"),
        chosen,
        *claims,
    ]
    workers = next((c.workers for c in by_preference if c.workers is not None), None)
    coordinator = next((c.coordinator for c in by_preference if c.coordinator), None)
    lacks_coordinator = coordinator is None and chosen.needs_coordinator
    if chosen.rank is None or workers is None or (lacks_coordinator and workers > 1):
        raise ClusterError(
            "The environment names a cluster, but not all of it. Found: "
            f"{'; '.join(f'{c.variables} ({c.source})' for c in claims)}. "
            f"Missing: {', '.join(chosen.missing)}."
        )
    return _checked(chosen, workers, coordinator, devices, job_key, claims)


def _checked(
    chosen: Claim,
    workers: int,
    coordinator: str | None,
    devices: int | None,
    job_key: str | None,
    claims: Sequence[Claim],
) -> Cluster:
    try:
        return Cluster(
            workers=workers,
            rank=chosen.rank or 0,
            coordinator=coordinator,
            source=chosen.source,
            devices_per_worker=devices,
            job_key=job_key,
            job=chosen.job,
        )
    except ClusterError as error:
        found = "; ".join(f"{claim.variables} ({claim.source})" for claim in claims)
        raise ClusterError(f"{error} Found in the environment: {found}.") from None
