"""Restarts all workers after one has failed.

start all -> one fails -> all are stopped -> report -> wait -> start all
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfdp.cluster.crash_report import cause_of
from tfdp.cluster.progress import START_AGAIN, Progress
from tfdp.launch.cause import first_failure, report_of_all, restart_requests
from tfdp.launch.console import POLL_SECONDS, Console
from tfdp.launch.group import Group
from tfdp.launch.guard import OrphanGuard
from tfdp.launch.one_by_one import OneByOne
from tfdp.launch.output import WorkerLogs
from tfdp.launch.own_folder import OwnFolder
from tfdp.launch.restart_policy import Ending, Judge, RestartDecision, combine
from tfdp.launch.signals import received_signals, signal_name
from tfdp.launch.ssh import CONNECT_SECONDS, SSH
from tfdp.launch.worker import SSH_ERROR, WorkerCommand

# An error after less is one of the program's first steps: nothing to save.
WORTH_SECONDS = 60.0
LOOK_SECONDS = 0.2  # between two reads of the workers' progress

#: (places, guard, received signals) -> the places that can be reached.
Answering = Callable[[Sequence[int], OrphanGuard, Sequence[int]], list[int]]


@dataclasses.dataclass(frozen=True)
class Places:
    """Places 0, 1 ... for one worker each: parts of this machine, or hosts."""

    number: int
    #: (places, restart number) -> commands for a worker in each, rank 0 in the first.
    commands: Callable[[Sequence[int], int], Sequence[WorkerCommand]]
    hosts: Sequence[str] = ()  # names for messages; empty on this machine
    answering: Answering | None = None  # None: all can be reached, always


def launch(
    places: Places,
    *,
    least_workers: int,
    most_restarts: int,
    grace_seconds: float,
    logs: WorkerLogs | None = None,
    one_by_one: bool = False,
) -> int:
    """Runs a worker in each place, and restarts them as `Judge` decides.

    With `one_by_one` only the failed worker is restarted while the others go on. `logs`
    are closed at the end. A BrokenPipeError means that the reader of the launcher's
    output is gone and the workers were stopped.

    Returns the exit code of the last start, see `Group.exit_code`; after a signal
    between two starts START_AGAIN, or 128 + s if nothing was saved.
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


class _Failure(NamedTuple):
    """A failure whose cost is reported once training goes on."""

    since_seconds: float  # start of the lost work, by the monotonic clock
    reached_step: int | None


class _Launch:
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
        self._places, self._judge = places, judge
        self._guard, self._folder = guard, folder
        self._grace_seconds, self._received = grace_seconds, received
        #: How often single workers may restart while the others go on.
        self.restarts_of_one = 0
        self._starts = 0
        self._has_advised = False
        self._failure: _Failure | None = None  # until its cost is known
        self._lost_seconds = self._look_seconds = 0.0

    def until_the_end(self) -> int:
        places = list(self._judge.places)
        while True:
            group = self._run(places)
            code = group.exit_code()
            stopped_by = self._received[0] if self._received else None
            self.console.say(
                report_of_all(group.workers, stopped_by, self._grace_seconds)
            )
            if code == 0 and (restarts := self._starts - 1):
                times = "restart" if restarts == 1 else "restarts"
                lost = (
                    f"; lost {self._lost_seconds:.1f} s" if self._lost_seconds else ""
                )
                self.console.say([f"ended well after {restarts} {times}{lost}"])
            if code == 0 or stopped_by is not None or self.console.reader_left:
                return code
            self._failure = self._failure or _failure_of(group)
            ending = _ending_of(group, places, self._places.hosts)
            self._advise_once(group, ending)
            following = self._places_after(ending)
            if following is None:
                return code
            if not following:
                number = self._received[0] if self._received else signal.SIGPIPE
                self.console.say(
                    [f"stopped by {signal_name(number)}, before a restart"]
                )
                return START_AGAIN if self._judge.saved_step else 128 + number
            places = following

    def _advise_once(self, group: Group, ending: Ending) -> None:
        """Says what a checkpoint, or a restart, would have saved of a failure."""
        restarts = self._judge.most_restarts or self.restarts_of_one
        saved, seconds = ending.progress.saved_step, group.seconds_of_training()
        has_checkpoint = saved is not None or ending.progress.resumed_step is not None
        if self._has_advised or ending.requests_restart:
            return
        if has_checkpoint:
            if saved is None or restarts:
                return
            line = (
                f"step {saved} is saved: the same command goes on from there, and "
                "with --max-restarts 3 it does so by itself"
            )
        elif seconds is None or not (ending.from_outside or seconds >= WORTH_SECONDS):
            return  # an error of the first steps, or no training
        else:
            by_itself = "" if restarts else ", and with --max-restarts 3 by itself"
            line = (
                f"{seconds:.0f} s of training are lost, as nothing was saved: with "
                "tfdp.callbacks.Checkpoint(folder) in fit the same command goes on "
                f"from the last save{by_itself}"
            )
        self._has_advised = True
        self.console.say([line])

    def _run(self, places: Sequence[int]) -> Group:
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
        """Reports once where training resumes, as soon as the workers have noted it."""
        now_seconds = time.monotonic()
        failure = self._failure
        is_early = now_seconds - self._look_seconds < LOOK_SECONDS
        if failure is None or (is_early and not is_last):
            return
        self._look_seconds = now_seconds
        notes = [worker.progress for worker in group.workers]
        all_resumed = all(note and note.resumed_step is not None for note in notes)
        progress = combine(notes)
        # A user's own loop may note in one of the workers only.
        trains = progress.step is not None and progress.step != progress.resumed_step
        if progress.resumed_step is None or not (all_resumed or trains or is_last):
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

    def _places_after(self, ending: Ending) -> list[int] | None:
        """The places of the next start, after a wait; [] after a signal; else None."""
        while True:
            verdict = self._judge.judge(ending)
            self._report_verdict(ending, verdict)
            if not verdict.restart:
                return None
            if not self._wait(verdict.wait_seconds):
                return []
            answering = list(self._judge.places)
            if self._places.answering is not None:
                answering = self._places.answering(
                    answering, self._guard, self._received
                )
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

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._must_end and (left := deadline - time.monotonic()) > 0:
            self.console.flush()
            time.sleep(min(left, POLL_SECONDS))
        return not self._must_end

    @property
    def _must_end(self) -> bool:
        return bool(self._received) or self.console.reader_left

    def _report_verdict(self, ending: Ending, verdict: RestartDecision) -> None:
        judge, lines = self._judge, []
        step = ending.progress.reached_step
        if ending.worker and step is not None:
            lines.append(f"{ending.worker} failed at step {step}")
        elif not ending.worker and not ending.requests_restart:
            lines.append(ending.error)  # not a worker's error
        if verdict.dropped is not None:
            lines.append(f"{ending.worker} {verdict.reason}: {len(judge.places)} go on")
        if verdict.restart:
            where = f", from step {judge.saved_step}" if judge.saved_step else ""
            count = f"restart {judge.used_restarts} of {judge.most_restarts}"
            if verdict.is_free:
                count = "not counted"
            wait = f"{verdict.wait_seconds:.1f} s"
            lines.append(f"starts again in {wait}{where} ({count})")
        elif verdict.reason:
            lines.append(f"not started again: {verdict.reason}")
        self.console.say(lines)


def _ending_of(group: Group, places: Sequence[int], hosts: Sequence[str]) -> Ending:
    progress = combine([worker.progress for worker in group.workers])
    failed = first_failure(group.workers)
    if failed is None:
        saved = restart_requests(group.workers) is not None
        how = f"the workers have {'saved, and request a restart' if saved else 'ended'}"
        return Ending(how, requests_restart=saved, progress=progress)
    place, own = places[failed.rank], failed.progress
    if own is not None and own.step is not None:
        # The others may be a step ahead or behind.
        progress = dataclasses.replace(progress, step=own.step)
    crash = failed.crash
    last = cause_of("\n".join(failed.tail.text_lines())).splitlines()[-1:]
    # Possibly only the loss of another worker is known, in an unknown place.
    is_consequence = crash is not None and crash.is_consequence
    return Ending(
        error=crash.error if crash else ": ".join([failed.describe_end(), *last]),
        place=None if is_consequence else place,
        worker=f"worker {failed.rank}{f' on {hosts[place]}' if hosts else ''}",
        from_outside=is_consequence or failed.was_ended_from_outside,
        progress=progress,
    )


def _failure_of(group: Group) -> _Failure:
    progress: Progress = combine([worker.progress for worker in group.workers])
    times = (progress.saved_seconds, progress.resumed_seconds, group.started_seconds)
    since_seconds = next(seconds for seconds in times if seconds is not None)
    return _Failure(since_seconds, progress.reached_step)


PROBE_POLL_SECONDS = 0.05
SHELL_SECONDS = 30.0  # after the connection, for a shell to start on a busy host


def answering_hosts(
    hosts: Sequence[str],
    environment: Mapping[str, str],
    guard: OrphanGuard,
    received: Sequence[int],
) -> list[str]:
    """The hosts on which ssh runs a command, probed in parallel.

    `guard` ends the ssh processes if the launcher is killed; a signal ends the wait.
    """
    probes = [
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
    for process in probes:
        guard.watch(process.pid)
    deadline = time.monotonic() + CONNECT_SECONDS + SHELL_SECONDS
    while any(process.poll() is None for process in probes):
        if received or time.monotonic() > deadline:
            break
        time.sleep(PROBE_POLL_SECONDS)
    answers = [process.poll() not in (None, SSH_ERROR) for process in probes]
    for process in probes:
        if process.poll() is None:
            process.kill()
            process.wait()
        guard.release(process.pid)
    return [host for host, answers in zip(hosts, answers, strict=True) if answers]
