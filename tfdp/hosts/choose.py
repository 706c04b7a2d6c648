"""Which link suits a cluster, and why."""

from __future__ import annotations

from tfdp.cluster import Cluster
from tfdp.communication import Communication
from tfdp.errors import ConfigurationError
from tfdp.hosts.link import HostLink, SocketLink
from tfdp.hosts.mpi_link import MpiLink, mpi_is_available

__all__ = ["make_link"]


def make_link(cluster: Cluster, communication: Communication) -> HostLink:
    """The link that `communication.engine` names; else MPI's where it started us.

    Raises:
      ConfigurationError: when the engine cannot cross hosts, or no address is known.
    """
    engine = communication.engine
    if engine not in ("auto", "sockets", "mpi"):
        raise ConfigurationError(
            f"Communication(engine={engine!r}) does not cross hosts. Allowed with "
            "several workers: 'auto', 'sockets', 'mpi'."
        )
    rank, workers = cluster.rank, cluster.workers
    if engine == "mpi" or (engine == "auto" and mpi_is_available()):
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
