"""Exchanges that one worker leaves at a random step: all of them end, and say why.

    python -m tests.support.exchange_faults sockets TRIES [SEED]
    python -m tests.support.exchange_faults mpi TRIES [SEED]

TRIES is a number of random ones, or "fixed" for those of FIXED_TRIES.
With "show" at the end it prints what the processes said.

Each try is a number of processes that exchange something once, unharmed, and then
again; this time one of them is closed, killed, stopped, raises an error or comes late
at one of its steps: before, between or after any two of its calls of the connections
(or of MPI), the flush at the end included. Prints a line for each try, and ends with an
error when a process did not end by the deadline, or when an exchange ended without an
error of tfdp.
"""

import collections
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback

import numpy as np

from tests.support.package_source import REPOSITORY
from tests.support.workers import free_port
from tfdp.errors import CollectiveError
from tfdp.hosts.socket_link import SocketLink
from tfdp.hosts.waits import NEWS_SECONDS

SILENCE_SECONDS = 2.0
TIMEOUT_SECONDS = 4.0
# What the fault may cost the others at most, by what they wait for.
DEADLINES_SECONDS = {
    "close": NEWS_SECONDS,
    "raise": NEWS_SECONDS,
    "race": NEWS_SECONDS,
    "kill": NEWS_SECONDS,
    "stop": SILENCE_SECONDS + NEWS_SECONDS,
    # Who sends more than the kernel keeps waits once for the part that it took.
    "late": 2 * TIMEOUT_SECONDS + NEWS_SECONDS,
}
# A machine that does something else meanwhile; above it, it is a hang.
MARGIN_SECONDS = 60.0
ACTIONS = ("close", "raise", "kill", "stop", "late")
BEFORE_MPI = "before entering MPI"
KINDS = (
    "sum",
    "rounded sum",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "gather",
)
# Few enough to travel at once; more than the kernel keeps for who does not read.
SIZES = (12, 60_000, 6_000_000)

# What is known to have hung, or to have been taken for another fault.
FIXED_TRIES = {
    "sockets": [
        *((2, 1, "sum", 12, "close", f"before {step}") for step in ("send", "flush")),
        (3, 0, "gather", 60_000, "close", "before take"),
        *((3, 1, "sum", 12, "raise", f"before {step}") for step in ("take", "flush")),
        (2, 0, "all_gather", 6_000_000, "kill", "before flush"),
        (3, 2, "reduce_scatter", 60_000, "kill", "before fill"),
        (3, 0, "rounded sum", 60_000, "stop", "before fill"),
        (3, 1, "sum", 60_000, "late", "before fill"),
        # Of five, two are no neighbours of the one that fails.
        (5, 3, "sum", 12, "kill", "before fill"),
        (5, 2, "gather", 60_000, "close", "before send"),
    ],
    "mpi": [
        # The others hear of it when they have agreed, and before they call MPI.
        (2, 1, "sum", 12, "race", BEFORE_MPI),
        (3, 1, "sum", 12, "raise", BEFORE_MPI),
        (3, 0, "all_gather", 60_000, "late", "before Allgatherv"),
        (2, 1, "reduce_scatter", 60_000, "stop", "before Reduce_scatter"),
    ],
}
Try = collections.namedtuple("Try", "number workers victim kind size action place")


def make_try(seed, number, kinds=KINDS):
    """The same on every worker."""
    draw = random.Random(f"{seed} {number}")
    workers = draw.choice((2, 3, 5))
    return Try(
        number,
        workers,
        draw.randrange(workers),
        draw.choice(kinds),
        draw.choice(SIZES),
        draw.choice(ACTIONS),
        draw.random(),
    )


def exchange(link, kind, size):
    """One exchange of that kind; another number from each worker."""
    ranges = [
        [
            (size * rank // link.workers, size * (rank + 1) // link.workers)
            for rank in range(link.workers)
        ]
    ]
    start, stop = ranges[0][link.rank]
    whole = np.full(size, link.rank + 1.0, np.float32)
    if kind == "sum":
        return link.sum([whole], kind)
    if kind == "rounded sum":
        return link.sum([whole], kind, wire_dtype="bfloat16")
    if kind == "reduce_scatter":
        return link.reduce_scatter([whole], ranges, kind)
    if kind == "all_gather":
        return link.all_gather([whole[start:stop]], ranges, kind)
    if kind == "all_to_all":
        return link.all_to_all(np.resize(whole, (link.workers, size)), kind)
    return link.gather(whole.tobytes(), kind, "step")


class Steps:
    """Counts the calls of an object, and has a fault at one of them.

    Args:
      wrapped: whose calls are steps.
      names: which of them, and what the counter calls them.
      counter: shared by several.
    """

    def __init__(self, wrapped, names, counter):
        self._wrapped = wrapped
        self._names = names
        self._counter = counter

    @property
    def __class__(self):
        # A channel asks its ends whether they share memory.
        return type(self._wrapped)

    def __getattr__(self, name):
        attribute = getattr(self._wrapped, name)
        if name not in self._names or attribute is None:
            return attribute

        def call(*arguments):
            self._counter.step(f"before {self._names[name]}")
            return attribute(*arguments)

        return call


SENDS = {"send": "send", "flush": "flush"}
# What comes is filled in, or added from where it lies.
RECEIVES = {"take": "take", "fill": "fill", "add": "fill"}
MPI_CALLS = ("Allreduce", "Reduce_scatter", "Allgatherv", "Alltoall", "Alltoallv")


class Counter:
    """Steps of one worker; `fault` happens at the one numbered, or named, `at`."""

    def __init__(self):
        self.steps = 0
        self.at = None
        self.fault = None
        self.name = None

    def step(self, name):
        if self.at in (self.steps, name):
            self.at, self.name = None, name
            self.fault()
        self.steps += 1


def count_steps(link, counter):
    """Lets `counter` see every step of the exchanges of `link`."""
    ring = link._channels["step"]
    for each in ring.neighbours:
        each.sender = Steps(each.sender, SENDS, counter)
        each.receiver = Steps(each.receiver, RECEIVES, counter)
    if hasattr(link, "_world"):
        calls = {name: name for name in MPI_CALLS}
        link._world = Steps(link._world, calls, counter)
        enter = link._enter_mpi

        def enter_mpi(*arguments):
            counter.step(BEFORE_MPI)
            enter(*arguments)

        link._enter_mpi = enter_mpi


def do_fault(link, action):
    """What happens to the worker that fails; the fault itself may not return."""
    print_line("fault", f"{action}")
    if action == "close":
        closing = threading.Thread(target=link.close)
        closing.start()
        # MPI's calls are let end first: the one that is about to begin as well.
        closing.join(None if link.name == "sockets" else 0.5)
    elif action in ("raise", "race"):
        raise KeyboardInterrupt
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(TIMEOUT_SECONDS + 2.0)


def wait_for_failure(link):
    """Until this worker has heard that another one failed."""
    deadline = time.monotonic() + MARGIN_SECONDS
    while link._membership.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)


def print_line(*words):
    """One line, whole, with the time in front."""
    line = " ".join([f"{time.time():.2f}", *words]).replace("\n", " ")
    os.write(1, f"{line}\n".encode())


def run_worker(link, this):
    """Both exchanges of one worker; prints what became of the second."""
    counter = Counter()
    count_steps(link, counter)
    exchange(link, this.kind, this.size)
    # Nobody fails before all have got through the first.
    link.gather(b"", "ready")
    if link.rank == this.victim:
        # After the last step, too: between two exchanges.
        counter.at = (
            this.place
            if isinstance(this.place, str)
            else counter.steps + int(this.place * (counter.steps + 1))
        )
        counter.fault = lambda: do_fault(link, this.action)
    elif this.action == "race":
        counter.at, counter.fault = this.place, lambda: wait_for_failure(link)
    try:
        for _ in range(2):
            exchange(link, this.kind, this.size)
        print_line("ended", str(link.rank), "without an error")
    except (CollectiveError, KeyboardInterrupt) as error:
        print_line("ended", str(link.rank), type(error).__name__, str(error))
        raise
    except BaseException as error:
        trace = traceback.format_exc()
        print_line("ended", str(link.rank), "UNTYPED", repr(error), trace)
        raise
    finally:
        if counter.name:
            print_line("step", counter.name)
        link.close()


def work_by_sockets(this, rank, address, output):
    """A process of a try over sockets."""
    os.dup2(output, 1)
    link = SocketLink(rank, this.workers, address, TIMEOUT_SECONDS * 5, SILENCE_SECONDS)
    shorten_waits(link)
    try:
        run_worker(link, this)
    except BaseException:
        os._exit(1)


def shorten_waits(link):
    """The meeting may take its time; the exchanges have the deadline of the try."""
    import socket

    from tfdp.hosts.wire import set_timeout

    link.timeout_seconds = TIMEOUT_SECONDS
    ring = link._channels["step"]
    for each in ring.neighbours:
        set_timeout(each.sender._connection, socket.SO_SNDTIMEO, TIMEOUT_SECONDS)
        set_timeout(each.receiver._connection, socket.SO_RCVTIMEO, TIMEOUT_SECONDS)


def try_sockets(this):
    """The lines that the processes of one try printed; those that hang are killed."""
    fork = multiprocessing.get_context("fork")
    address = f"127.0.0.1:{free_port()}"
    read, write = os.pipe()
    processes = [
        fork.Process(target=work_by_sockets, args=(this, rank, address, write))
        for rank in range(this.workers)
    ]
    for process in processes:
        process.start()
    os.close(write)
    most = DEADLINES_SECONDS[this.action] + 5 * TIMEOUT_SECONDS + MARGIN_SECONDS
    deadline = time.monotonic() + most
    others = [p for rank, p in enumerate(processes) if rank != this.victim]
    for process in others:
        process.join(max(deadline - time.monotonic(), 0.0))
    if this.action == "stop" and processes[this.victim].is_alive():
        os.kill(processes[this.victim].pid, signal.SIGCONT)
    processes[this.victim].join(max(deadline - time.monotonic(), 10.0))
    hangs = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    with os.fdopen(read) as lines:
        return lines.read().splitlines(), hangs


def find_mpiexec():
    """Of this environment, or of the machine."""
    beside = pathlib.Path(sys.executable).with_name("mpiexec")
    return shutil.which("mpiexec") or (str(beside) if beside.exists() else None)


MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def try_mpi(this):
    """As `try_sockets`, under mpiexec."""
    command = [find_mpiexec(), "-n", str(this.workers), "--bind-to", "none"]
    program = [sys.executable, "-m", "tests.support.exchange_faults"]
    process = subprocess.Popen(
        [*command, *program, "mpi-worker", json.dumps(this)],
        cwd=REPOSITORY,
        env={**os.environ, **MPI_ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    most = DEADLINES_SECONDS[this.action] + 5 * TIMEOUT_SECONDS + MARGIN_SECONDS
    try:
        output, hangs = process.communicate(timeout=most)[0], []
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, hangs = process.communicate()[0], ["mpiexec"]
    # The job is what has to end: its last process, and MPI behind it.
    return [*output.splitlines(), f"{time.time():.2f} ended job"], hangs


def work_by_mpi(this):
    """A process of a try under mpiexec."""
    from tfdp.hosts.mpi_link import MpiLink

    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    link = MpiLink(rank, this.workers, None, TIMEOUT_SECONDS * 5, SILENCE_SECONDS)
    shorten_waits(link)
    run_worker(link, this)


def judge(this, lines, hangs):
    """What is wrong with a try, in words; and how long its others took."""
    times = {"fault": [], "ended": []}
    for line in lines:
        words = line.split(" ")
        if len(words) > 1 and words[1] in times:
            times[words[1]].append((float(words[0]), words[2:]))
    if not times["fault"]:
        return "no fault happened", 0.0
    fault, _ = times["fault"][0]
    others = [
        (at, words) for at, words in times["ended"] if words[0] != str(this.victim)
    ]
    took = max((at - fault for at, _ in others), default=0.0)
    if hangs:
        return f"hangs: {hangs}", took
    if any("UNTYPED" in words for _, words in times["ended"]):
        return "an error that is none of tfdp", took
    told = {words[0]: " ".join(words[1:]) for _, words in times["ended"]}
    stopped = told.pop(str(this.victim), "")
    told.pop("job", None)
    if this.action in ("kill", "stop"):
        for text in told.values():
            if f"worker {this.victim} " not in text:
                return "somebody does not say who was lost", took
    if this.action == "stop" and stopped and "itself did not run" not in stopped:
        return "who was stopped does not say so", took
    if took > DEADLINES_SECONDS[this.action] + MARGIN_SECONDS:
        return "the deadline was passed", took
    return None, took


def main(engine, tries, seed, is_shown=False):
    wrong, longest = 0, collections.Counter()
    plan = (
        [Try(number, *fixed) for number, fixed in enumerate(FIXED_TRIES[engine])]
        if tries == "fixed"
        else [make_try(seed, number) for number in range(int(tries))]
    )
    for this in plan:
        lines, hangs = try_sockets(this) if engine == "sockets" else try_mpi(this)
        fault, took = judge(this, lines, hangs)
        longest[this.action] = max(longest[this.action], took)
        step = next((x.split(" ", 2)[2] for x in lines if " step " in x), "")
        print(f"{this} {step}: {fault or 'ended'} after {took:.1f} s", flush=True)
        wrong += bool(fault)
        if fault or is_shown:
            print("\n".join(f"    {line}" for line in lines), flush=True)
    right = len(plan) - wrong
    print(f"seed {seed}: {right} of {len(plan)} tries ended as they should")
    print("longest seconds", dict(longest), "deadlines", DEADLINES_SECONDS)
    return 1 if wrong else 0


if __name__ == "__main__":
    seed = sys.argv[3] if len(sys.argv) > 3 else str(random.randrange(10**6))
    if sys.argv[1] == "mpi-worker":
        work_by_mpi(Try(*json.loads(sys.argv[2])))
    else:
        sys.exit(main(sys.argv[1], sys.argv[2], seed, sys.argv[-1] == "show"))
