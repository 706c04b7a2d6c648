"""The same programs on two hosts: each a process, which meet over sockets.

Worker 0 judges as a `Child` does, with a strategy over both; worker 1 runs the program
beside it. What a program asks for that several hosts have not (batches filled up, calls
whose rows each host brings by itself, engines within a host) is changed to what they
have, so that every program that is drawn runs.
"""

import dataclasses
import functools
import secrets
import socket
import traceback
import zlib

import numpy as np
import tensorflow as tf

from tests.generator.child import Child
from tests.generator.program import Program

HOSTS = 2
# Nobody waits so long here, but for a host that has gone another way.
TIMEOUT_SECONDS = 240.0
# Every host brings rows of its own to these; others get the whole batch on all hosts.
CALLS = {
    "train_on_batch": "fit",
    "test_on_batch": "evaluate",
    "predict_on_batch": "predict",
}


def on_hosts(program: Program, devices: int) -> Program:
    """The program as two hosts run it, with a replica on each device."""
    layout = dataclasses.replace(
        program.layout,
        replicas=HOSTS * devices,
        engine="auto",
        hierarchy="flat",
        pad_batches=False,
    )
    calls = tuple(CALLS.get(name, name) for name in program.calls)
    return dataclasses.replace(program, layout=layout, calls=calls)


class HostsChild(Child):
    """Gives the verdict on programs that two processes run together.

    Args:
      devices: of each process. TensorFlow fixes their number when it starts.
      plant: the name of a fault or delay in `planted` that worker 0 alone has.
      plant_on_all: the same, of both.
    """

    def __init__(self, devices, plant=None, plant_on_all=None):
        super().__init__(plant or plant_on_all)
        self._devices = devices
        self.replayed_with = f", devices_of_hosts={devices}"
        if plant_on_all:
            self.replayed_with += f", plant={plant_on_all!r}"
        self._other = _Other(plant_on_all)

    def judge(self, program: Program):
        """As `Child.judge`, of `on_hosts(program)`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        place = address, secrets.token_hex(16)
        program = on_hosts(program, self._devices)
        self._other.begin((program, 1, *place))
        verdict = super().judge((program, 0, *place))
        other = self._other.end(verdict)
        if verdict.kind in ("same", "refused") and other is not None:
            # What worker 0 heard of may be worker 1's end.
            verdict = dataclasses.replace(verdict, kind="crash", text=other)
        return verdict

    def close(self):
        """Ends both processes."""
        super().close()
        self._other.close()

    @staticmethod
    def serve(connection, plant):
        """Worker 0."""
        from tests.generator import planted
        from tests.generator.compare import judge

        planted.plant(plant)
        connection.send("ready")
        while (asked := connection.recv()) is not None:
            program, *place = asked
            _start_devices(program.layout.replicas // HOSTS)
            with Rendezvous(*place) as meeting:
                verdict = judge(program, meeting.strategy, may_repeat=False)
            connection.send(verdict)


class _Other(Child):
    """Worker 1."""

    @staticmethod
    def serve(connection, plant):
        from tests.generator import planted
        from tests.generator.compare import is_typed, run_replicas

        planted.plant(plant)
        connection.send("ready")
        while (asked := connection.recv()) is not None:
            program, *place = asked
            _start_devices(program.layout.replicas // HOSTS)
            told = None
            with Rendezvous(*place) as meeting:
                try:
                    run_replicas(program, meeting.strategy)
                except Exception as error:
                    if not is_typed(error):
                        told = f"worker 1: {traceback.format_exc()[-3000:]}"
            connection.send(told)

    def begin(self, asked):
        self._make_ready()
        self._connection.send(asked)

    def end(self, verdict):
        """What it died of, if it was no typed error."""
        if self._process is None:
            return None  # ended with worker 0
        try:
            if self._answers():
                return self._connection.recv()
        except (EOFError, ConnectionError):
            self.close()
            return "worker 1 ended by itself"
        self.close()
        return "worker 1 hangs"


@functools.cache  # the same layout for all programs of a process
def _start_devices(count):
    import tfdp

    tfdp.use_virtual_devices(count)


class Rendezvous:
    """Makes the strategies of one program, and closes them.

    Args:
      rank: of this worker.
      address: of worker 0.
      key: of this program alone, so that no late worker of another one gets in.
    """

    def __init__(self, rank, address, key):
        import tfdp

        self._made = []
        self._cluster = tfdp.Cluster(HOSTS, rank, address, job_key=key)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for made in self._made:
            made.close()

    def strategy(self, layout):
        """As `build.make_strategy`, over all hosts."""
        import tfdp

        made = tfdp.MultiHostDataParallelStrategy(
            self._cluster,
            devices_per_host=layout.replicas // HOSTS,
            communication=tfdp.Communication(
                bucket_bytes=layout.bucket_bytes,
                first_bucket_bytes=min(layout.bucket_bytes, 2**20),
                timeout_seconds=TIMEOUT_SECONDS,
            ),
            shard=layout.shard,
            shard_min_bytes=0,
            draws_per_replica=layout.draws_per_replica,
        )
        self._made.append(made)
        return made


def unequal_hosts(strategy, state):
    """The names of what is not the same bits on all hosts."""
    marks = [zlib.crc32(np.ascontiguousarray(value)) for value in state.values()]
    mine = tf.constant([marks], tf.int64)
    everybody = strategy.gather(mine, axis=0).numpy()
    apart = (everybody != everybody[0]).any(axis=0)
    return [name for name, is_apart in zip(state, apart, strict=True) if is_apart]
