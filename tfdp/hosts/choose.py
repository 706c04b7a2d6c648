"""Which link suits a cluster, and why."""

from __future__ import annotations

from tfdp.cluster import Cluster
from tfdp.communication import Communication
from tfdp.errors import ConfigurationError
from tfdp.hosts.link import HostLink, SocketLink

__all__ = ["make_link"]


def make_link(cluster: Cluster, communication: Communication) -> HostLink:
    """The link that `communication.engine` names, or sockets.

    Raises:
      ConfigurationError: when the engine cannot cross hosts, or no address is known.
    """
    engine = communication.engine
    if engine not in ("auto", "sockets"):
        raise ConfigurationError(
            f"Communication(engine={engine!r}) does not cross hosts. Allowed with "
            "several workers: 'auto', 'sockets'."
        )
    if cluster.coordinator is None:
        raise ConfigurationError(
            f"{cluster.source} tells ranks but no address. Set TFDP_COORDINATOR to "
            "'host:port' of worker 0 for all workers."
        )
    return SocketLink(
        cluster.rank,
        cluster.workers,
        cluster.coordinator,
        communication.timeout_seconds,
    )
