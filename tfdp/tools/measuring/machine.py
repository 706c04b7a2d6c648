"""Measures a machine: steps of models without sums, and sums without models."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.cluster.machine import describe_machine, usable_cores
from tfdp.plan.buckets import TensorInfo, plan_buckets
from tfdp.plan.communication import Communication
from tfdp.tools.measuring.gradient_sets import FLOAT32_BYTES, GRADIENT_SETS
from tfdp.tools.measuring.models import MODELS
from tfdp.tools.measuring.one_core import measure_coding, measure_rows
from tfdp.tools.measuring.places import Arrangement, Figures, Work, measure_place
from tfdp.tools.measuring.two_hosts import two_hosts
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.measured import MeasuredMachine, MeasuredModel
from tfdp.tools.simulator.model import ModelProfile
from tfdp.tools.simulator.sums import moved_in_process

LOOPBACK = "loopback"
PLACES = tuple(Arrangement(*each) for each in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2)))
SUMS_OF_A_FIGURE = QUICK_CALLS = 2
WITHIN, BETWEEN = Arrangement(1, 2), Arrangement(2, 1)
# Of 102 MB with eight methods; repeats differ by a few per cent.
MOST_CODINGS = 5


def measure_machine(
    models: Sequence[str],
    places: Sequence[Arrangement],
    *,
    link: str = LOOPBACK,
    repeats: int,
    quick: bool,
    timeout_seconds: float,
    say: Callable[[str], None] = lambda line: None,
    others: Sequence[MeasuredModel] = (),
) -> MeasuredMachine:
    """Measures what the simulator needs about this machine.

    `models` (keys of MODELS) are measured in every place, 1 x 1 first;
    `others` were measured before. `link` between two processes is LOOPBACK, or a rate
    as `tc` takes it, as root. `quick`: a smoke test. `say` receives progress messages.

    Raises CollectiveError if an arm fails or takes longer than the timeout, DeviceError
    if the link cannot be created here.
    """
    load, cores = os.getloadavg()[0], usable_cores()
    of_one = {place.replicas for place in places if place.processes == 1}
    within = {}
    for replicas in sorted({WITHIN.replicas, *of_one} - {1}):
        say(f"sums of {replicas} replicas within one process")
        place = Arrangement(1, replicas)
        within[replicas] = measure_link(
            place, LOOPBACK, cores, repeats, timeout_seconds
        )
    say(f"sums between two processes, {link}")
    between = measure_link(BETWEEN, link, cores, repeats, timeout_seconds)
    say("gradient compression on one core")
    coding = measure_coding(min(repeats, MOST_CODINGS), quick, timeout_seconds)
    say("sums of table rows on one core")
    rows = measure_rows(repeats, quick, timeout_seconds)
    measured = {}
    for name in models:
        seconds, profile, samples = {}, None, 1
        for place in places:
            say(f"{name} in {place} without sums")
            calls = QUICK_CALLS if quick else MODELS[name].calls
            work = Work("steps without sums", name, calls)
            (figures,) = measure_place(place, [work], repeats, timeout_seconds)
            seconds[place.processes, place.replicas] = statistics.median(
                figures.seconds
            )
            said: dict[str, Any] = figures.profile or {}
            profile = profile or ModelProfile.from_plain(name, said)
            samples = said["local_batch"]
        if profile is not None:
            measured[name] = MeasuredModel(profile, samples, seconds)
    now = datetime.datetime.now(datetime.timezone.utc)
    return MeasuredMachine(
        name=str(describe_machine()["processor"]),
        cores=cores,
        within_host=within.pop(WITHIN.replicas),
        between_hosts=between,
        link=link,
        models=measured | {model.profile.name: model for model in others},
        load=max(load, os.getloadavg()[0]),
        measured=now.isoformat(timespec="seconds"),
        coding=coding,
        row_bytes_per_second=rows,
        within_host_of=within,
    )


def measure_link(
    place: Arrangement,
    link: str,
    cores: int,
    repeats: int,
    timeout_seconds: float,
) -> Link:
    """The link between the replicas of one process, or between processes.

    Several processes are pinned to a core each, if there are enough; the compute share
    of sums refers to these.
    """
    with contextlib.ExitStack() as stack:
        is_shaped = link != LOOPBACK
        hosts = stack.enter_context(two_hosts(link)) if is_shaped else None
        found = measure_place(
            place, sums_for_link(place), repeats, timeout_seconds, hosts
        )
    return link_of(place, found, cores)


def sums_for_link(place: Arrangement) -> list[Work]:
    """The sums whose figures `link_of` needs."""
    return [Work("sums", name, SUMS_OF_A_FIGURE) for name in _sets(place).names]


def link_of(place: Arrangement, found: Sequence[Figures], cores: int) -> Link:
    """The link of one process, or of several with one replica each, from its sums."""
    sets = _sets(place)
    times = {
        name: SumTimes(
            statistics.median(figures.seconds),
            statistics.median(figures.processor_seconds),
        )
        for name, figures in zip(sets.names, found, strict=True)
    }
    if place.processes == 1:
        moved = moved_in_process(place.replicas)
        return fit_link(sets, times, moved, rounds=place.replicas, cores=cores)
    hops = place.processes - 1
    # One each, if there are enough.
    cores = min(cores, place.processes)
    moved_bytes = 2 * hops / place.processes
    return fit_link(sets, times, moved_bytes, rounds=2 * hops, cores=cores)


def _sets(place: Arrangement) -> SumSets:
    return WITHIN_SETS if place.processes == 1 else BETWEEN_SETS


# Latency and rate of a link from three sums: 4 MB in few tensors, 4 MB in many, and 102
# MB. With their times t and units u, each of which costs one latency,
#
#     seconds of a unit  c = (t of many - t of few) / (u of many - u of few)
#     bytes per second   work of (102 MB - 4 MB)
#                        / (t of 102 MB - t of 4 MB - c (u of 102 MB - u of 4 MB))
#
# The 102 MB are tensors of all sizes, as in a model: they exceed caches, are packed and
# shared unevenly by cores. Between processes a unit is a bucket (one or two for 4 MB);
# what a tensor costs besides its bytes is in the rate. Within a process nothing is
# packed: a unit is a tensor, of which each replica sums some, and 64 keep all cores
# busy. The cost of a call from Python cancels out.
LEAST_SECONDS = 1e-7


@dataclasses.dataclass(frozen=True)
class SumSets:
    """Keys of GRADIENT_SETS: 4 MB in few and in many equal tensors, and 102 MB.

    `packed`: whether a unit is a bucket instead of a tensor.
    """

    few: str
    many: str
    large: str
    packed: bool

    @property
    def names(self) -> tuple[str, str, str]:
        return (self.few, self.many, self.large)

    def tensors(self, name: str) -> list[int]:
        """Bytes of each tensor of a set."""
        return [FLOAT32_BYTES * math.prod(shape) for shape in GRADIENT_SETS[name]()]

    def units(self, name: str) -> int:
        """Units of a set, as tfdp plans them by default."""
        tensors = self.tensors(name)
        if not self.packed:
            return len(tensors)
        defaults = Communication()
        plan = plan_buckets(
            [TensorInfo(size_bytes, "float32") for size_bytes in tensors],
            bucket_bytes=defaults.bucket_bytes,
            first_bucket_bytes=defaults.first_bucket_bytes,
        )
        return len(plan)


BETWEEN_SETS = SumSets("equal-1x1m", "equal-4x256k", "widening", packed=True)
WITHIN_SETS = SumSets("equal-64x16k", "equal-256x4k", "widening", packed=False)


@dataclasses.dataclass(frozen=True)
class SumTimes:
    """Seconds of a call, and processor seconds, of one of the sets."""

    seconds: float
    processor_seconds: float


def fit_link(
    sets: SumSets,
    times: dict[str, SumTimes],
    bytes_of_work: float,
    rounds: int,
    cores: int,
) -> Link:
    """The link that takes as long as was measured.

    By the simulator's formula a sum has `rounds` latencies, and moves `bytes_of_work`
    per byte: replicas + 1 within a host, 2 (p - 1) / p between p processes. `cores` are
    those that the processes may use together.
    """
    few, many, large = (times[name] for name in (sets.few, sets.many, sets.large))
    sizes = {name: sum(sets.tensors(name)) for name in sets.names}
    units = {name: sets.units(name) for name in sets.names}
    more_units = units[sets.many] - units[sets.few]
    unit_seconds = max((many.seconds - few.seconds) / more_units, LEAST_SECONDS)
    longer = max(large.seconds - few.seconds, LEAST_SECONDS)
    busy = (large.processor_seconds - few.processor_seconds) / longer / cores
    in_units = unit_seconds * (units[sets.large] - units[sets.few])
    by_bytes = max(longer - in_units, LEAST_SECONDS)
    more_bytes = sizes[sets.large] - sizes[sets.few]
    return Link(
        latency_seconds=unit_seconds / rounds,
        bytes_per_second=bytes_of_work * more_bytes / by_bytes,
        compute_share=min(max(busy, 0.0), 1.0),
    )
