"""Which link suits a cluster, and why."""

from __future__ import annotations

import warnings

from tfdp.cluster import Cluster
from tfdp.cluster.job_key import find_job_key
from tfdp.errors import ConfigurationError, JobKeyWarning
from tfdp.hosts.connect import job_secret
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.listener import is_loopback
from tfdp.hosts.mpi_link import MpiLink, mpi_is_available
from tfdp.hosts.rendezvous import parse_address
from tfdp.hosts.socket_link import SocketLink
from tfdp.plan.communication import Communication


def link_name(communication: Communication) -> tuple[str, str]:
    """The link that `communication` asks for, or that suits this process, and why."""
    if communication.engine != "auto":
        return communication.engine, "asked for by name"
    if communication.checksum:
        return "sockets", "Communication(checksum=True) is of what sockets carry"
    if mpi_is_available():
        return "mpi", "an MPI launcher started this process, and mpi4py is installed"
    return "sockets", (
        "works everywhere; NCCL for gradients where all hosts have GPUs; MPI under "
        "mpiexec with mpi4py"
    )


def make_link(cluster: Cluster, communication: Communication) -> HostLink:
    """The link that `communication.engine` names; else MPI's where it started us.

    Raises:
      ConfigurationError: when the engine cannot cross hosts, or no address is known.
    """
    engine, _ = link_name(communication)
    if engine not in ("sockets", "mpi", "tensorflow"):
        raise ConfigurationError(
            f"Communication(engine={engine!r}) does not cross hosts. Allowed with "
            "several workers: 'auto', 'sockets', 'mpi', 'tensorflow'."
        )
    rank, workers = cluster.rank, cluster.workers
    if engine == "mpi":
        return MpiLink(
            rank,
            workers,
            cluster.coordinator,
            communication.timeout_seconds,
            communication.silence_seconds,
            job_secret(cluster),
        )
    if cluster.coordinator is None:
        raise ConfigurationError(
            f"{cluster.source} tells ranks but no address of worker 0. Install "
            "'tfdp[mpi]', or set TFDP_COORDINATOR to its 'host:port' for all workers."
        )
    warn_without_key(cluster)
    return SocketLink(
        rank,
        workers,
        cluster.coordinator,
        communication.timeout_seconds,
        communication.silence_seconds,
        job_secret(cluster),
        communication.checksum,
    )


def warn_without_key(cluster: Cluster) -> None:
    """On worker 0, where the workers meet at an address that others can reach."""
    host, _ = parse_address(cluster.coordinator or "")
    if cluster.rank or is_loopback(host) or cluster.job_key or find_job_key():
        return
    warnings.warn(
        f"The workers of this job have no key: whoever reaches {cluster.coordinator} "
        "can join them, read what they exchange and change it. Give all workers the "
        "same secret in the variable TFDP_JOB_KEY (`python -c 'import secrets; "
        "print(secrets.token_hex())'` makes one), or start them with `tfdp launch`, "
        "which does. See docs/security.md.",
        JobKeyWarning,
        stacklevel=2,
    )
