"""Readers of the launchers that set rank and size in plain variables."""

from __future__ import annotations

from collections.abc import Mapping

from tfdp.cluster.addresses import FIRST_PORT, LAST_PORT
from tfdp.cluster.description import Claim, integer, join_address, present
from tfdp.errors import ClusterError

# Worker 0's port in a Kubernetes job, in which it has its own address.
DEFAULT_PORT = 25000


def read_tfdp(environment: Mapping[str, str]) -> Claim | None:
    """TFDP_WORKERS, TFDP_RANK and TFDP_COORDINATOR, which `tfdp launch` sets.

    Without TFDP_RANK the other two complete another launcher's claim.
    """
    found = present(environment, "TFDP_WORKERS", "TFDP_RANK", "TFDP_COORDINATOR")
    if not found:
        return None
    workers = integer(found, "TFDP_WORKERS", least=1)
    rank = integer(found, "TFDP_RANK", least=0)
    return Claim(
        source="tfdp",
        found=found,
        workers=workers,
        rank=0 if workers == 1 and rank is None else rank,
        coordinator=found.get("TFDP_COORDINATOR"),
        missing=_missing(found, "TFDP_WORKERS", "TFDP_RANK", "TFDP_COORDINATOR"),
    )


def read_kubernetes(environment: Mapping[str, str]) -> Claim | None:
    """The pods of an Indexed Job, alone or as the replicated job of a JobSet.

    Kubernetes gives a pod only its index; the number of pods comes from TFDP_WORKERS,
    and worker 0's address from TFDP_COORDINATOR or the JobSet's names (JOBSET_NAME and
    REPLICATED_JOB_NAME, set by the downward API from the annotations
    jobset.sigs.k8s.io/jobset-name and .../replicatedjob-name).
    """
    found = present(environment, "JOB_COMPLETION_INDEX")
    if not found:
        return None
    rank = integer(found, "JOB_COMPLETION_INDEX", least=0)
    jobset = present(environment, "JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX")
    coordinator = None
    if "JOBSET_NAME" in jobset and "REPLICATED_JOB_NAME" in jobset:
        if integer(jobset, "JOB_INDEX", least=0):
            raise ClusterError(
                f"JOB_INDEX={jobset['JOB_INDEX']}: the JobSet repeats its job. Set "
                "replicas to 1 and completions to the number of workers."
            )
        name, subdomain = jobset["REPLICATED_JOB_NAME"], jobset["JOBSET_NAME"]
        coordinator = join_address(f"{subdomain}-{name}-0-0.{subdomain}", DEFAULT_PORT)
        found |= jobset
    given = present(environment, "TFDP_WORKERS", "TFDP_COORDINATOR")
    missing = list(_missing(given, "TFDP_WORKERS"))
    if coordinator is None:
        missing += _missing(given, "TFDP_COORDINATOR")
    return Claim(
        source="Kubernetes",
        found=found,
        rank=rank,
        coordinator=coordinator,
        missing=tuple(missing),
    )


def read_open_mpi(environment: Mapping[str, str]) -> Claim | None:
    """OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, from Open MPI's mpiexec."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return _read_mpi("Open MPI", environment, *names)


def read_mpich(environment: Mapping[str, str]) -> Claim | None:
    """PMI_RANK and PMI_SIZE, from the mpiexec of MPICH and its derivatives."""
    return _read_mpi("MPICH", environment, "PMI_RANK", "PMI_SIZE")


def _read_mpi(
    source: str, environment: Mapping[str, str], rank: str, size: str
) -> Claim | None:
    found = present(environment, rank, size)
    if not found:
        return None
    return Claim(
        source=source,
        found=found,
        workers=integer(found, size, least=1),
        rank=integer(found, rank, least=0),
        missing=_missing(found, rank, size),
        needs_coordinator=False,
    )


def read_torchrun(environment: Mapping[str, str]) -> Claim | None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    RANK alone, or MASTER_ADDR alone (common in batch scripts), claims nothing. If
    torchrun itself listens on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), the workers
    use another port derived from it.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = present(environment, *names)
    if "WORLD_SIZE" not in found and not {"RANK", "MASTER_ADDR"} <= set(found):
        return None
    workers = integer(found, "WORLD_SIZE", least=1)
    coordinator = None
    if "MASTER_ADDR" in found and "MASTER_PORT" in found:
        port = integer(found, "MASTER_PORT", least=1) or 0
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # 20000 to 29999, equal on all hosts, never MASTER_PORT itself.
            port = FIRST_PORT + (port + 1) % (LAST_PORT + 1 - FIRST_PORT)
        coordinator = join_address(found["MASTER_ADDR"], port)
    return Claim(
        source="torchrun",
        found=found,
        workers=workers,
        rank=0 if workers == 1 else integer(found, "RANK", least=0),
        coordinator=coordinator,
        missing=_missing(found, *names),
        job=environment.get("TORCHELASTIC_RUN_ID", ""),
    )


def _missing(found: Mapping[str, str], *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in found)
