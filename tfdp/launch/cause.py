"""Which of several workers failed first, and of what.

Workers end together: one raises, and its peers fail because they lost it, often before
it has ended itself. So a worker whose last words speak of another one is never the
cause while another is there.

A worker that ends with 0 has failed, too, while another one needs it: one that has
begun to make a strategy of all workers to which the first never came, or one that ended
because it lost the first. Programs that make no such strategies end as they like.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence

from tfdp.launch.signals import signal_name
from tfdp.launch.worker import Worker

# How long the cause of a failure may need to show after its consequence: a worker that
# is killed closes its sockets first, and a peer may notice that and end before it.
CAUSE_SECONDS = 0.2
# The same where all that have failed say that they have lost another, which must be
# somewhere; and how long one that has said its last words may take to end.
LOST_ONE_SECONDS = 5.0
TRACEBACK_LINES = 20


def first_failure(workers: Sequence[Worker]) -> Worker | None:
    """The cause, as far as it is known; None: nobody has failed.

    Args:
      workers: all of them. One has failed when it ended by itself, with another exit
        code than 0 and START_AGAIN, or has said its last words before it was asked to
        end.
    """
    failed = [worker for worker in workers if worker.has_failed]
    if any(worker.requests_restart for worker in workers):
        # It left, and the others have lost it.
        failed = [worker for worker in failed if not _lost_another(worker)]
    # The kernel closes the connections of a killed process before anybody can see
    # that it is gone; whoever ends without a word at that moment may be its peer.
    was_killed = any(worker.was_killed and not worker.last_words for worker in failed)

    def order(worker: Worker) -> tuple[bool, bool, float]:
        words = worker.last_words
        unexplained = words is None and not worker.was_killed
        return (
            _lost_another(worker),
            was_killed and unexplained,
            worker.failed_seconds,
        )

    return min(failed, key=order, default=None)


def note_early_exits(workers: Sequence[Worker]) -> None:
    """Notes in workers that have ended with 0 that another one still needs them.

    Call it while they run: who needs another may be stopped later. A worker in the
    place of one that was lost may leave: the others have gone on without it.
    """
    ended = [w for w in workers if w.has_ended_well and not w.is_replacement]
    if not ended:
        return
    others = [worker for worker in workers if worker not in ended]
    made = {w.rank: w.strategies or 0 for w in others if w.is_running}
    most = max(made, key=made.__getitem__, default=None)
    for worker in ended:
        own = worker.strategies
        if most is not None and own is not None and own < made[most]:
            which = f"it made {own} of {made[most]} strategies"
            worker.left_early = (
                "before it joined the training "
                f"({which if own else 'it never made a strategy'}), and worker {most} "
                "waits for it; every worker must run the whole script"
            )
        elif loser := next((w for w in others if _has_lost(w, worker)), None):
            worker.left_early = (
                f"in the middle of the training, and worker {loser.rank} still needed "
                "it; every worker must take part to the end"
            )


def _has_lost(loser: Worker, worker: Worker) -> bool:
    words = loser.last_words if _lost_another(loser) else None
    return words is not None and bool(
        re.search(rf"\bworker {worker.rank}\b", words.error)
    )


def restart_requests(workers: Sequence[Worker]) -> Worker | None:
    """Who was the first to end by itself and say "saved, start me again".

    None: nobody, or another one has failed by itself.
    """
    asking = [worker for worker in workers if worker.requests_restart]
    if first_failure(workers) is not None:
        return None
    return min(asking, key=lambda worker: worker.ended_seconds or 0.0, default=None)


def _lost_another(worker: Worker) -> bool:
    words = worker.last_words
    return words is not None and words.is_consequence


def cause_is_known(workers: Sequence[Worker]) -> bool:
    """Whether there is nothing to wait for any more before all are stopped."""
    ended = [w.ended_seconds for w in workers if w.has_failed and w.ended_seconds]
    first = first_failure(workers)
    if first is None or not ended:
        return False
    seconds = time.monotonic() - min(ended)
    if _lost_another(first) or first.is_running:
        return seconds >= LOST_ONE_SECONDS
    return seconds >= CAUSE_SECONDS


def report_of_all(
    workers: Sequence[Worker], stopped_by: int | None, grace_seconds: float
) -> list[str]:
    """How it ended, when it did not end well, for the launcher's last lines.

    Args:
      workers: all of them.
      stopped_by: the signal to the launcher; None: it got none.
      grace_seconds: that they had to end.
    """
    first = first_failure(workers)
    if first is not None:
        lines = _report_of_first(first)
    elif stopped_by is not None:
        lines = [f"stopped by {signal_name(stopped_by)}"]
    else:
        first = restart_requests(workers)
        if first is None:
            return []
        lines = [f"worker {first.rank} has saved, and asks to be started again"]
    others = (worker for worker in workers if worker is not first)
    return lines + [
        f"worker {worker.rank} {_describe_other(worker, grace_seconds)}"
        for worker in others
    ]


def _report_of_first(failed: Worker) -> list[str]:
    seconds = failed.failed_seconds - failed.started_seconds
    what = f"failed first, {seconds:.1f} s after its start: "
    words, lines = failed.last_words, failed.tail.text_lines()
    if failed.left_early:
        what = f"ended with {failed.describe_end()}. Its last lines"
    elif words is None:
        what += f"{failed.describe_end()}. Its last lines"
    else:
        what += f"{words.error} ({failed.describe_end()}). Its traceback"
        lines = words.traceback.splitlines()[-TRACEBACK_LINES:]
    head = f"worker {failed.rank} {what}:"
    return ["\n".join([head, *(f"    {line}" for line in lines)])]


def _describe_other(worker: Worker, grace_seconds: float) -> str:
    """How a worker ended that did not fail first."""
    if worker.stopped_by is None:
        why = ", as it had lost another" if _lost_another(worker) else ""
        return f"ended by itself: {worker.describe_end()}{why}"
    if worker.stopped_by == signal.SIGKILL:
        return f"did not end within {grace_seconds:g} s and was killed"
    return f"was stopped: {worker.describe_end()}"
