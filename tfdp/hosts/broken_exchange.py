"""Why an exchange broke, in words: who was late or lost, who closed, who differs."""

from __future__ import annotations

import contextlib

from tfdp.errors import CollectiveError
from tfdp.hosts.agreement import Disagreement, difference
from tfdp.hosts.channel import Channel
from tfdp.hosts.checked_wire import DamagedBlockError
from tfdp.hosts.lost_worker import late_words
from tfdp.hosts.membership import Membership
from tfdp.hosts.worker_names import name_workers

__all__ = ["closed", "damaged", "out_of_step", "why_it_broke"]

# How long a failure may take to be heard after a connection has broken: more than 3 s
# by 256 workers on two busy cores. Who hears it sooner waits no longer.
NEWS_SECONDS = 10.0


def closed(rank: int, what: str) -> CollectiveError:
    """For who exchanges, or waits, when this worker's link is closed."""
    return CollectiveError(
        f"The connections of worker {rank} were closed (by `close()` of the strategy, "
        f"or at the end of the script) when {what}. Close a strategy after its last "
        "exchange, and make a new one to go on."
    )


def out_of_step(
    membership: Membership, workers: int, found: Disagreement, note_key: str
) -> CollectiveError:
    """For a header that is not of this worker's exchange; it tells of both.

    Args:
      membership: of this worker.
      workers: how many there are.
      found: the two headers.
      note_key: under which each worker leaves what its last exchange was about.
    """
    other = (membership.rank - 1) % workers
    notes: dict[int, str] = {}
    # The header holds a digest of what the other is at; in words it comes as a note.
    # Without one the error is less telling, and no less an error.
    with contextlib.suppress(OSError):
        notes = membership.wait_for_notes(
            note_key, lambda notes: other in notes, NEWS_SECONDS
        )
    both = difference(membership.rank, other, found, notes.get(other))
    return CollectiveError(
        f"Workers are out of step: {both}. Every worker must run the same steps on the "
        "same model: look for code that only some workers run."
    )


def damaged(
    rank: int, workers: int, ring: Channel, found: DamagedBlockError
) -> CollectiveError:
    """For a block that is not as it was sent: it names both ends, and what to do."""
    distance = 1
    for each in ring.neighbours:
        if each.receiver is found.receiver:
            break
        distance *= 2
    return CollectiveError(
        f"What worker {rank} received of worker {(rank - distance) % workers} in "
        f"{ring.words} is not what was sent: {found}. The network between them or the "
        "memory of one of the two damages data. Nothing of the block was used; go on "
        "from the last checkpoint, without the machine or the link that is at fault."
    )


def why_it_broke(
    membership: Membership,
    ring: Channel,
    channel: str,
    error: OSError,
    timeout_seconds: float,
) -> str:
    """Why a connection of the ring broke, or nothing came."""
    is_timeout = isinstance(error, (TimeoutError, BlockingIOError))
    # A broken connection is felt at once, and who died is heard a moment later. After
    # a timeout there is nothing to wait for: who is late has not failed.
    reason = membership.wait_for_news(0.0 if is_timeout else NEWS_SECONDS)
    if reason is None and is_timeout:
        late = membership.late(ring.count, channel)
        who = name_workers(late) if late else "a worker"
        reason = late_words(who, timeout_seconds)
        return membership.with_standstill(reason, timeout_seconds)
    return reason or f"a connection of worker {membership.rank} broke ({error})"
