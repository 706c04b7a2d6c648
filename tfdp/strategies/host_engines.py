"""The engine that carries sums between hosts, as `Communication` and shards ask."""

from __future__ import annotations

from tfdp.exchange.choose_engine import choose_engine
from tfdp.exchange.two_level import AcrossHostsEngine
from tfdp.exchange.two_level_collectives import TensorFlowAcrossHostsEngine
from tfdp.exchange.two_level_shards import ShardsAcrossHostsEngine
from tfdp.hosts.host_link import HostLink
from tfdp.plan.communication import Communication

__all__ = ["engine_across"]


def engine_across(
    link: HostLink,
    devices: tuple[str, ...],
    communication: Communication,
    shards_over_hosts: bool,
    by_collectives: bool,
) -> AcrossHostsEngine:
    """The engine of one host among several.

    Args:
      link: to the others.
      devices: of this host's replicas.
      communication: the strategy's.
      shards_over_hosts: whether hosts hold parts of one another's variables.
      by_collectives: whether TensorFlow's collectives carry the gradients.
    """
    wire_dtype = communication.link_dtype
    if by_collectives:
        hint = choose_engine(devices, communication).hint
        return TensorFlowAcrossHostsEngine(devices, link, hint, wire_dtype)
    engine = ShardsAcrossHostsEngine if shards_over_hosts else AcrossHostsEngine
    return engine(devices, link, wire_dtype)
