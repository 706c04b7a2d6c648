"""Gradients between hosts by TensorFlow's collectives: NCCL on GPUs, its ring on CPUs.

Only large tensors of static shape use them: mostly gradients. Everything else crosses
by the link, which also detects missing hosts.

On GPUs a bucket is one all-reduce over all GPUs of all hosts; NCCL finds the levels
itself. Each replica launches its own, in trace order. On CPUs the leader of each host
adds the host's tensors, and the leaders exchange the sums in chunks, all in flight at
once: TensorFlow's ring allocates memory per message, which is slow above some MB.

TensorFlow pairs collectives by a key, and remembers the size of its first use. Hosts
may trace a step at different times, so the key is computed from what is the same on
all of them: the place in the run, and the size.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp._private.collective_runtime import abort_collectives, start_collectives
from tfdp.cluster.addresses import held_port
from tfdp.cluster.description import join_address
from tfdp.errors import ConfigurationError
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.levels import FIRST, Levels
from tfdp.exchange.ordering import run_independently
from tfdp.exchange.over_link import OverLink
from tfdp.exchange.packing import Tensors, pack, unpack
from tfdp.exchange.traffic import ring_bytes
from tfdp.exchange.transport import next_group_key
from tfdp.exchange.wire_types import collective_sum_dtype, fitting_wire_dtype
from tfdp.hosts.exchange_watch import ExchangeWatch
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.python_calls import counted
from tfdp.hosts.server_guard import keep_to_workers
from tfdp.lint.registry import is_of_graph

# A smaller tensor takes at least as long by the ring as by a round trip of the link.
SMALLEST_BYTES = 64 * 2**10
CHUNK_BYTES = 6 * 2**20
LONGEST_PORT_BYTES = 5
SUMMABLE = {tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}


def rendezvous_by_collectives(link: HostLink) -> None:
    """Connects TensorFlow's collectives of all workers.

    Must run before TensorFlow starts: it changes the names of TensorFlow's devices.
    Raises `ConfigurationError` otherwise, or when a worker has another engine.
    """
    # Over the link, which exists before TensorFlow starts: TensorFlow's own rendezvous
    # needs addresses in advance, and waits forever for a missing worker.
    label = "ports of TensorFlow's collectives"
    # Held until every worker has chosen: two workers of a host choose different ports.
    with held_port() as port:
        own = str(port).encode()
        ports = link.gather(own, label, most_bytes=LONGEST_PORT_BYTES)
    for rank, other in enumerate(ports):
        if not other.isdigit():
            raise ConfigurationError(
                f"Worker {rank} has another Communication than worker {link.rank}, "
                "which has engine='tensorflow'. Give every worker the same."
            )
    addresses = [
        join_address(host, int(other))
        for host, other in zip(link.hosts, ports, strict=True)
    ]
    # Its server accepts every connection to the port; see docs/security.md.
    if start_collectives(link.rank, addresses):
        keep_to_workers(link, [int(other) for other in ports])


class LevelsOverCollectives(Levels):
    """`Levels`, but TensorFlow's collectives add between hosts what is large.

    The names of the devices contain the process: see `start_collectives`. `outer`
    carries small tensors, and its link detects missing hosts. `hint` is "nccl" or
    "ring". Unlike the link, the collectives add in `wire_dtype`; with "nccl" bfloat16
    travels and is added as float32.

    Cost: with "nccl" one launch per bucket and replica and 2 n (N - 1) / N bytes for
    n bytes on N replicas; with "ring" a launch per 6 MiB and 2 n (H - 1) / H bytes
    per host. Two Python callbacks per bucket and host, without data. The NCCL path was
    not run on a GPU.
    """

    def __init__(self, inner: InProcess, outer: OverLink, hint: str):
        super().__init__(inner, outer)
        self.name, self.hint = "tensorflow", hint
        # NCCL handles both levels itself; on CPUs the replicas of a host sum first.
        self._over_nccl = hint == "nccl"
        devices = self.devices if self._over_nccl else self.devices[:1]
        members = self.replicas if self._over_nccl else outer.replicas
        self.large = LargeSums(devices, outer.link, hint, members)

    @property
    def bytes_between_hosts(self) -> int | None:
        # NCCL chooses its own route over all GPUs, and does not report it.
        if self._over_nccl:
            return None
        return self.outer.link.sent_bytes() + self.large.sent_bytes

    @property
    def seconds_between_hosts(self) -> float | None:
        """None: TensorFlow does not report the duration of its collectives."""
        return None

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        self.large.begin_run()
        with super().run():
            yield

    def close(self) -> None:
        super().close()
        self.large.close()

    def all_reduce(
        self, tensors: Tensors, rank: int, label: str, wire_dtype: str | None = None
    ) -> list[tf.Tensor]:
        if not self._over_nccl or not _are_large(tensors):
            return super().all_reduce(tensors, rank, label, wire_dtype)
        self.order.next(rank, "sum", tensors)
        with tf.device(self.devices[rank]):
            [total] = self.large.sums([pack(tensors)], rank, label, wire_dtype)
            return unpack(total, tensors)

    def sum_of_hosts(
        self, tensors: Tensors, label: str, wire_dtype: str | None
    ) -> list[tf.Tensor]:
        if self._over_nccl or not _are_large(tensors):
            return super().sum_of_hosts(tensors, label, wire_dtype)
        with tf.device(self.devices[FIRST]):
            # TensorFlow's ring waits for new memory on large buffers: measured on CPUs.
            elements = [total.shape.num_elements() for total in tensors]
            plan = plan_chunks(elements, CHUNK_BYTES // tensors[0].dtype.size)
            chunks = cut_chunks(tensors, plan)
            sums = self.large.sums(chunks, FIRST, label, wire_dtype)
            return join_chunks(sums, plan, tensors)


class LargeSums:
    """TensorFlow's collectives between hosts, for large tensors of static shape.

    `devices` are those of this process that take part, of `members` in all. TensorFlow
    uses the implementation `hint`: "nccl" or "ring".
    """

    def __init__(self, devices: Sequence[str], link: HostLink, hint: str, members: int):
        self.devices, self.link, self.hint = tuple(devices), link, hint
        self.sent_bytes = 0
        self._over_nccl = hint == "nccl"
        self._members = members
        self._group_key = next_group_key()
        self._tokens = [names.make_token(device) for device in self.devices]
        # The place in the trace identifies a collective: all replicas trace the same
        # ones in the same order, though each separately.
        self._places = [0] * len(self.devices)
        self._step: Callable[[], Any] = lambda: None
        self._keys = CollectiveKeys()
        # A collective's deadline does not name the missing host. An abort is permanent:
        # afterwards every collective of this process fails.
        self._watch = ExchangeWatch(link, abort_collectives)

    def close(self) -> None:
        self._watch.close()

    def begin_run(self) -> None:
        """Prepares for the replicas of a `strategy.run`, which are traced next."""
        # A step may have several runs, in separate graphs: places go on within a step,
        # but restart with each step, because hosts may trace different numbers of them.
        before, step = self._step(), names.outermost_function_graph()
        least = max(self._places) if step is not None and step is before else 0
        self._places = [least] * len(self.devices)
        self._step = (lambda: None) if step is None else weakref.ref(step)

    def sums(
        self, buffers: Tensors, rank: int, label: str, wire_dtype: str | None
    ) -> list[tf.Tensor]:
        """The sums of flat buffers over the group, with one launch each."""
        small = fitting_wire_dtype(buffers, wire_dtype)
        dtype = tf.as_dtype(small) if small else buffers[0].dtype
        dtype = collective_sum_dtype(dtype, self.devices[0], over_nccl=self._over_nccl)
        wires = [tf.cast(buffer, dtype) for buffer in buffers]
        number = self._begin(wires, label) if rank == FIRST else None
        sums = []
        for buffer, wire in zip(buffers, wires, strict=True):
            total = tf.raw_ops.CollectiveReduceV2(
                input=wire,
                merge_op="Add",
                final_op="Id",
                group_size=self._members,
                group_key=self._group_key,
                instance_key=self._next_key(wire, rank),
                ordering_token=[self._tokens[rank].handle],
                communication_hint=self.hint,
                timeout_seconds=0.0,  # see ExchangeWatch
            )
            # Unordered, so that all are in flight at once. But NCCL deadlocks where
            # processes launch in different orders, and TensorFlow enforces one order
            # only within a process: there each replica's token keeps its launches in
            # trace order.
            if not self._over_nccl:
                run_independently(total.op)
            sums.append(tf.cast(total, buffer.dtype))
        return sums if number is None else self._end(number, sums)

    def _next_key(self, wire: tf.Tensor, rank: int) -> int:
        place = self._places[rank]
        self._places[rank] += 1
        # Workers that trace different steps get different keys: they wait until the
        # missing worker is reported, where equal keys would add unrelated tensors.
        exchange = f"{place} {wire.shape.num_elements()} {wire.dtype.name}"
        return self._keys.key_of(exchange)

    def _begin(self, wires: Tensors, label: str) -> tf.Tensor:
        # Bytes of a ring; their sizes are static, because others use the link.
        place, hosts = self.link.rank, self.link.workers
        sent = 2 * sum(ring_bytes(wire, place, hosts) or 0 for wire in wires)

        def begin() -> np.ndarray:
            self.sent_bytes += sent
            return np.int64(self._watch.begin(label))

        with tf.control_dependencies(wires), tf.device("CPU:0"):
            number = tf.numpy_function(counted(begin), [], tf.int64, stateful=True)
        run_independently(number.op)
        return number

    def _end(self, number: tf.Tensor, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        def end(number: np.ndarray) -> np.ndarray:
            self._watch.end(int(number))
            return number

        with tf.control_dependencies(sums), tf.device("CPU:0"):
            ended = tf.numpy_function(counted(end), [number], tf.int64, stateful=True)
        run_independently(ended.op)
        with tf.control_dependencies([ended]):
            return [tf.identity(total) for total in sums]


def _are_large(tensors: Tensors) -> bool:
    """Whether they are worth a collective, which needs a graph and static sizes."""
    if not is_of_graph(tensors[0]):
        return False
    elements = [tensor.shape.num_elements() for tensor in tensors]
    if None in elements or tensors[0].dtype not in SUMMABLE:
        return False
    return sum(elements) * tensors[0].dtype.size >= SMALLEST_BYTES


# TensorFlow takes an int32, and tfdp no negative one.
KEYS = 2**31


class CollectiveKeys:
    """A number for each exchange of a group, the same on every host.

    Hosts may trace at different times, so the number is a hash of the exchange. On a
    collision (of 1000 exchanges some pair collides in 1 of 4300 groups) the later one
    takes the next free number. Hosts trace the same program, so they reach such a pair
    in the same order.
    """

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._taken: set[int] = set()

    def key_of(self, exchange: str) -> int:
        """The number of `exchange`, unique in the group."""
        if exchange not in self._keys:
            key = first_choice(exchange)
            while key in self._taken:
                key = (key + 1) % KEYS
            self._keys[exchange] = key
            self._taken.add(key)
        return self._keys[exchange]


def first_choice(exchange: str) -> int:
    """The number of `exchange` unless another exchange took it."""
    digest = hashlib.blake2b(exchange.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % KEYS


# For each chunk, in order: which tensor, and how many elements of it.
Plan = list[list[tuple[int, int]]]


def plan_chunks(element_counts: Sequence[int], most_elements: int) -> Plan:
    """Splits tensors into chunks of at most `most_elements` elements.

    >>> plan_chunks([3, 2, 9, 1], 4)
    [[(0, 3)], [(1, 2)], [(2, 4)], [(2, 4)], [(2, 1), (3, 1)]]
    """
    plan: Plan = []
    room = 0
    for tensor, elements in enumerate(element_counts):
        # A tensor that fits into one chunk is not split.
        if room < min(elements, most_elements):
            room = 0
        while elements:
            if not room:
                plan.append([])
                room = most_elements
            taken = min(elements, room)
            plan[-1].append((tensor, taken))
            room -= taken
            elements -= taken
    return plan


def cut_chunks(tensors: Tensors, plan: Plan) -> list[tf.Tensor]:
    """The chunks of `plan`, flat."""
    sizes: list[list[int]] = [[] for _ in tensors]
    for chunk in plan:
        for tensor, elements in chunk:
            sizes[tensor].append(elements)
    parts = [
        _split(tensor, of_it) for tensor, of_it in zip(tensors, sizes, strict=True)
    ]
    chunks = []
    for chunk in plan:
        inside = [parts[tensor].pop(0) for tensor, _ in chunk]
        chunks.append(inside[0] if len(inside) == 1 else tf.concat(inside, 0))
    return chunks


def join_chunks(chunks: Tensors, plan: Plan, like: Tensors) -> list[tf.Tensor]:
    """The inverse of `cut_chunks`: tensors of the shapes in `like`."""
    parts: list[list[tf.Tensor]] = [[] for _ in like]
    for chunk, inside in zip(chunks, plan, strict=True):
        sizes = [elements for _, elements in inside]
        for part, (tensor, _) in zip(_split(chunk, sizes), inside, strict=True):
            parts[tensor].append(part)
    return [
        tf.reshape(tf.concat(of_it, 0) if of_it else tensor, tensor.shape)
        for of_it, tensor in zip(parts, like, strict=True)
    ]


def _split(tensor: tf.Tensor, sizes: list[int]) -> list[tf.Tensor]:
    flat = tf.reshape(tensor, [-1])
    return [flat] if len(sizes) == 1 else tf.split(flat, sizes) if sizes else []


# A first, small sum shows whether collectives work between these hosts: a missing
# library or a firewall shows only in the first collective, and one that failed cannot
# be used again in its process.

#: The answer of a worker that may not be at fault itself.
NO_ANSWER = "the other workers were not heard"

ELEMENTS = 256
#: How long a worker waits here for the others, which all start this sum.
TRIAL_SECONDS = 60.0


def try_collectives(
    link: HostLink,
    devices: Sequence[str],
    hint: str,
    trial_seconds: float = TRIAL_SECONDS,
) -> str:
    """Adds numbers with a known sum over all hosts.

    With "nccl" over all replicas, with "ring" over the first of each host; nothing
    crosses `link`. Returns what went wrong on this host; "" when the sums were right.
    """
    members = list(devices) if hint == "nccl" else list(devices[:1])
    hosts = link.workers
    group_key, instance_key = next_group_key(), 1
    first = link.rank * len(members)
    tokens = [names.make_token(device) for device in members]

    @tf.function(autograph=False)
    def sums() -> list[tf.Tensor]:
        totals = []
        for place, device in enumerate(members):
            with tf.device(device):
                total = tf.raw_ops.CollectiveReduceV2(
                    input=tf.fill([ELEMENTS], float(first + place + 1)),
                    merge_op="Add",
                    final_op="Id",
                    group_size=hosts * len(members),
                    group_key=group_key,
                    instance_key=instance_key,
                    ordering_token=[tokens[place].handle],
                    communication_hint=hint,
                    timeout_seconds=trial_seconds,
                )
            # Otherwise one replica's would wait for the next one's.
            run_independently(total.op)
            totals.append(total)
        return totals

    count = hosts * len(members)
    expected = count * (count + 1) / 2
    try:
        found = [total.numpy() for total in sums()]
    except tf.errors.DeadlineExceededError:
        return NO_ANSWER
    except tf.errors.OpError as error:
        return f"{type(error).__name__}: {_first_line(error.message)}"
    if all(np.array_equal(total, np.full(ELEMENTS, expected)) for total in found):
        return ""
    return f"a sum over {count} replicas was {found[0][0]:g} instead of {expected}"


def _first_line(message: str) -> str:
    """The first line of TensorFlow's message after its headings."""
    lines = [line.strip() for line in message.splitlines()]
    headings = ("Graph execution error", "Detected at node")
    rest = [line for line in lines if line and not line.startswith(headings)]
    return rest[0] if rest else message.strip()
