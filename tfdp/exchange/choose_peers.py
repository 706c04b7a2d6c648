"""Who exchanges compressed gradients over an engine."""

from __future__ import annotations

from tfdp.errors import ConfigurationError
from tfdp.exchange.engine import Engine
from tfdp.exchange.host_peers import HostLeaders
from tfdp.exchange.in_process import InProcessEngine
from tfdp.exchange.level_peers import LevelLeaders
from tfdp.exchange.peers import PeerGroup
from tfdp.exchange.replica_peers import AllReplicas
from tfdp.exchange.two_level import AcrossHostsEngine

__all__ = ["peer_group"]


def peer_group(engine: Engine, across: str) -> PeerGroup:
    """All replicas of an engine, or one of each host.

    Args:
      engine: what moves the tensors.
      across: "hosts" or "replicas"; see `Communication`.

    Raises:
      ConfigurationError: where an engine cannot do so.
    """
    if isinstance(engine, AcrossHostsEngine):
        return HostLeaders(engine)
    if across == "replicas":
        return AllReplicas(engine)
    if isinstance(engine, InProcessEngine):
        return LevelLeaders(engine)
    raise ConfigurationError(
        f"The engine {engine.name!r} has no simulated hosts to compress between. Use "
        "engine='in_process', or compression_across='replicas'."
    )
