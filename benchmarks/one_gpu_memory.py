"""Groups of `one_gpu.py` on memory beside its plan, and on sums beside backprop."""

from __future__ import annotations

import collections
import functools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import one_gpu_allocations as allocations
from benchmarks import one_gpu_rows as subjects
from benchmarks.one_gpu_rows import devices, emit, row, run_group, wait_for_turn

HALF_MB = 16_000
REPLICAS = 2
# What each case gives to the strategy, and whether layers compute twice.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({}, False),
    "optimizer": ({"shard": "optimizer"}, False),
    "gradients": ({"shard": "gradients"}, False),
    "parameters": ({"shard": "parameters"}, False),
    "remat": ({}, True),
    "offload": ({"shard": "optimizer", "offload": "optimizer"}, False),
}


def _network(real: bool) -> Any:
    """An encoder of 4 layers of 768 without dropout; 34.7 million weights."""
    if real:
        return subjects.encoder(4, 768, 12, 128, 8_000, dropout=0.0)
    return subjects.encoder(1, 64, 2, 16, 100, dropout=0.0)


def _global_batch(real: bool) -> int:
    return REPLICAS * (16 if real else 4)


def plan(folder: pathlib.Path) -> None:
    """What is predicted for each case; on the CPU, of which the runner sees to it."""
    import tfdp
    from tfdp.planning import plan as planned

    tfdp.use_virtual_devices(REPLICAS + 1)
    # For the sizes that are measured beside it.
    real = os.environ.get("ONE_GPU_REAL") == "1"

    def predict(case: str) -> dict[str, Any]:
        options, remat = CASES[case]
        shard: Any = options.get("shard", "none")
        if "offload" in options:
            shard = tfdp.Sharding(shard, offload=options["offload"])
        found = planned(
            functools.partial(_network, real),
            _global_batch(real),
            replicas=REPLICAS,
            shard=shard,
            remat=remat,
        )
        parts = {key: round(size / 1e6, 1) for key, size in found.parts.items()}
        told = ", ".join(f"{key} {size}" for key, size in parts.items())
        return {"planned MB": found.peak_bytes / 1e6, "planned parts, MB": told}

    for case in CASES:
        row(case, predict, case)


def memory(case: str, folder: pathlib.Path) -> None:
    """The peak of a step on each of two logical GPUs, by the allocator."""
    names, real = devices(REPLICAS, HALF_MB)
    import numpy as np
    import tensorflow as tf

    import tfdp

    options, remat = CASES[case]
    memory_of = tf.config.experimental.get_memory_info

    def measure() -> dict[str, Any]:
        events: list[dict[str, Any]] = []
        with allocations.profiled(events):
            figures = train()
        for allocator, peak in sorted(allocations.peaks(events).items()):
            print(allocator, json.dumps(peak), flush=True)
            figures[f"{allocator} requested MB"] = peak["requested MB"]
            figures[f"{allocator} in chunks of MB"] = peak["chunks MB"]
        return figures

    def train() -> dict[str, Any]:
        before = [memory_of(name)["current"] if real else 0 for name in names]
        strategy = tfdp.DataParallelStrategy(names, alone=True, **options)
        with strategy.scope():
            model = _network(real)
        if remat:
            tfdp.remat(model)
        [(_, length)] = [model.input_shape]
        x = np.zeros((_global_batch(real), length), "int32")
        y = np.zeros((_global_batch(real),), "int32")
        data = tf.data.Dataset.from_tensors((x, y)).repeat()
        model.fit(data, steps_per_epoch=3, verbose=0)
        if not real:
            return {"note": "only GPUs have a reading"}
        for name in names:
            tf.config.experimental.reset_memory_stats(name)
        with tf.profiler.experimental.Trace(allocations.MARK):
            model.fit(data, steps_per_epoch=3, verbose=0)
        found = [memory_of(name) for name in names]
        peaks = [
            (each["peak"] - first) / 1e6
            for each, first in zip(found, before, strict=True)
        ]
        return {
            "peak MB": max(peaks),
            "peaks MB": ", ".join(f"{peak:.1f}" for peak in peaks),
            "at rest MB": max(each["current"] for each in found) / 1e6,
            "before MB": max(before) / 1e6,
        }

    row(case, measure)


def timeline(folder: pathlib.Path) -> None:
    """A step on two logical GPUs: threads of the host, and streams of the card."""
    names, real = devices(2, HALF_MB)
    import tensorflow as tf

    import tfdp

    wait_for_turn()
    batch = 64 if real else 8
    strategy = tfdp.DataParallelStrategy(names, alone=True)
    with strategy.scope():
        model = _network(real)
    import numpy as np

    [(_, length)] = [model.input_shape]
    x, y = np.zeros((batch, length), "int32"), np.zeros((batch,), "int32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat()

    def of_host() -> dict[str, Any]:
        drawn = tfdp.callbacks.StepTimeline(folder / "timeline.trace.json", step=5)
        model.fit(data, steps_per_epoch=6, verbose=0, callbacks=[drawn])
        return {
            "of the sums, beside computing": f"{drawn.hidden_share or 0:.0%}",
            **{f"{kind}, ms": 1e3 * s for kind, s in drawn.seconds.items()},
        }

    row("threads of the host", of_host)
    if real:
        row("streams of the card", _of_card, model, data, folder)
    else:
        emit("streams of the card", "ok", 0.0, {"note": "only GPUs have streams"})


def _of_card(model: Any, data: Any, folder: pathlib.Path) -> dict[str, Any]:
    import tensorflow as tf

    from tfdp.tools.runs.spans import both, joined, length

    scratch = tempfile.mkdtemp(prefix="one-gpu-")
    try:
        tf.profiler.experimental.start(scratch)
        model.fit(data, steps_per_epoch=1, verbose=0)
        tf.profiler.experimental.stop()
        events = [
            e for p in pathlib.Path(scratch).rglob("*.xplane.pb") for e in _events(p)
        ]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    spans = collections.defaultdict(list)
    for event in events:
        span = event["ts"], event["ts"] + event["dur"]
        spans[event["cat"]].append(span)
    sums, computing = joined(spans["sum"]), joined(spans["computing"])
    _write_trace(events, folder / "card.trace.json")
    hidden = length(both(sums, computing))
    return {
        "kernels": len(events),
        "sums, ms": length(sums) / 1e3,
        "computing, ms": length(computing) / 1e3,
        "sums beside computing, ms": hidden / 1e3,
        "of the sums": f"{hidden / length(sums):.0%}" if sums else "no sums seen",
    }


def _events(path: pathlib.Path) -> list[dict[str, Any]]:
    """What ran on the streams of the card, in Chrome's form; microseconds."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    events = []
    kinds: collections.Counter[str] = collections.Counter()
    for plane in space.planes:
        if "/device:GPU" not in plane.name:
            continue
        for line in plane.lines:
            # What is derived, such as "Steps" or "TensorFlow Ops", counts twice.
            if "stream" not in line.name.lower():
                continue
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                said = " ".join(_texts(plane, event.stats))
                kind = _kind_of(name, said)
                kinds[f"{kind}: {line.name}"] += 1
                events.append(
                    {
                        "name": name[:48],
                        "cat": kind,
                        "ph": "X",
                        "pid": plane.name,
                        "tid": line.name,
                        "ts": line.timestamp_ns / 1e3 + event.offset_ps / 1e6,
                        "dur": event.duration_ps / 1e6,
                        "args": {"op": said[-60:]},
                    }
                )
    # For the log: which streams there are, and what an event says of itself.
    print("planes:", [plane.name for plane in space.planes])
    print("events:", dict(kinds))
    for event in events[:: max(1, len(events) // 20)]:
        print("event:", event)
    return events


def _texts(plane: Any, stats: Any) -> list[str]:
    told = []
    for stat in stats:
        if stat.WhichOneof("value") == "str_value":
            told.append(stat.str_value)
        elif stat.WhichOneof("value") == "ref_value":
            told.append(plane.stat_metadata[stat.ref_value].name)
    return told


def _kind_of(name: str, said: str) -> str:
    if "tfdp_all_reduce" in said or "MemcpyP2P" in name or "MemcpyD2D" in name:
        return "sum"
    return "input" if name.startswith(("Memcpy", "Memset")) else "computing"


def _write_trace(events: list[dict[str, Any]], path: pathlib.Path) -> None:
    """For https://ui.perfetto.dev; the last 6,000 events, so that it stays small."""
    kept = sorted(events, key=lambda event: event["ts"])[-6_000:]
    path.write_text(json.dumps({"traceEvents": kept}), "utf-8")


GROUPS: dict[str, Callable[[pathlib.Path], None]] = {
    "plan": plan,
    **{f"memory-{case}": functools.partial(memory, case) for case in CASES},
    "timeline": timeline,
}

if __name__ == "__main__":
    run_group(GROUPS)
