"""Measures steps and sums, and predicts them beside it by the simulator.

A prediction knows the model's step without sums, from arms that take turns with those
that are predicted, and the links' figures, from sums of other sizes: of a step from
those before, of a sum alone on one machine from those just before it or in turn with
it, since the cores and the memory of a machine are not the same all day. It knows
nothing of the step, or the sum, that it predicts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.bench.results import spread
from benchmarks.shared import Load, make_parser, run_script, write_report
from tfdp.cluster.machine import usable_cores
from tfdp.errors import CollectiveError, ConfigurationError, DeviceError
from tfdp.plan.topology import Topology
from tfdp.tools.measuring.machine import (
    BETWEEN,
    LOOPBACK,
    QUICK_CALLS,
    SUMS_OF_A_FIGURE,
    WITHIN,
    link_of,
    measure_link,
    sums_for_link,
)
from tfdp.tools.measuring.models import MODELS as TIMED_MODELS
from tfdp.tools.measuring.one_core import measure_rows
from tfdp.tools.measuring.places import Arrangement, Figures, Work, measure_place
from tfdp.tools.measuring.two_hosts import two_hosts
from tfdp.tools.simulator.known import MODELS as KNOWN_MODELS
from tfdp.tools.simulator.machine import Link, Machine
from tfdp.tools.simulator.measured import MeasuredMachine, MeasuredModel
from tfdp.tools.simulator.model import Compute, ModelProfile
from tfdp.tools.simulator.step import Training, predict_step, simulate_exchange

MODELS = ("cnn-1m", "mlp-20m", "resnet20", "transformer-1m", "words-13m")
QUICK_MODELS = ("mlp-tiny", "words-tiny")
ON_LOOPBACK: tuple[Arrangement, ...] = tuple(
    Arrangement(*each) for each in ((1, 2), (1, 4), (2, 1), (2, 2))
)
QUICK_PLACES: tuple[Arrangement, ...] = (Arrangement(2, 1),)
ON_LINKS: tuple[Arrangement, ...] = (Arrangement(2, 1), Arrangement(2, 2))
SUM_SUBJECT = "resnet50"
COLUMNS = "{:<10} {:>5} {:>9} {:>12} {:>24} {:>10} {:>7}"
TITLES = (
    "subject",
    "place",
    "link",
    "no sums, ms",
    "measured, ms",
    "predicted",
    "off by",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One prediction beside what was measured; seconds.

    Args:
      subject: the model, or the sum.
      place: processes x replicas.
      link: between two processes.
      without_sums: of a step, median; 0 for a sum alone.
      measured: each figure.
      predicted: by the simulator, for each of them, from the step without sums that was
        timed just before or after it.
    """

    subject: str
    place: str
    link: str
    without_sums: float
    measured: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median of predicted / measured, of neighbours in time, less 1."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return statistics.median(p / m for p, m in pairs) - 1


def run(options: argparse.Namespace) -> int:
    """Measures and predicts on every link; returns 1 where an arm failed."""
    runner = _Runner(options.repeats, options.quick, options.timeout_seconds)
    load = Load()
    print(COLUMNS.format(*TITLES), flush=True)
    for link in options.link_rates:
        try:
            runner.run(link)
        except (CollectiveError, DeviceError) as error:
            runner.failures.append(f"{link}: {error}")
    print("\n".join([*_summary(runner.rows), str(load)]))
    for failure in runner.failures:
        print(f"failed: {failure}")
    rows = [{**dataclasses.asdict(r), "error": r.error} for r in runner.rows]
    write_report(options.json, "prediction", load=load.figures, rows=rows)
    return 1 if runner.failures else 0


class _Runner:
    def __init__(self, repeats: int, quick: bool, timeout_seconds: float):
        self._repeats, self._quick = repeats, quick
        self._timeout_seconds = timeout_seconds
        self.rows: list[Row] = []
        self.failures: list[str] = []

    def run(self, link: str) -> None:
        """All rows of one link."""
        places = ON_LOOPBACK if link == LOOPBACK else ON_LINKS
        if self._quick:
            places = QUICK_PLACES
        machine = MeasuredMachine(
            "here",
            usable_cores(),
            self._within,
            self._link(BETWEEN, link),
            link,
            {},
            row_bytes_per_second=self._row_bytes_per_second,
            within_host_of={
                place.replicas: self._link(place, LOOPBACK)
                for place in places
                if place.processes == 1 and place != WITHIN
            },
        )
        for place in places:
            if not self._quick:
                self._try(self._sum_row, machine, place)
            for model in QUICK_MODELS if self._quick else MODELS:
                self._try(self._step_row, machine, place, model)

    @functools.cached_property
    def _within(self) -> Link:
        return self._link(WITHIN, LOOPBACK)

    @functools.cached_property
    def _row_bytes_per_second(self) -> float:
        return measure_rows(self._repeats, self._quick, self._timeout_seconds)

    def _link(self, place: Arrangement, link: str) -> Link:
        return measure_link(
            place,
            link,
            usable_cores(),
            self._repeats,
            self._timeout_seconds,
        )

    def _try(self, measure: Any, machine: MeasuredMachine, *arguments: Any) -> None:
        """One arm that fails does not keep the others from being measured."""
        try:
            row = measure(machine, *arguments)
        except CollectiveError as error:
            self.failures.append(f"{arguments}: {error}")
            return
        self.rows.append(row)
        print(_line(row), flush=True)

    def _measure(
        self, machine: MeasuredMachine, place: Arrangement, wanted: list[Work]
    ) -> list[Figures]:
        with contextlib.ExitStack() as stack:
            is_shaped = machine.link != LOOPBACK and place.processes > 1
            hosts = stack.enter_context(two_hosts(machine.link)) if is_shaped else None
            return measure_place(
                place, wanted, self._repeats, self._timeout_seconds, hosts
            )

    def _step_row(
        self, machine: MeasuredMachine, place: Arrangement, model: str
    ) -> Row:
        calls = QUICK_CALLS if self._quick else TIMED_MODELS[model].calls
        wanted = [Work("steps without sums", model, calls), Work("steps", model, calls)]
        alone, with_sums = self._measure(machine, place, wanted)
        said: dict[str, Any] = alone.profile or {}
        profile = ModelProfile.from_plain(model, said)
        samples = said["local_batch"]

        def predicted(seconds: float) -> float:
            steps = {(1, 1): seconds, (place.processes, place.replicas): seconds}
            found = MeasuredModel(profile, samples, steps)
            here = dataclasses.replace(machine, models={model: found})
            topology = Topology(place.processes, place.replicas)
            training = training_here(here, model, topology)
            return predict_step(training, topology.num_replicas).step_seconds

        return Row(
            model,
            str(place),
            machine.link if place.processes > 1 else "none",
            statistics.median(alone.seconds),
            tuple(with_sums.seconds),
            tuple(map(predicted, alone.seconds)),
        )

    def _sum_row(self, machine: MeasuredMachine, place: Arrangement) -> Row:
        """A sum of a large model's gradients, all of which are there at once."""
        links = _links_of(place) if machine.link == LOOPBACK else []
        for each in links:
            if each != place:
                machine = _with_link(machine, each, self._link(each, LOOPBACK))
        beside = sums_for_link(place) if place in links else []
        work = Work("sums", SUM_SUBJECT, SUMS_OF_A_FIGURE)
        *of_link, figures = self._measure(machine, place, [*beside, work])
        if beside:
            link = link_of(place, of_link, machine.cores)
            machine = _with_link(machine, place, link)
        topology = Topology(place.processes, place.replicas)
        training = Training(
            KNOWN_MODELS[SUM_SUBJECT](),
            Compute(1e-9, 1e-9),
            machine_here(machine, topology),
            algorithm="sockets",
        )
        played = simulate_exchange(training, topology)
        return Row(
            "sum 102 MB",
            str(place),
            machine.link if place.processes > 1 else "none",
            0.0,
            tuple(figures.seconds),
            (played,) * len(figures.seconds),
        )


def machine_here(measured: MeasuredMachine, topology: Topology) -> Machine:
    """Several processes on one measured machine, which share its cores.

    Sums within a process were measured with all cores, each replica using one. Of
    several processes each has one core, or its share of fewer, as in `tfdp measure`.
    `topology`: `hosts` processes of `devices_per_host` replicas.
    """
    here = measured.machine(topology.devices_per_host)
    if topology.hosts == 1:
        return here
    alone = here.within_host
    mine = min(1.0, measured.cores / topology.hosts)
    # Processor time underestimates where cores wait for memory, which all processes
    # of the machine share.
    wanted = max(
        alone.compute_share * measured.cores,
        float(min(topology.devices_per_host, measured.cores)),
    )
    within = dataclasses.replace(
        alone,
        # With fewer cores than it used it is slower and leaves none. The cost per
        # tensor is waiting, and stays.
        bytes_per_second=alone.bytes_per_second / max(wanted / mine, 1.0),
        compute_share=min(wanted / mine, 1.0),
    )
    return dataclasses.replace(here, within_host=within)


def training_here(measured: MeasuredMachine, name: str, topology: Topology) -> Training:
    """Training of a measured model by several processes on one measured machine.

    `topology`: `hosts` processes of `devices_per_host` replicas.
    """
    model = measured.model(name)
    place = (topology.hosts, topology.devices_per_host)
    if place not in model.step_seconds:
        found = ", ".join(f"{p}x{r}" for p, r in sorted(model.step_seconds))
        raise ConfigurationError(
            f"{name!r} was not measured in {place[0]} processes of "
            f"{place[1]} replicas; measured: {found}."
        )
    seconds = model.step_seconds[place]
    alone = min(model.step_seconds[1, 1], seconds)
    return dataclasses.replace(
        measured.training(name, topology.devices_per_host),
        compute=Compute.from_seconds(alone, model.samples),
        machine=machine_here(measured, topology),
        sharing=((topology.devices_per_host, seconds / alone),),
    )


def _links_of(place: Arrangement) -> list[Arrangement]:
    """Where the links are measured that a sum in `place` goes over."""
    within = [Arrangement(1, place.replicas)] if place.replicas > 1 else []
    return within + [BETWEEN] * (place.processes > 1)


def _with_link(
    machine: MeasuredMachine, place: Arrangement, link: Link
) -> MeasuredMachine:
    if place == BETWEEN:
        return dataclasses.replace(machine, between_hosts=link)
    return dataclasses.replace(machine, within_host=link, within_host_of={})


def _line(row: Row) -> str:
    of = spread([1000 * each for each in row.measured])
    return COLUMNS.format(
        row.subject,
        row.place,
        row.link,
        f"{1000 * row.without_sums:.1f}" if row.without_sums else "",
        f"{of.median:.1f} ({of.lower_quartile:.1f} .. {of.upper_quartile:.1f})",
        f"{1000 * statistics.median(row.predicted):.1f}",
        f"{100 * row.error:+.0f}%",
    )


def _summary(rows: Sequence[Row]) -> list[str]:
    found = []
    for name, chosen in (
        ("steps", [row for row in rows if row.without_sums]),
        ("sums", [row for row in rows if not row.without_sums]),
    ):
        if chosen:
            errors = [abs(row.error) for row in chosen]
            found.append(
                f"{len(chosen)} {name}: off by {100 * statistics.median(errors):.0f}% "
                f"in the median, {100 * max(errors):.0f}% at most"
            )
    return found


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=9)
    parser.add_argument(
        "--link-rates",
        nargs="+",
        default=[LOOPBACK],
        metavar="RATE",
        help="links between two processes: loopback, or a rate such as 1gbit, which "
        "needs root (default: loopback)",
    )
    run_script(parser, run)
