"""Measures a machine: models' steps without sums, and sums without models."""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.cluster.machine import describe_machine, usable_cores
from tfdp.tools.bench.processes.two_hosts import two_hosts
from tfdp.tools.bench.request import Request
from tfdp.tools.measuring.link_fit import (
    BETWEEN_SETS,
    WITHIN_SETS,
    SumSets,
    SumTimes,
    fit_link,
)
from tfdp.tools.measuring.one_core import measure_coding, measure_rows
from tfdp.tools.measuring.places import Figures, Place, measure_place
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.measured import MeasuredMachine, MeasuredModel
from tfdp.tools.simulator.model import Gradient, ModelProfile
from tfdp.tools.simulator.sums import moved_in_process

__all__ = [
    "CASES_OF_MODELS",
    "LOOPBACK",
    "PLACES",
    "link_of",
    "measure_link",
    "measure_machine",
    "profile_from",
    "sums_for_link",
]

LOOPBACK = "loopback"
PLACES = tuple(Place(*each) for each in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2)))
#: Model -> the case that says how many calls make a figure.
CASES_OF_MODELS = {
    "mlp-20m": "train-mlp",
    "cnn-1m": "train-cnn",
    "resnet20": "train-mlp",
    "words-13m": "train-words",
    "transformer-1m": "train-mlp",
    "mlp-tiny": "train-mlp",
    "cnn-tiny": "train-cnn",
    "resnet-tiny": "train-cnn",
    "words-tiny": "train-words",
    "transformer-tiny": "train-mlp",
}
SUM_CASE = "allreduce-resnet50"
WITHIN, BETWEEN = Place(1, 2), Place(2, 1)
# Of 102 MB in eight ways; they differ by a few hundredths.
MOST_CODINGS = 5


def measure_machine(
    models: Sequence[str],
    places: Sequence[Place],
    *,
    link: str = LOOPBACK,
    repeats: int,
    quick: bool,
    timeout_seconds: float,
    say: Callable[[str], None] = lambda line: None,
    others: Sequence[MeasuredModel] = (),
) -> MeasuredMachine:
    """What the simulator needs to know of this machine.

    Args:
      models: keys of CASES_OF_MODELS.
      places: where each model's step is measured; 1 x 1 first.
      link: between two processes: LOOPBACK, or a rate in the words of `tc`, which
        needs root.
      repeats: figures of each arm; their medians count.
      quick: two calls for each figure, which shows that it runs.
      timeout_seconds: the most that the processes of one arm may take.
      say: told what is going on.
      others: models that were measured before.

    Raises:
      CollectiveError: an arm failed; with its last lines.
      DeviceError: the link cannot be made here.
    """
    load, cores = os.getloadavg()[0], usable_cores()
    of_one = {place.replicas for place in places if place.processes == 1}
    within = {}
    for replicas in sorted({WITHIN.replicas, *of_one} - {1}):
        say(f"sums of {replicas} replicas within one process")
        place = Place(1, replicas)
        within[replicas] = measure_link(
            place, LOOPBACK, cores, repeats, quick, timeout_seconds
        )
    say(f"sums between two processes, {link}")
    between = measure_link(BETWEEN, link, cores, repeats, quick, timeout_seconds)
    say("how fast a core makes gradients small")
    coding = measure_coding(min(repeats, MOST_CODINGS), quick, timeout_seconds)
    say("how fast a core adds rows of a table")
    rows = measure_rows(repeats, quick, timeout_seconds)
    measured = {}
    for name in models:
        seconds, profile, samples = {}, None, 1
        for place in places:
            say(f"{name} in {place} without sums")
            request = place.request(CASES_OF_MODELS[name], name, repeats, quick)
            (figures,) = measure_place([(place.without_sums, request)], timeout_seconds)
            seconds[place.processes, place.replicas] = statistics.median(
                figures.seconds
            )
            profile = profile or profile_from(name, figures)
            samples = figures.facts["profile"]["local_batch"]
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
    place: Place,
    link: str,
    cores: int,
    repeats: int,
    quick: bool,
    timeout_seconds: float,
) -> Link:
    """The link of a place: between the replicas of one process, or two processes.

    Several processes stay on a core each, where there are as many, and what sums take
    is a part of these.

    Raises:
      CollectiveError, DeviceError: as `measure_machine`.
    """
    with contextlib.ExitStack() as stack:
        is_shaped = link != LOOPBACK
        hosts = stack.enter_context(two_hosts(link)) if is_shaped else None
        wanted = sums_for_link(place, repeats, quick)
        return link_of(place, measure_place(wanted, timeout_seconds, hosts), cores)


def sums_for_link(place: Place, repeats: int, quick: bool) -> list[tuple[str, Request]]:
    """The arms that `link_of` needs the figures of."""
    return [
        (place.arm, place.request(SUM_CASE, name, repeats, quick))
        for name in _sets(place).names
    ]


def link_of(place: Place, found: Sequence[Figures], cores: int) -> Link:
    """The link of a place.

    Args:
      place: one process, or several with one replica each.
      found: of the arms of `sums_for_link`.
      cores: that are usable here.
    """
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
    # Each has one to itself, where there are as many.
    cores = min(cores, place.processes)
    moved_bytes = 2 * hops / place.processes
    return fit_link(sets, times, moved_bytes, rounds=2 * hops, cores=cores)


def _sets(place: Place) -> SumSets:
    return WITHIN_SETS if place.processes == 1 else BETWEEN_SETS


def profile_from(name: str, figures: Figures) -> ModelProfile:
    """The model as the process that trained it has described it."""
    said: dict[str, Any] = figures.facts["profile"]
    return ModelProfile(
        name,
        tuple(Gradient(*each) for each in said["gradients"]),
        said["forward_flops_per_sample"],
    )
