"""What `tfdp measure` has found out about a machine, as values."""

from __future__ import annotations

import dataclasses
import math

from tfdp.errors import ConfigurationError
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.checked import at_least_zero, positive, whole
from tfdp.tools.simulator.lossy import KNOWN_WAYS, Lossy, known_ways
from tfdp.tools.simulator.machine import Link, Machine
from tfdp.tools.simulator.model import Compute, ModelProfile
from tfdp.tools.simulator.step import Training

__all__ = ["ROW_BYTES_PER_SECOND", "MeasuredMachine", "MeasuredModel"]

MOST_PLACES = 4096
# Where it was not measured: `tfdp.exchange.sparse.merge_rows` on one thread of a
# virtual x86 machine, processor time, 2026-11-23: 1.95, 1.88 and 1.85 for 20, 41 and
# 82 thousand rows of 256 bytes, a quarter to a fifth of them unlike.
ROW_BYTES_PER_SECOND = 1.9e9


@dataclasses.dataclass(frozen=True)
class MeasuredModel:
    """A model's steps without any exchange.

    Args:
      profile: its gradients.
      samples: the local batch that was measured.
      step_seconds: (processes, replicas of each) on this machine -> seconds of a step
        while all of them train and none sends anything; 1 x 1 is always among them.

    Raises:
      ConfigurationError: a number means nothing, or 1 x 1 is missing.
    """

    profile: ModelProfile
    samples: int
    step_seconds: dict[tuple[int, int], float]

    def __post_init__(self) -> None:
        whole("MeasuredModel", "samples", self.samples)
        whole("MeasuredModel", "step_seconds", len(self.step_seconds), 1, MOST_PLACES)
        for (processes, replicas), seconds in self.step_seconds.items():
            whole("MeasuredModel", "processes", processes, 1, MOST_PLACES)
            whole("MeasuredModel", "replicas", replicas, 1, MOST_PLACES)
            positive("MeasuredModel", f"seconds of {processes}x{replicas}", seconds)
        if (1, 1) not in self.step_seconds:
            raise ConfigurationError(
                f"The model {self.profile.name!r} has no step of one replica alone "
                "(1x1): measure the machine again, by `tfdp measure`."
            )


@dataclasses.dataclass(frozen=True)
class MeasuredMachine:
    """A machine as a host of others that are like it.

    Args:
      name: of it.
      cores: that its processes may use, at least 1.
      within_host: `bytes_per_second` of additions by all replicas of a host together,
        where these are two.
      between_hosts: between two processes, or over the link that was measured.
      link: what that link is: "loopback", or a rate.
      models: by name.
      load: of the machine while it was measured, at least 0.
      measured: when, for people.
      coding: bytes of gradients a second that a core makes small and reads, by the
        names of `lossy.KNOWN_WAYS`; those that were not measured are missing.
      row_bytes_per_second: of rows of tables, that a core joins and adds by their
        places.
      within_host_of: replicas of a host -> what `within_host` is for so many; those
        that were not measured are missing.
    """

    name: str
    cores: int
    within_host: Link
    between_hosts: Link
    link: str
    models: dict[str, MeasuredModel]
    load: float = 0.0
    measured: str = ""
    coding: dict[str, float] = dataclasses.field(default_factory=dict)
    row_bytes_per_second: float = ROW_BYTES_PER_SECOND
    within_host_of: dict[int, Link] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        whole("MeasuredMachine", "cores", self.cores, 1, 1 << 20)
        for replicas in self.within_host_of:
            whole("MeasuredMachine", "replicas of a host", replicas, 2, MOST_PLACES)
        rate = self.row_bytes_per_second
        positive("MeasuredMachine", "row_bytes_per_second", rate)
        at_least_zero("MeasuredMachine", "load", self.load)
        for name, rate in self.coding.items():
            if name not in KNOWN_WAYS:
                raise ConfigurationError(
                    f"MeasuredMachine: coding must be of {', '.join(KNOWN_WAYS)}. "
                    f"Received: {name!r}."
                )
            positive("MeasuredMachine", f"coding of {name}", rate)

    def lossy(self, name: str) -> Lossy:
        """A way to send fewer bytes, coded by one core of such a host.

        Raises:
          ConfigurationError: there is no such way.
        """
        ways = known_ways(self.coding)
        if name not in ways:
            raise ConfigurationError(
                f"lossy must be one of {', '.join(ways)}. Received: {name!r}."
            )
        return dataclasses.replace(ways[name], compute_share=1 / self.cores)

    def model(self, name: str) -> MeasuredModel:
        """A model by its name.

        Raises:
          ConfigurationError: it was not measured.
        """
        if name not in self.models:
            raise ConfigurationError(
                f"The model {name!r} was not measured on {self.name!r}. Measured: "
                f"{', '.join(sorted(self.models)) or 'none'}."
            )
        return self.models[name]

    def within(self, replicas: int) -> Link:
        """What joins so many replicas of a host, or the nearest number measured."""
        links = {2: self.within_host, **self.within_host_of}
        return links[min(links, key=lambda n: (abs(math.log(n / replicas)), -n))]

    def machine(self, devices_per_host: int) -> Machine:
        """Hosts like this one, with so many replicas each."""
        # What is measured of a sum holds its launch.
        return Machine(
            self.name,
            devices_per_host,
            self.within(devices_per_host),
            self.between_hosts,
            launch_seconds=1e-9,
            source=f"tfdp measure, {self.measured}",
            row_bytes_per_second=self.row_bytes_per_second,
        )

    def machine_here(self, topology: Topology) -> Machine:
        """So many processes on this one machine, which share its cores.

        What replicas add within a process was measured with all cores, of which each
        replica keeps one busy. Of several processes each has one core, or its part of
        fewer: so does `tfdp bench`.

        Args:
          topology: `hosts` processes of `devices_per_host` replicas each.
        """
        here = self.machine(topology.devices_per_host)
        if topology.hosts == 1:
            return here
        measured = here.within_host
        mine = min(1.0, self.cores / topology.hosts)
        # Processor time tells too few where they wait for memory, which all processes
        # of the machine share, too.
        wanted = max(
            measured.compute_share * self.cores,
            float(min(topology.devices_per_host, self.cores)),
        )
        within = dataclasses.replace(
            measured,
            # With fewer cores than it kept busy it is slower, and leaves none. What a
            # tensor costs besides its bytes is waiting.
            bytes_per_second=measured.bytes_per_second / max(wanted / mine, 1.0),
            compute_share=min(wanted / mine, 1.0),
        )
        return dataclasses.replace(here, within_host=within)

    def training(self, model_name: str, devices_per_host: int) -> Training:
        """That model's training on such hosts, each with a machine of its own.

        Raises:
          ConfigurationError: the model was not measured.
        """
        model = self.model(model_name)
        alone = model.step_seconds[1, 1]
        sharing = tuple(
            # On a busy machine two may seem to be faster than one.
            (replicas, max(seconds / alone, 1.0))
            for (processes, replicas), seconds in sorted(model.step_seconds.items())
            if processes == 1
        )
        return Training(
            model.profile,
            Compute.from_seconds(alone, model.samples),
            self.machine(devices_per_host),
            algorithm="sockets",
            sharing=sharing,
        )

    def training_here(self, model_name: str, topology: Topology) -> Training:
        """That model's training by so many processes, all on this one machine.

        Args:
          model_name: of it.
          topology: `hosts` processes of `devices_per_host` replicas each.

        Raises:
          ConfigurationError: the model was not measured, or not in that many places.
        """
        model = self.model(model_name)
        place = (topology.hosts, topology.devices_per_host)
        if place not in model.step_seconds:
            found = ", ".join(f"{p}x{r}" for p, r in sorted(model.step_seconds))
            raise ConfigurationError(
                f"{model_name!r} was not measured in {place[0]} processes of "
                f"{place[1]} replicas; measured: {found}."
            )
        seconds = model.step_seconds[place]
        alone = min(model.step_seconds[1, 1], seconds)
        return dataclasses.replace(
            self.training(model_name, topology.devices_per_host),
            compute=Compute.from_seconds(alone, model.samples),
            machine=self.machine_here(topology),
            sharing=((topology.devices_per_host, seconds / alone),),
        )
