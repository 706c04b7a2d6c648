"""Records the ops of every TensorFlow thread with its profiler."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfdp.cluster.scratch import scratch_folder

# Op events: "name:Type", or a name within the step's function.
OP = re.compile(r"StatefulPartitionedCall/|[^:]:_?[A-Z]\w*$")
CALLS = re.compile(r":(StatefulPartitionedCall|PartitionedCall|If|While)$")


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """One op on one thread."""

    thread: str
    name: str
    start_us: float
    duration_us: float


class StepTrace:
    """Records ops between `start` and `stop`."""

    def __init__(self) -> None:
        self._folder: Any = None

    def start(self) -> None:
        """Starts; raises `tf.errors.AlreadyExistsError` if a profiler is running."""
        self._folder = scratch_folder()
        profiler = tf.profiler.experimental
        options = profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        try:
            profiler.start(self._folder.name, options=options)
        except tf.errors.AlreadyExistsError:
            self._folder.cleanup()
            raise

    def stop(self) -> list[TraceEvent]:
        """Stops, and returns the ops in order of their start."""
        tf.profiler.experimental.stop()
        files = pathlib.Path(self._folder.name).rglob("*.xplane.pb")
        events = [event for path in files for event in _events(path)]
        self._folder.cleanup()
        return sorted(events, key=lambda event: event.start_us)


def _events(path: pathlib.Path) -> Iterator[TraceEvent]:
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                # Leave out calls: the ops they call are events, too.
                if OP.search(name) and not CALLS.search(name):
                    thread = f"{plane.name} {line.name} {line.id}"
                    start_us = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                    yield TraceEvent(thread, name, start_us, event.duration_ps / 1e6)
