"""Finds which worker failed first, and why.

A worker's peers fail because they lost it, often before its own process ends. So a
worker that reports the loss of another one is only the cause if no other can be.

A worker that exits with 0 has failed, too, if another one waits for it in a strategy
over all workers that it never created, or ended because it lost it. Programs without
such strategies may end at any time.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence

from tfdp.launch.restart_policy import combine
from tfdp.launch.signals import signal_name
from tfdp.launch.worker import Worker

# A cause may show later than its consequence: a killed worker closes its sockets first,
# and a peer may notice and exit before the worker itself is gone.
CAUSE_SECONDS = 0.2
# The same if every failed worker reports that it lost another, which must be somewhere;
# also the time a worker may take to exit after its crash report.
LOST_ONE_SECONDS = 5.0
TRACEBACK_LINES = 20


def first_failure(workers: Sequence[Worker]) -> Worker | None:
    """The worker that caused the failure, as far as is known; None: none has failed.

    A worker has failed if it ended by itself with an exit code other than 0 and
    START_AGAIN, or left a crash report before it was stopped. One that waits to be
    started again, while others go on, has not.
    """
    workers = [worker for worker in workers if not worker.is_replaced]
    failed = [worker for worker in workers if worker.has_failed]
    if any(worker.requests_restart for worker in workers):
        # It left to be restarted, and the others lost it.
        failed = [worker for worker in failed if not _lost_another(worker)]
    # The kernel closes a killed process's connections before its end is visible; one
    # that ends without a report at that moment may be its peer.
    was_killed = any(worker.was_killed and not worker.crash for worker in failed)

    def order(worker: Worker) -> tuple[bool, bool, float]:
        crash = worker.crash
        unexplained = crash is None and not worker.was_killed
        return (
            _lost_another(worker),
            was_killed and unexplained,
            worker.failed_seconds,
        )

    return min(failed, key=order, default=None)


def note_early_exits(workers: Sequence[Worker]) -> None:
    """Marks workers that ended with 0 although another running one needs them.

    A replacement may leave: the others went on without it.
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
    crash = loser.crash if _lost_another(loser) else None
    return crash is not None and bool(
        re.search(rf"\bworker {worker.rank}\b", crash.error)
    )


def restart_requests(workers: Sequence[Worker]) -> Worker | None:
    """The first worker that ended by itself with START_AGAIN; None if one failed."""
    asking = [w for w in workers if w.requests_restart and not w.is_replaced]
    if first_failure(workers) is not None:
        return None
    return min(asking, key=lambda worker: worker.ended_seconds or 0.0, default=None)


def _lost_another(worker: Worker) -> bool:
    crash = worker.crash
    return crash is not None and crash.is_consequence


def cause_is_known(workers: Sequence[Worker]) -> bool:
    """Whether all workers can be stopped: no earlier cause can show any more."""
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
    """The launcher's last lines about a start that did not end well."""
    first = first_failure(workers)
    if first is not None:
        lines = _report_of_first(first)
    elif stopped_by is not None:
        lines = [f"stopped by {signal_name(stopped_by)}{_saved_by(workers)}"]
    else:
        first = restart_requests(workers)
        if first is None:
            return []
        lines = [f"worker {first.rank} has saved, and requests a restart"]
    others = (worker for worker in workers if worker is not first)
    return lines + [
        f"worker {worker.rank} {_describe_other(worker, grace_seconds)}"
        for worker in others
    ]


def _saved_by(workers: Sequence[Worker]) -> str:
    step = combine([worker.progress for worker in workers]).saved_step
    if step is None:
        return ""
    return f"; step {step} is saved, and the same command goes on from there"


def _report_of_first(failed: Worker) -> list[str]:
    seconds = failed.failed_seconds - failed.started_seconds
    what = f"failed first, {seconds:.1f} s after its start: "
    crash, lines = failed.crash, failed.tail.text_lines()
    if failed.left_early:
        what = f"ended with {failed.describe_end()}. Its last lines"
    elif crash is None:
        what += f"{failed.describe_end()}. Its last lines"
    else:
        what += f"{crash.error} ({failed.describe_end()}). Its traceback"
        lines = crash.traceback.splitlines()[-TRACEBACK_LINES:]
    head = f"worker {failed.rank} {what}:"
    return ["\n".join([head, *(f"    {line}" for line in lines)])]


def _describe_other(worker: Worker, grace_seconds: float) -> str:
    if worker.stopped_by is None:
        why = ", as it had lost another" if _lost_another(worker) else ""
        why = ", and was to be started again" if worker.is_replaced else why
        return f"ended by itself: {worker.describe_end()}{why}"
    if worker.stopped_by == signal.SIGKILL:
        return (
            f"did not end within {grace_seconds:g} s and was killed "
            "(--grace-seconds gives it longer to save)"
        )
    return f"was stopped: {worker.describe_end()}"
