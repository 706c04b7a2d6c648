"""How hosts come together: by which link, and whether NCCL carries their gradients.

With `engine="auto"` and GPUs on all hosts gradients go by TensorFlow's collectives,
over NCCL; where one host cannot, by the link on all of them, and the reason is kept.
TensorFlow must meet the others before it starts, and a sum can be tried only then: so
the hosts agree before that, after it, and once more after the trial.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.collective_runtime import has_started
from tfdp.cluster import Cluster
from tfdp.cluster.nvidia import gpu_names
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.choose_engine import choose_engine, gpus_are_split
from tfdp.exchange.host_group import HostGroup
from tfdp.exchange.two_level_collectives import (
    NO_ANSWER,
    rendezvous_by_collectives,
    try_collectives,
)
from tfdp.hosts.choose_link import link_name, make_link
from tfdp.hosts.host_link import HostLink
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding

# The longest reason that travels.
MOST_REASON_BYTES = 1000
# Of the names of a worker's GPUs, some 40 each.
MOST_NAMES_BYTES = 10_000
NO_GPU = "it has no GPU"
NOT_RUN = (
    'gradients cross between hosts by NCCL, which engine="auto" takes where all hosts '
    "have GPUs; this was not run on a GPU. Communication(engine='sockets') does "
    "without."
)


@dataclasses.dataclass(frozen=True)
class HostConnection:
    """The hosts that came together.

    Args:
      group: of the hosts; None: they meet later, by a link.
      by_collectives: whether TensorFlow's collectives of all hosts have met.
      notes: what is worth saying of the choice, once.
    """

    group: HostGroup | None = None
    by_collectives: bool = False
    notes: tuple[str, ...] = ()


def meet(
    cluster: Cluster, communication: Communication, sharding: Sharding
) -> HostConnection:
    """Brings the hosts together as far as that must be before TensorFlow starts.

    Raises:
      ConfigurationError: when `engine="tensorflow"` is asked for and cannot be.
      CollectiveError: when not all workers come.
    """
    if cluster.workers == 1 or communication.min_hosts is not None:
        return HostConnection()  # those that may come and go meet in their own way
    over_all = bool(sharding.stage) and sharding.group == "all"
    if communication.engine == "tensorflow":
        if over_all:
            raise ConfigurationError(
                "Communication(engine='tensorflow') carries no shards between "
                "hosts. Use shard_group='host', which shards within each host, or "
                "another engine."
            )
        group = HostGroup(make_link(cluster, communication))
        return _closed_on_error(group, lambda: _engine_by_name(group))
    if communication.engine != "auto" or link_name(communication)[0] != "sockets":
        return HostConnection()
    if communication.checksum:
        return HostConnection()  # NCCL has none
    group = HostGroup(make_link(cluster, communication))
    return _closed_on_error(group, lambda: _chosen(group, over_all))


def _closed_on_error(
    group: HostGroup, act: Callable[[], HostConnection]
) -> HostConnection:
    try:
        return act()
    except BaseException:
        group.close()  # the others then hear that this worker will not come
        raise


def _engine_by_name(group: HostGroup) -> HostConnection:
    rendezvous_by_collectives(group.link)
    return HostConnection(group, by_collectives=True)


def _chosen(group: HostGroup, over_all: bool) -> HostConnection:
    """By collectives, where all can; asked of all hosts in the same order."""
    reasons = _reasons(group.link, _why_not_here(over_all), "whether NCCL can start")
    if len(reasons) == group.link.workers and len(set(reasons.values())) == 1:
        if NO_GPU in reasons.values():
            return HostConnection(group)  # nobody expects it
    if not reasons:
        reasons = _shared_gpus(group.link)
    if not reasons:
        reasons = _reasons(group.link, _start(group.link), "whether NCCL has started")
    return HostConnection(group, not reasons, _fallen_back(reasons))


def _why_not_here(over_all: bool) -> str:
    """Why this host cannot take NCCL; "": it can."""
    if not local_gpus():
        return NO_GPU
    if gpus_are_split():
        return "its logical GPUs share a GPU, which NCCL does not allow"
    if over_all:
        return "shards over all hosts travel by the link"
    if has_started():
        return "TensorFlow was in use before the strategy was made"
    return ""


def local_gpus() -> Sequence[Any]:
    """The GPUs that this process may use; TensorFlow does not start for it."""
    return tf.config.get_visible_devices("GPU")


def local_gpu_names() -> list[str]:
    """Unique names of `local_gpus`; of those alone for which there are any."""
    names = gpu_names(os.environ)
    places = [int(gpu.name.rsplit(":", 1)[1]) for gpu in local_gpus()]
    return [names[place] for place in places if place < len(names)]


def _shared_gpus(link: HostLink) -> dict[int, str]:
    """By rank, which GPU a worker shares with one before it; the same on all hosts."""
    blob = "\n".join(local_gpu_names()).encode()[:MOST_NAMES_BYTES]
    told = link.gather(blob, "which GPUs the workers have", most_bytes=MOST_NAMES_BYTES)
    owners: dict[str, int] = {}
    reasons: dict[int, str] = {}
    for rank, other in enumerate(told):
        for name in other.decode("utf-8", "replace").splitlines():
            if owners.setdefault(name, rank) != rank:
                reasons[rank] = (
                    f"{name[:MOST_REASON_BYTES]} is also worker {owners[name]}'s GPU, "
                    "and NCCL refuses two ranks on one"
                )
    return reasons


def _start(link: HostLink) -> str:
    try:
        rendezvous_by_collectives(link)
    except (ConfigurationError, tf.errors.OpError, RuntimeError) as error:
        if isinstance(error, CollectiveError):
            raise  # a worker is lost, which no other way mends
        return _short(error)
    return ""


def tried(
    meeting: HostConnection, devices: Sequence[str], by_name: bool
) -> HostConnection:
    """The meeting after a first sum by the collectives, unless they were asked for.

    Args:
      meeting: of `meet`.
      devices: of this host's replicas.
      by_name: whether `engine="tensorflow"` was asked for: then nothing is tried.
    """
    group = meeting.group
    if group is None or not meeting.by_collectives or by_name:
        return meeting
    hint = choose_engine(devices, Communication()).hint
    wrong = try_collectives(group.link, devices, hint)
    reasons = _reasons(group.link, wrong, "whether NCCL adds up")
    notes = _fallen_back(reasons) or (NOT_RUN,)
    return dataclasses.replace(meeting, by_collectives=not reasons, notes=notes)


def _reasons(link: HostLink, mine: str, label: str) -> dict[int, str]:
    """By rank, why a worker cannot; empty where all can."""
    blob = mine.encode()[:MOST_REASON_BYTES]
    told = link.gather(blob, label, most_bytes=MOST_REASON_BYTES)
    texts = {rank: other.decode("utf-8", "replace") for rank, other in enumerate(told)}
    return {rank: text for rank, text in texts.items() if text}


def _fallen_back(reasons: dict[int, str]) -> tuple[str, ...]:
    if not reasons:
        return ()
    # Who heard nothing may wait for who has said why.
    causes = {rank: why for rank, why in reasons.items() if why != NO_ANSWER}
    rank, why = next(iter((causes or reasons).items()))
    return (
        "gradients cross between hosts by sockets, through the memory of the hosts, "
        f"and not by NCCL: on worker {rank} {why}",
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
