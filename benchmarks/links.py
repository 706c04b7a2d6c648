"""Times sums of a few numbers over 2 to 64 processes of one machine, by sockets.

The processes have no TensorFlow. The arms live in the same processes and take turns; a
figure is that of the slowest worker. All processes share the cores of the machine, so
that more of them take longer whatever they do: what is compared are the arms.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import secrets
import stat
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.bench.results import spread
from benchmarks.shared import Load, make_parser, run_script, write_report
from tfdp.cluster.addresses import LOOPBACK, free_port
from tfdp.cluster.description import join_address
from tfdp.cluster.machine import describe_machine
from tfdp.files.asked_for import write_text_for
from tfdp.hosts.socket_link import SocketLink
from tfdp.plan.sum_ways import rounds
from tfdp.tools.report.html_page import html_page
from tfdp.tools.report.plots import Chart, draw_chart

# A ring for every sum; what the rule chooses.
ARMS = ("ring", "chosen")
LINK_TIMEOUT_SECONDS = 300.0
Seconds = dict[str, list[float]]
WORKERS, QUICK_WORKERS = (2, 4, 8, 16, 32, 64), (2, 3)
# The number of samples; a small bucket; the last bucket of a small network.
ELEMENTS, QUICK_ELEMENTS = (1, 1_000, 25_000), (1, 100)
CALLS = 5
GOODBYE_SECONDS = 10.0
COLUMNS = "{:>7} {:>7} {:>8} {:>9} {:>22} {:>22} {:>5}  {:>13} {:>5}"
TITLES = (
    "workers",
    "bytes",
    "way",
    "rounds",
    "ring, ms",
    "chosen, ms",
    "times",
    "processor, ms",
    "times",
)


class BenchmarkError(Exception):
    """A measurement that gave no figures."""


@dataclasses.dataclass(frozen=True)
class LinkRequest:
    """What the processes of one job do.

    Args:
      workers: how many they are.
      coordinator: "host:port" where they meet.
      secret: of the job.
      elements: float32 numbers of each sum that is timed.
      repeats, calls: figures for each arm, and sums in each figure.
    """

    workers: int
    coordinator: str
    secret: bytes
    elements: tuple[int, ...]
    repeats: int
    calls: int


def measure_links(rank: int, request: LinkRequest, answer: Connection) -> None:
    """Sends what this worker measured: a dictionary, or the text of its error."""
    try:
        answer.send(_figures(rank, request))
    except Exception as error:
        answer.send(f"worker {rank}: {type(error).__name__}: {error}")


def _figures(rank: int, request: LinkRequest) -> dict[str, object]:
    start = time.perf_counter()
    link = SocketLink(
        rank,
        request.workers,
        request.coordinator,
        LINK_TIMEOUT_SECONDS,
        secret=request.secret,
    )
    meeting_seconds = time.perf_counter() - start
    try:
        ways = {
            str(elements): link.way_of_sum(4 * elements)
            for elements in request.elements
        }
        taken = {
            str(elements): _times_in_turn(link, request, elements)
            for elements in request.elements
        }
        barrier = []
        for _ in range(request.repeats):
            start = time.perf_counter()
            for _ in range(request.calls):
                link.gather(b"", "barrier", most_bytes=0)
            barrier.append((time.perf_counter() - start) / request.calls)
        return {
            "meeting_seconds": meeting_seconds,
            "barrier_seconds": barrier,
            "sum_seconds": {size: of[0] for size, of in taken.items()},
            "processor_seconds": {size: of[1] for size, of in taken.items()},
            "ways": ways,
            "threads": threading.active_count(),
            "connections": _connections(),
        }
    finally:
        link.close()


def _times_in_turn(
    link: SocketLink, request: LinkRequest, elements: int
) -> tuple[Seconds, Seconds]:
    """By arm the seconds of a sum, and those of a processor; each sum is checked."""
    array = np.full(elements, link.rank + 1.0, np.float32)
    total = request.workers * (request.workers + 1) / 2
    passed: Seconds = {arm: [] for arm in ARMS}
    busy: Seconds = {arm: [] for arm in ARMS}
    for repeat in range(1 + request.repeats):  # the first one does not count
        for arm in ARMS if repeat % 2 else ARMS[::-1]:
            link.take_way("ring" if arm == "ring" else None)
            link.gather(b"", "next turn", most_bytes=0)
            start, busy_before = time.perf_counter(), time.process_time()
            for _ in range(request.calls):
                (found_total,) = link.sum([array], "timing")
            seconds = time.perf_counter() - start
            busy_seconds = time.process_time() - busy_before
            if not (found_total == total).all():
                raise ArithmeticError(f"a wrong sum by the arm {arm}")
            if repeat:
                passed[arm].append(seconds / request.calls)
                busy[arm].append(busy_seconds / request.calls)
    link.take_way(None)
    return passed, busy


def _connections() -> int:
    """Sockets of this process; -1 where the system does not tell."""
    try:
        numbers = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        return -1
    return sum(map(_is_socket, numbers))


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # the one by which the folder was read
        return False


def run(options: argparse.Namespace) -> int:
    """Measures each number of processes."""
    machine, load = describe_machine(), Load()
    print(
        f"float32 sums over sockets; {machine['processor']}, "
        f"{machine['usable_cores']} usable cores; median (quartiles) of "
        f"{options.repeats} repeats of {CALLS} sums; processor: of all workers "
        "together, which other programs change less\n\n" + COLUMNS.format(*TITLES),
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    for workers in QUICK_WORKERS if options.quick else WORKERS:
        elements = QUICK_ELEMENTS if options.quick else ELEMENTS
        try:
            found = _measure(
                workers, elements, options.repeats, options.timeout_seconds
            )
        except BenchmarkError as error:
            print(f"{workers:>7} failed: {error}", flush=True)
            return 1
        rows.append(found)
        print("\n".join(_lines(found)), flush=True)
    print(load)
    write_report(options.json, "links", rows=rows)
    if options.plot:
        write_text_for("--plot", options.plot, _page(rows))
    return 0


def _measure(
    workers: int, elements: Sequence[int], repeats: int, timeout_seconds: float
) -> dict[str, Any]:
    """What the slowest worker took of everything, and what worker 0 says of itself.

    Raises:
      BenchmarkError: saying why there are no figures.
    """
    # Forked where that is possible: as light as a process of Python can be.
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    request = LinkRequest(
        workers,
        join_address(LOOPBACK, free_port()),
        secrets.token_bytes(32),
        tuple(elements),
        repeats,
        CALLS,
    )
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        context.Process(target=measure_links, args=(rank, request, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    deadline = time.monotonic() + timeout_seconds
    try:
        for process in processes:
            process.start()
        answers = []
        for receive, _ in pipes:
            if not receive.poll(max(deadline - time.monotonic(), 0.0)):
                raise BenchmarkError(f"no figures within {timeout_seconds:g} s")
            answers.append(receive.recv())
    finally:
        until = time.monotonic() + GOODBYE_SECONDS
        for process in processes:
            if process.pid is not None:
                process.join(max(until - time.monotonic(), 0.0))
                process.kill()
                process.join()
    errors = [answer for answer in answers if isinstance(answer, str)]
    if errors:
        raise BenchmarkError(errors[0])
    return _slowest(workers, answers)


def _slowest(workers: int, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = answers[0]

    def at_once(key: str, of_all: Callable[[Sequence[float]], float]) -> Any:
        return {
            size: {
                arm: list(
                    map(of_all, zip(*_each(answers, key, size, arm), strict=True))
                )
                for arm in ARMS
            }
            for size in first[key]
        }

    barriers = zip(*(each["barrier_seconds"] for each in answers), strict=True)
    return {
        **first,
        "workers": workers,
        "meeting_seconds": max(each["meeting_seconds"] for each in answers),
        "barrier_seconds": list(map(max, barriers)),
        "sum_seconds": at_once("sum_seconds", max),
        "processor_seconds": at_once("processor_seconds", sum),
        "threads": max(each["threads"] for each in answers),
        "connections": max(each["connections"] for each in answers),
    }


def _each(
    answers: Sequence[dict[str, Any]], key: str, size: str, arm: str
) -> list[list[float]]:
    return [answer[key][size][arm] for answer in answers]


def _lines(found: dict[str, Any]) -> list[str]:
    workers, lines = found["workers"], []
    for size, by_arm in found["sum_seconds"].items():
        way = found["ways"][size]
        busy = found["processor_seconds"][size]
        middle = [1000 * statistics.median(busy[arm]) for arm in ARMS]
        lines.append(
            COLUMNS.format(
                workers,
                4 * int(size),
                way,
                f"{rounds('ring', workers)} -> {rounds(way, workers)}",
                *(_milliseconds(by_arm[arm]) for arm in ARMS),
                _middle_ratio(by_arm),
                " -> ".join(f"{milliseconds:.3g}" for milliseconds in middle),
                _middle_ratio(busy),
            )
        )
    lines.append(
        f"        barrier {_milliseconds(found['barrier_seconds'])} ms; all met after "
        f"{found['meeting_seconds']:.2f} s; of a worker at most {found['threads']} "
        f"threads, {found['connections']} connections"
    )
    return lines


def _middle_ratio(by_arm: dict[str, list[float]]) -> str:
    ring, chosen = (by_arm[arm] for arm in ARMS)
    ratios = [slow / fast for slow, fast in zip(ring, chosen, strict=True)]
    return f"{statistics.median(ratios):.2f}"


def _milliseconds(seconds: Sequence[float]) -> str:
    of = spread([1000 * each for each in seconds])
    return f"{of.median:.3g} ({of.lower_quartile:.3g} .. {of.upper_quartile:.3g})"


def _page(rows: Sequence[dict[str, Any]]) -> str:
    charts = [
        Chart(
            f"milliseconds of a sum of {4 * int(size):,} bytes",
            {
                arm: [
                    (
                        str(row["workers"]),
                        1000 * statistics.median(row["sum_seconds"][size][arm]),
                    )
                    for row in rows
                ]
                for arm in ARMS
            },
            "processes",
        )
        for size in rows[0]["sum_seconds"]
    ]
    title = "Small sums over processes of one machine"
    return html_page(title, *map(draw_chart, charts))


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=20)
    parser.add_argument("--plot", metavar="PATH", help="also draw them, as HTML")
    run_script(parser, run)
