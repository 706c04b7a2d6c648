"""What every thread of TensorFlow did in a short while, by its own profiler."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfdp.cluster.scratch import scratch_folder

__all__ = ["StepTrace", "TraceEvent"]

# Events that are an op: "name:Type", or a name within the step's function.
OP = re.compile(r"StatefulPartitionedCall/|[^:]:_?[A-Z]\w*$")
CALLS = re.compile(r":(StatefulPartitionedCall|PartitionedCall|If|While)$")


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """One op on one thread.

    Args:
      thread: which thread.
      name: of the op.
      start_us: when it began, in microseconds.
      duration_us: how long it ran.
    """

    thread: str
    name: str
    start_us: float
    duration_us: float


class StepTrace:
    """Records ops between `start` and `stop`."""

    def __init__(self) -> None:
        self._folder: Any = None

    def start(self) -> None:
        """Begins.

        Raises:
          tf.errors.AlreadyExistsError: when a profiler is running already.
        """
        self._folder = scratch_folder()
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0
        )
        try:
            tf.profiler.experimental.start(self._folder.name, options=options)
        except tf.errors.AlreadyExistsError:
            self._folder.cleanup()
            raise

    def stop(self) -> list[TraceEvent]:
        """Ends, and returns the ops by start."""
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
                # A call lasts as long as what it calls, which is there as well.
                if OP.search(name) and not CALLS.search(name):
                    yield TraceEvent(
                        thread=f"{plane.name} {line.name} {line.id}",
                        name=name,
                        start_us=line.timestamp_ns / 1e3 + event.offset_ps / 1e6,
                        duration_us=event.duration_ps / 1e6,
                    )
