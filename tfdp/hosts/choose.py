"""Which link suits a cluster, and why."""

from __future__ import annotations

from tfdp.cluster import Cluster
from tfdp.communication import Communication
from tfdp.errors import ConfigurationError
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.mpi_link import MpiLink, mpi_is_available
from tfdp.hosts.socket_link import SocketLink

__all__ = ["link_name", "make_link"]


def link_name(communication: Communication) -> tuple[str, str]:
    """The link that `communication` asks for, or that suits this process, and why."""
    if communication.engine != "auto":
        return communication.engine, "asked for by name"
    if mpi_is_available():
        return "mpi", "an MPI launcher started this process, and mpi4py is installed"
    return "sockets", "works everywhere; MPI under mpiexec with mpi4py"


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
        )
    if cluster.coordinator is None:
        raise ConfigurationError(
            f"{cluster.source} tells ranks but no address of worker 0. Install "
            "'tfdp[mpi]', or set TFDP_COORDINATOR to its 'host:port' for all workers."
        )
    return SocketLink(
        rank,
        workers,
        cluster.coordinator,
        communication.timeout_seconds,
        communication.silence_seconds,
    )
