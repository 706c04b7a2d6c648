"""What `tfdp measure` has found out about a machine, as values."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import replaced
from tfdp.files.checked_json import checksum_of, parse_json, with_checksum
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.lossy import KNOWN_WAYS, Lossy, known_ways
from tfdp.tools.simulator.machine import Link, Machine, at_least_zero, positive, whole
from tfdp.tools.simulator.model import Compute, Gradient, ModelProfile
from tfdp.tools.simulator.step import Training

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


# A measured machine as a file: JSON with a checksum, read as a stranger's.


# 2: a host's `bytes_per_second` are read and written ones; they were added ones.
KIND, VERSION = "tfdp measured machine", 2
MOST_BYTES = 64 << 20
LINK_FIELDS = ("latency_seconds", "bytes_per_second", "compute_share")


def write_machine(machine: MeasuredMachine, path: str | os.PathLike[str]) -> Path:
    """Writes `machine` to `path`, which a reader never meets half written.

    Raises:
      OSError: the folder is not there, or cannot be written to.
    """
    content = {
        "kind": KIND,
        "version": VERSION,
        "name": machine.name,
        "measured": machine.measured,
        "cores": machine.cores,
        "load": machine.load,
        "link": machine.link,
        "within_host": _link_content(machine.within_host),
        "within_host_of": [
            [replicas, _link_content(link)]
            for replicas, link in machine.within_host_of.items()
        ],
        "between_hosts": _link_content(machine.between_hosts),
        "coding": machine.coding,
        "row_bytes_per_second": machine.row_bytes_per_second,
        "models": [_model_content(model) for model in machine.models.values()],
    }
    with replaced(path) as half_written:
        half_written.write_text(with_checksum(content), "utf-8")
    return Path(path)


def read_machine(path: str | os.PathLike[str]) -> MeasuredMachine:
    """What `write_machine` wrote.

    Raises:
      DataError: the file is missing, too large, damaged, no such file, of another
        version, or holds what means nothing.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). `tfdp measure --output "
            f"{path}` writes one."
        ) from error
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        content = parse_json(text)
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ValueError("it is no file of `tfdp measure`")
        if content.get("version") is True or content.get("version") != VERSION:
            raise ValueError(
                f"its version is {content.get('version')!r}, this reads {VERSION}"
            )
        if content.get("checksum") != checksum_of(content):
            raise ValueError("it was changed or damaged: its checksum is another one")
        return _machine_of(content)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        reason = f"{error}" if isinstance(error, ValueError) else f"{error!r}"
        raise DataError(
            f"{path}: {reason[:300].rstrip('.')}. Measure again: `tfdp measure "
            f"--output {path}`."
        ) from None


def _machine_of(content: dict[str, Any]) -> MeasuredMachine:
    models = [_model_of(each) for each in _list(content["models"], "models")]
    return MeasuredMachine(
        name=_text(content["name"], "name"),
        cores=content["cores"],
        within_host=_link_of(content["within_host"]),
        between_hosts=_link_of(content["between_hosts"]),
        link=_text(content["link"], "link"),
        models={model.profile.name: model for model in models},
        load=content["load"],
        measured=_text(content["measured"], "measured"),
        # Files from before there were any have none.
        coding=_object(content.get("coding", {}), "coding"),
        row_bytes_per_second=content.get("row_bytes_per_second", ROW_BYTES_PER_SECOND),
        within_host_of={
            replicas: _link_of(link)
            for replicas, link in _list(content.get("within_host_of", []), "links")
        },
    )


def _link_content(link: Link) -> dict[str, float]:
    return {field: getattr(link, field) for field in LINK_FIELDS}


def _link_of(content: Any) -> Link:
    if not isinstance(content, dict) or set(content) != set(LINK_FIELDS):
        raise ConfigurationError(f"a link must have {', '.join(LINK_FIELDS)}")
    return Link(**content)


def _model_content(model: MeasuredModel) -> dict[str, Any]:
    profile = model.profile
    return {
        "name": profile.name,
        "samples": model.samples,
        "forward_flops_per_sample": profile.forward_flops_per_sample,
        "gradients": [_gradient_content(each) for each in profile.gradients],
        "step_seconds": [[*place, s] for place, s in model.step_seconds.items()],
    }


def _gradient_content(gradient: Gradient) -> list[Any]:
    fields = list(dataclasses.astuple(gradient))
    return fields if gradient.row_bytes else fields[:3]


def _model_of(content: Any) -> MeasuredModel:
    if not isinstance(content, dict):
        raise ConfigurationError("a model must be an object")
    gradients = []
    for said in _list(content["gradients"], "gradients"):
        size_bytes, work, dtype, *rows = _list(said, "a gradient")
        gradients.append(Gradient(size_bytes, work, _text(dtype, "dtype"), *rows))
    seconds = {}
    for processes, replicas, step in _list(content["step_seconds"], "step_seconds"):
        seconds[processes, replicas] = step
    profile = ModelProfile(
        _text(content["name"], "a model's name"),
        tuple(gradients),
        content["forward_flops_per_sample"],
    )
    return MeasuredModel(profile, content["samples"], seconds)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigurationError(f"{name} must be a list")
    return value


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} must be an object")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise ConfigurationError(f"{name} must be a text of at most 200 characters")
    return value
