"""What TensorFlow's allocators held at the peak of a step, from a profile.

An allocator hands out chunks, which may be larger than what an op requested: the
figures that `get_memory_info` returns are of chunks. A profile has both sizes.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

MARK = "one_gpu_measured_steps"
ALLOCATED, FREED = "MemoryAllocation", "MemoryDeallocation"
LARGEST = 12


@contextlib.contextmanager
def profiled(found: list[dict[str, Any]]) -> Iterator[None]:
    """Appends to `found` what `events_of` reads from a profile of the block."""
    import tensorflow as tf

    scratch = tempfile.mkdtemp(prefix="one-gpu-")
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=0
    )
    try:
        tf.profiler.experimental.start(scratch, options)
        try:
            yield
        finally:
            tf.profiler.experimental.stop()
        for path in pathlib.Path(scratch).rglob("*.xplane.pb"):
            found += events_of(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def events_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """The allocations, and where the measured steps begin, by time."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    events = []
    for plane in space.planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        wanted = {
            key
            for key, name in names.items()
            if name in (ALLOCATED, FREED) or name.startswith(MARK)
        }
        for line in plane.lines:
            for event in line.events:
                if event.metadata_id not in wanted:
                    continue
                stats = {
                    plane.stat_metadata[s.metadata_id].name: _value(plane, s)
                    for s in event.stats
                }
                picoseconds = 1000 * line.timestamp_ns + event.offset_ps
                name = names[event.metadata_id]
                events.append({"name": name, "time": picoseconds, **stats})
    return sorted(events, key=lambda event: event["time"])


def _value(plane: Any, stat: Any) -> Any:
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind) if kind else ""
    return plane.stat_metadata[value].name if kind == "ref_value" else value


def peaks(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By allocator of a GPU: the peak after the mark, in chunks and as requested, MB.

    Args:
      events: see `events_of`; of all steps since the device started.
    """
    begin = next((e["time"] for e in events if e["name"].startswith(MARK)), 0)
    live: dict[str, dict[Any, dict[str, Any]]] = collections.defaultdict(dict)
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        allocator = str(event.get("allocator_name", ""))
        if not allocator.startswith(("GPU", "gpu")) or "host" in allocator:
            continue
        chunks = live[allocator]
        if event["name"] == FREED:
            chunks.pop(event.get("addr"), None)
            continue
        chunks[event.get("addr")] = event
        in_use = int(event.get("bytes_allocated", 0))
        best = found.get(allocator, {"in use": -1})
        if event["time"] >= begin and in_use > best["in use"]:
            found[allocator] = {"in use": in_use, "chunks": list(chunks.values())}
    return {name: _summary(each) for name, each in found.items()}


def _summary(peak: dict[str, Any]) -> dict[str, Any]:
    sizes: collections.Counter[str] = collections.Counter()
    requested = allocated = 0
    for chunk in peak["chunks"]:
        bytes_ = int(chunk.get("requested_bytes", 0))
        requested += bytes_
        allocated += int(chunk.get("allocation_bytes", 0))
        sizes[str(chunk.get("tf_op", ""))] += bytes_
    largest = sizes.most_common(LARGEST)
    return {
        "in use MB": peak["in use"] / 1e6,
        "chunks MB": allocated / 1e6,
        "requested MB": requested / 1e6,
        "largest": {op: round(size / 1e6, 1) for op, size in largest},
    }
