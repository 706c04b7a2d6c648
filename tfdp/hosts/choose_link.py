"""Chooses the link of a cluster, and gives the reason."""

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
    """The name of the link that `communication` requests or that suits, and why."""
    if communication.engine != "auto":
        return communication.engine, "requested by name"
    if communication.checksum:
        return "sockets", "only sockets support Communication(checksum=True)"
    if mpi_is_available():
        return "mpi", "an MPI launcher started this process, and mpi4py is installed"
    return "sockets", (
        "works everywhere; NCCL for gradients where all hosts have GPUs; MPI under "
        "mpiexec with mpi4py"
    )


def make_link(cluster: Cluster, communication: Communication) -> HostLink:
    """The link of `communication.engine`, or the one that suits this process.

    Raises:
      ConfigurationError: the engine has no coordinator address.
    """
    engine, _ = link_name(communication)
    rank, workers, secret = cluster.rank, cluster.workers, job_secret(cluster)
    seconds = communication.timeout_seconds, communication.silence_seconds
    if engine == "mpi":
        return MpiLink(rank, workers, cluster.coordinator, *seconds, secret)
    if cluster.coordinator is None:
        raise ConfigurationError(
            f"{cluster.source} gives ranks but no address of worker 0. Install "
            "'tfdp[mpi]', or set TFDP_COORDINATOR to its 'host:port' for all workers."
        )
    warn_without_key(cluster)
    options = (*seconds, secret, communication.checksum)
    return SocketLink(rank, workers, cluster.coordinator, *options)


def warn_without_key(cluster: Cluster) -> None:
    """Warns on worker 0 if others can reach the coordinator and no key is set."""
    host, _ = parse_address(cluster.coordinator or "")
    if cluster.rank or is_loopback(host) or cluster.job_key or find_job_key():
        return
    warnings.warn(
        "The workers of this job have no key: anyone who reaches "
        f"{cluster.coordinator} can join them, read what they exchange and change it. "
        "Give all workers the "
        "same secret in the variable TFDP_JOB_KEY (`python -c 'import secrets; "
        "print(secrets.token_hex())'` makes one), or start them with `tfdp launch`, "
        "which does. See docs/security.md.",
        JobKeyWarning,
        stacklevel=2,
    )
