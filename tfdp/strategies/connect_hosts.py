"""Connects the hosts, and chooses whether NCCL carries their gradients.

With `engine="auto"` and GPUs on all hosts, gradients use TensorFlow's collectives over
NCCL; if one host cannot, all use the link, and the reason is kept. TensorFlow needs its
rendezvous before it starts, but can try a sum only afterwards: so the hosts agree
before the start, after it, and after the trial.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.collective_runtime import has_started
from tfdp.cluster import Cluster
from tfdp.cluster.nvidia import gpu_names
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.choose_engine import choose_engine, gpus_are_split
from tfdp.exchange.host_group import HostGroup
from tfdp.exchange.over_collectives import (
    NO_ANSWER,
    rendezvous_by_collectives,
    try_collectives,
)
from tfdp.hosts.choose_link import make_link
from tfdp.hosts.host_link import HostLink
from tfdp.plan.communication import Communication
from tfdp.plan.options import Given, why_not

MOST_REASON_BYTES = 1000
# For the names of a worker's GPUs, about 40 bytes each.
MOST_NAMES_BYTES = 10_000
NO_GPU = "it has no GPU"
NOT_RUN = (
    'gradients cross between hosts by NCCL, which engine="auto" takes where all hosts '
    "have GPUs; this was not run on a GPU. Communication(engine='sockets') avoids it."
)


@dataclasses.dataclass(frozen=True)
class HostConnection:
    """The connected hosts (`group` None: there are none), with notes for `fit`."""

    group: HostGroup | None = None
    by_collectives: bool = False
    notes: tuple[str, ...] = ()


def connect_hosts(
    cluster: Cluster, communication: Communication, given: Given
) -> HostConnection:
    """Connects the hosts; call it before TensorFlow starts."""
    why = why_not(given.replace(**{"Communication.engine": "tensorflow"}))
    by_name = communication.engine == "tensorflow"
    # NCCL has no checksum.
    may_use_nccl = communication.engine == "auto" and not communication.checksum
    group = HostGroup(make_link(cluster, communication))
    try:
        if not by_name:
            is_open = may_use_nccl and group.link.name == "sockets"
            return _choose(group, why) if is_open else HostConnection(group)
        rendezvous_by_collectives(group.link)
        return HostConnection(group, by_collectives=True)
    except BaseException:
        group.close()  # notifies the others, which then do not wait
        raise


def _choose(group: HostGroup, why: str) -> HostConnection:
    """Collectives if all hosts can; all hosts exchange in the same order."""
    reasons = _reasons(group.link, _why_not_here(why), "whether NCCL can start")
    if len(reasons) == group.link.workers and set(reasons.values()) == {NO_GPU}:
        return HostConnection(group)  # needs no note
    if not reasons:
        reasons = _shared_gpus(group.link)
    if not reasons:
        reasons = _reasons(group.link, _start(group.link), "whether NCCL has started")
    return HostConnection(group, not reasons, _fallen_back(reasons))


def _why_not_here(why: str) -> str:
    """Why this host cannot use NCCL; "": it can. `why`: by the options."""
    if not local_gpus():
        return NO_GPU
    if gpus_are_split():
        return "its logical GPUs share a GPU, which NCCL does not allow"
    if why:
        return why
    if has_started():
        return "TensorFlow was in use before the strategy was made"
    return ""


def local_gpus() -> Sequence[Any]:
    """The GPUs that this process may use, without starting TensorFlow."""
    return tf.config.get_visible_devices("GPU")


def _shared_gpus(link: HostLink) -> dict[int, str]:
    """Names, by rank, a GPU that an earlier worker uses, too; the same on all hosts."""
    names = gpu_names(os.environ)
    places = [int(gpu.name.rsplit(":", 1)[1]) for gpu in local_gpus()]
    own = [names[place] for place in places if place < len(names)]
    blob = "\n".join(own).encode()[:MOST_NAMES_BYTES]
    blobs = link.gather(blob, "the GPUs of the workers", most_bytes=MOST_NAMES_BYTES)
    owners: dict[str, int] = {}
    reasons: dict[int, str] = {}
    for rank, other in enumerate(blobs):
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
            raise  # a worker is lost, which another transport does not mend
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def with_trial(
    connection: HostConnection, devices: Sequence[str], by_name: bool
) -> HostConnection:
    """Tries a sum by collectives, unless chosen `by_name`; falls back to the link."""
    group = connection.group
    if group is None or not connection.by_collectives or by_name:
        return connection
    hint = choose_engine(devices, Communication()).hint
    wrong = try_collectives(group.link, devices, hint)
    reasons = _reasons(group.link, wrong, "whether NCCL adds up")
    notes = _fallen_back(reasons) or (NOT_RUN,)
    return dataclasses.replace(connection, by_collectives=not reasons, notes=notes)


def _reasons(link: HostLink, mine: str, label: str) -> dict[int, str]:
    """Reasons why workers cannot, by rank; empty if all can."""
    blob = mine.encode()[:MOST_REASON_BYTES]
    blobs = link.gather(blob, label, most_bytes=MOST_REASON_BYTES)
    texts = {rank: other.decode("utf-8", "replace") for rank, other in enumerate(blobs)}
    return {rank: text for rank, text in texts.items() if text}


def _fallen_back(reasons: dict[int, str]) -> tuple[str, ...]:
    if not reasons:
        return ()
    # A worker without an answer may have waited for one that has a cause.
    causes = {rank: why for rank, why in reasons.items() if why != NO_ANSWER}
    rank, why = next(iter((causes or reasons).items()))
    return (
        "gradients cross between hosts by sockets, through the memory of the hosts, "
        f"and not by NCCL: on worker {rank} {why}",
    )
