"""Workers that start again, all of them, after one has failed.

start all -> one fails -> all are stopped -> report -> wait -> start all
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from tfdp.cluster.progress import START_AGAIN, Progress
from tfdp.hosts.crash_report import cause_of
from tfdp.launch.cause import first_failure, report_of_all, restart_requests
from tfdp.launch.console import POLL_SECONDS, Console
from tfdp.launch.group import Group
from tfdp.launch.guard import OrphanGuard
from tfdp.launch.one_by_one import OneByOne
from tfdp.launch.output import WorkerLogs
from tfdp.launch.own_folder import OwnFolder
from tfdp.launch.restart_policy import Ending, Judge, Verdict, combine
from tfdp.launch.signals import received_signals, signal_name
from tfdp.launch.ssh import CONNECT_SECONDS, SSH
from tfdp.launch.worker import SSH_ERROR, WorkerCommand

# Between two looks at how far the workers are.
LOOK_SECONDS = 0.2

#: (places, guard, received signals) -> those of the places that can be reached.
Answering = Callable[[Sequence[int], OrphanGuard, Sequence[int]], list[int]]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where workers can run, one in each place: parts of this machine, or hosts.

    Args:
      number: how many; they are 0, 1 ...
      hosts: their names, for messages; empty for places on this machine.
      commands: (places, number of this restart) -> how to start a worker in each of
        them, rank 0 in the first; called anew for each start.
      answering: which places can be reached; None: all, always.
    """

    number: int
    commands: Callable[[Sequence[int], int], Sequence[WorkerCommand]]
    hosts: Sequence[str] = ()
    answering: Answering | None = None


def launch(
    places: Places,
    *,
    least_workers: int,
    most_restarts: int,
    grace_seconds: float,
    logs: WorkerLogs | None = None,
    one_by_one: bool = False,
) -> int:
    """Runs a worker in each place, and starts them again as long as `Judge` lets them.

    Args:
      places: where, and how.
      least_workers: with how many it may go on, from 1 to the number of places.
      most_restarts: how many failures may be followed by a restart, at least 0.
      one_by_one: a worker that fails is started again while the others go on; what
        ends all of them ends the launcher.
      grace_seconds: between asking a worker to end and killing it, at least 0.
      logs: where every worker's lines are kept; None: nowhere. Closed at the end.

    Returns:
      The exit code of the last start, see `Group.exit_code`. When a signal comes
      between two starts: START_AGAIN, or 128 + s when nothing is known to be saved.

    Raises:
      BrokenPipeError: nobody reads the launcher's output any more, and the workers
        were asked to end.
    """
    with (
        received_signals() as received,
        OwnFolder() as folder,
        OrphanGuard(grace_seconds, folder.path) as guard,
    ):
        judge = Judge(
            range(places.number), least_workers, 0 if one_by_one else most_restarts
        )
        run = _Launch(places, judge, guard, folder, grace_seconds, received, logs)
        run.restarts_of_one = most_restarts if one_by_one else 0
        try:
            code = run.until_the_end()
        finally:
            if logs is not None:
                logs.close()
        run.console.write_the_rest(received)
        if run.console.reader_left:
            raise BrokenPipeError
        return code


@dataclasses.dataclass(frozen=True)
class _Failure:
    """What is lost, for the line that says so when training goes on.

    Args:
      since_seconds: from when on it is, by the monotonic clock.
      reached_step: how far the workers had come, where that is known.
    """

    since_seconds: float
    reached_step: int | None


class _Launch:
    """All starts of the workers of one `tfdp launch`."""

    def __init__(
        self,
        places: Places,
        judge: Judge,
        guard: OrphanGuard,
        folder: OwnFolder,
        grace_seconds: float,
        received: Sequence[int],
        logs: WorkerLogs | None,
    ):
        self.console = Console()
        self._logs = logs
        if logs is not None:
            logs.say = self.console.say
        self._places = places
        self._judge = judge
        self._guard = guard
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._received = received
        #: How often a worker may start again while the others go on.
        self.restarts_of_one = 0
        self._starts = 0
        self._failure: _Failure | None = None  # until it is known what it has cost
        self._lost_seconds = 0.0
        self._look_seconds = 0.0

    def until_the_end(self) -> int:
        """Starts the workers until they come to a good end, or to no other."""
        places = list(self._judge.places)
        while True:
            group = self._run(places)
            code = group.exit_code()
            stopped_by = self._received[0] if self._received else None
            report = report_of_all(group.workers, stopped_by, self._grace_seconds)
            self.console.say(report)
            if code == 0:
                self._say_that_it_is_done()
            if code == 0 or stopped_by is not None or self.console.reader_left:
                return code
            self._failure = self._failure or _failure_of(group)
            ending = _ending_of(group, places, self._places.hosts)
            following = self._places_after(ending)
            if following is None:
                return code
            if not following:
                return self._code_between_starts()
            places = following

    def _run(self, places: Sequence[int]) -> Group:
        """One start of all workers, to its end."""
        if self._logs is not None:
            self._logs.begin()
        group = Group(
            self._guard,
            self.console,
            self._folder.begin_start(self.console.say),
            self._grace_seconds,
            self._received,
            logs=self._logs,
        )
        commands = self._places.commands(places, self._starts)
        self._starts += 1
        again = None
        if self.restarts_of_one:
            again = OneByOne(commands, self.restarts_of_one, self.console.say)
        group.run(commands, each_turn=lambda: self._look_at(group), one_by_one=again)
        self._look_at(group, is_last=True)
        return group

    def _look_at(self, group: Group, is_last: bool = False) -> None:
        """Says once from where the training goes on, as soon as the workers do."""
        now_seconds = time.monotonic()
        failure = self._failure
        is_early = now_seconds - self._look_seconds < LOOK_SECONDS
        if failure is None or (is_early and not is_last):
            return
        self._look_seconds = now_seconds
        notes = [worker.progress for worker in group.workers]
        all_know = all(note and note.resumed_step is not None for note in notes)
        progress = combine(notes)
        # A loop of the user's own may note in one of the workers only.
        trains = progress.step is not None and progress.step != progress.resumed_step
        if progress.resumed_step is None or not (all_know or trains or is_last):
            return
        self._failure = None
        back_seconds = progress.resumed_seconds or now_seconds
        lost_seconds = max(0.0, back_seconds - failure.since_seconds)
        self._lost_seconds += lost_seconds
        lost = f"{lost_seconds:.1f} s"
        if failure.reached_step is not None:
            steps = max(0, failure.reached_step - progress.resumed_step)
            lost = f"{steps} steps and {lost}"
        self.console.say([f"goes on from step {progress.resumed_step}; lost {lost}"])

    def _say_that_it_is_done(self) -> None:
        restarts = self._starts - 1
        if restarts:
            times = "restart" if restarts == 1 else "restarts"
            lost = f"; lost {self._lost_seconds:.1f} s" if self._lost_seconds else ""
            self.console.say([f"ended well after {restarts} {times}{lost}"])

    def _places_after(self, ending: Ending) -> list[int] | None:
        """Waits for the next start, and says where; None: there is none.

        No places: a signal has come meanwhile.
        """
        while True:
            verdict = self._judge.judge(ending)
            self._say_what_follows(ending, verdict)
            if not verdict.restart:
                return None
            if not self._wait(verdict.wait_seconds):
                return []
            answering = self._answering()
            if self._must_end:
                return []
            missing = [p for p in self._judge.places if p not in answering]
            names = " and ".join(self._places.hosts[place] for place in missing)
            do_not = "do not answer" if len(missing) > 1 else "does not answer"
            if len(answering) >= self._judge.least_workers:
                if missing:
                    self.console.say([f"goes on without {names}: {do_not}"])
                return answering
            ending = Ending(f"{names} {do_not}", from_outside=True)

    def _answering(self) -> list[int]:
        places = self._judge.places
        if self._places.answering is None:
            return list(places)
        return self._places.answering(places, self._guard, self._received)

    def _wait(self, seconds: float) -> bool:
        """Waits, unless a signal comes; False: one has come."""
        deadline = time.monotonic() + seconds
        while not self._must_end and (left := deadline - time.monotonic()) > 0:
            self.console.flush()
            time.sleep(min(left, POLL_SECONDS))
        return not self._must_end

    @property
    def _must_end(self) -> bool:
        """Whether a signal has come, or nobody reads what is said any more."""
        return bool(self._received) or self.console.reader_left

    def _say_what_follows(self, ending: Ending, verdict: Verdict) -> None:
        judge, lines = self._judge, []
        step = ending.progress.reached_step
        if ending.who and step is not None:
            lines.append(f"{ending.who} failed at step {step}")
        elif not ending.who and not ending.requests_restart:
            lines.append(ending.error)  # no worker has said so
        if verdict.dropped is not None:
            lines.append(f"{ending.who} {verdict.reason}: {len(judge.places)} go on")
        if verdict.restart:
            where = f", from step {judge.saved_step}" if judge.saved_step else ""
            count = f"restart {judge.used_restarts} of {judge.most_restarts}"
            if verdict.is_free:
                count = "which costs no restart"
            wait = f"{verdict.wait_seconds:.1f} s"
            lines.append(f"starts again in {wait}{where} ({count})")
        elif verdict.reason:
            lines.append(f"not started again: {verdict.reason}")
        self.console.say(lines)

    def _code_between_starts(self) -> int:
        number = self._received[0] if self._received else signal.SIGPIPE
        self.console.say([f"stopped by {signal_name(number)}, before a restart"])
        return START_AGAIN if self._judge.saved_step else 128 + number


def _ending_of(group: Group, places: Sequence[int], hosts: Sequence[str]) -> Ending:
    progress = combine([worker.progress for worker in group.workers])
    failed = first_failure(group.workers)
    if failed is None:
        asks = restart_requests(group.workers) is not None
        how = "saved, and ask to be started again" if asks else "ended"
        return Ending(
            f"the workers have {how}", requests_restart=asks, progress=progress
        )
    place, own = places[failed.rank], failed.progress
    if own is not None and own.step is not None:
        # The others may have come a step further, or not so far.
        progress = dataclasses.replace(progress, step=own.step)
    words = failed.last_words
    last = cause_of("\n".join(failed.tail.text_lines())).splitlines()[-1:]
    # All that is known may be that one has lost another, in a place that nobody knows.
    is_consequence = words is not None and words.is_consequence
    return Ending(
        error=words.error if words else ": ".join([failed.describe_end(), *last]),
        place=None if is_consequence else place,
        who=f"worker {failed.rank}{f' on {hosts[place]}' if hosts else ''}",
        from_outside=is_consequence or failed.was_ended_from_outside,
        progress=progress,
    )


def _failure_of(group: Group) -> _Failure:
    progress: Progress = combine([worker.progress for worker in group.workers])
    known = (progress.saved_seconds, progress.resumed_seconds, group.started_seconds)
    since_seconds = next(seconds for seconds in known if seconds is not None)
    return _Failure(since_seconds, progress.reached_step)


# Which hosts answer: asked before workers start again.


PROBE_POLL_SECONDS = 0.05
# After the connection: for a shell to start there, on a busy machine.
SHELL_SECONDS = 30.0


def answering_hosts(
    hosts: Sequence[str],
    environment: Mapping[str, str],
    guard: OrphanGuard,
    received: Sequence[int],
) -> list[str]:
    """Those of the hosts on which ssh runs a command; all are asked at once.

    Args:
      environment: of the ssh processes.
      guard: ends them when the launcher is killed.
      received: signals, a list that grows; one ends the asking.
    """
    asked = [
        subprocess.Popen(
            [*SSH, host, "true"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    ]
    for process in asked:
        guard.watch(process.pid)
    deadline = time.monotonic() + CONNECT_SECONDS + SHELL_SECONDS
    while any(process.poll() is None for process in asked):
        if received or time.monotonic() > deadline:
            break
        time.sleep(PROBE_POLL_SECONDS)
    answers = [process.poll() not in (None, SSH_ERROR) for process in asked]
    for process in asked:
        if process.poll() is None:
            process.kill()
            process.wait()
        guard.release(process.pid)
    return [host for host, answers in zip(hosts, answers, strict=True) if answers]
