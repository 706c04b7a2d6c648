"""The result of `tfdp measure`: as values, as simulator input, and as a file."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from tfdp.checks import check_one_of
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import replaced
from tfdp.files.checked_json import checksum_of, parse_json, with_checksum
from tfdp.tools.simulator.lossy import KNOWN_WAYS, Lossy
from tfdp.tools.simulator.machine import Link, Machine, at_least_zero, positive, whole
from tfdp.tools.simulator.model import Compute, ModelProfile
from tfdp.tools.simulator.step import Training

MOST_PLACES = 4096
# Default: `tfdp.exchange.sparse.merge_rows` on one thread of a virtual x86 machine,
# processor time, 2026-11-23: 1.95, 1.88 and 1.85 for 20, 41 and 82 thousand rows of 256
# bytes, a quarter to a fifth of them distinct.
ROW_BYTES_PER_SECOND = 1.9e9


@dataclasses.dataclass(frozen=True)
class MeasuredModel:
    """Steps of a model without any exchange; `samples` is the local batch.

    `step_seconds`: (processes, replicas of each) on this machine -> seconds of a step
    while all train and none sends anything; 1 x 1 is required.
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
                "(1x1): measure the machine again with `tfdp measure`."
            )


@dataclasses.dataclass(frozen=True)
class MeasuredMachine:
    """A measured machine, as one host of a cluster of identical ones.

    Args:
      cores: usable by its processes.
      within_host: for two replicas; `bytes_per_second` of all replicas' additions.
      between_hosts, link: between two processes; "loopback", or the rate of a link.
      models: by name.
      load, measured: of the machine while it was measured; date and time.
      coding: bytes of gradients a second that a core compresses and decompresses, by
        the measured names of `lossy.KNOWN_WAYS`.
      row_bytes_per_second: of table rows that a core joins and sums by index.
      within_host_of: replicas of a host -> `within_host` measured for so many.
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
            check_one_of("MeasuredMachine: coding", name, KNOWN_WAYS)
            positive("MeasuredMachine", f"coding of {name}", rate)

    def lossy(self, name: str) -> Lossy:
        """A compression coded by one core of this host."""
        check_one_of("lossy", name, KNOWN_WAYS)
        way = KNOWN_WAYS[name]
        rate = self.coding.get(name, way.bytes_per_second)
        share = 1 / self.cores
        return dataclasses.replace(way, bytes_per_second=rate, compute_share=share)

    def model(self, name: str) -> MeasuredModel:
        """A model by its name; ConfigurationError if it was not measured."""
        if name not in self.models:
            raise ConfigurationError(
                f"The model {name!r} was not measured on {self.name!r}. Measured: "
                f"{', '.join(sorted(self.models)) or 'none'}."
            )
        return self.models[name]

    def within(self, replicas: int) -> Link:
        """The link of that many replicas, or of the nearest number measured."""
        links = {2: self.within_host, **self.within_host_of}
        return links[min(links, key=lambda n: (abs(math.log(n / replicas)), -n))]

    def machine(self, devices_per_host: int) -> Machine:
        """A cluster of hosts like this one, with that many replicas each."""
        # The measured latency of a sum includes its launch.
        return Machine(
            self.name,
            devices_per_host,
            self.within(devices_per_host),
            self.between_hosts,
            launch_seconds=1e-9,
            source=f"tfdp measure, {self.measured}",
            row_bytes_per_second=self.row_bytes_per_second,
        )

    def training(self, model_name: str, devices_per_host: int) -> Training:
        """Training of a measured model on separate hosts like this one."""
        model = self.model(model_name)
        alone = model.step_seconds[1, 1]
        sharing = tuple(
            # Under load two replicas may appear to be faster than one.
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


# The file: JSON with a checksum, validated as untrusted input. Version 2: a host's
# `bytes_per_second` count bytes read and written; version 1 counted bytes added.
KIND, VERSION = "tfdp measured machine", 2
MOST_BYTES = 64 << 20
LINK_FIELDS = ("latency_seconds", "bytes_per_second", "compute_share")


def write_machine(machine: MeasuredMachine, path: str | os.PathLike[str]) -> Path:
    """Writes `machine` to `path`, atomically."""
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
    """Reads a file of `write_machine`.

    Raises DataError if it is missing, too large, damaged, of another kind or version,
    or holds a value out of range.
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
            raise ValueError("it was changed or damaged: its checksum differs")
        return _machine_of(content)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        reason = f"{error}" if isinstance(error, ValueError) else f"{error!r}"
        raise DataError(
            f"{path}: {reason[:300].rstrip('.')}. Measure again: `tfdp measure "
            f"--output {path}`."
        ) from None


def _machine_of(content: dict[str, Any]) -> MeasuredMachine:
    if not isinstance(content["models"], list):
        raise ConfigurationError("models must be a list")
    models = [_model_of(each) for each in content["models"]]
    return MeasuredMachine(
        name=_text(content["name"], "name"),
        cores=content["cores"],
        within_host=_link_of(content["within_host"]),
        between_hosts=_link_of(content["between_hosts"]),
        link=_text(content["link"], "link"),
        models={model.profile.name: model for model in models},
        load=content["load"],
        measured=_text(content["measured"], "measured"),
        # Optional in older files.
        coding=content.get("coding", {}),
        row_bytes_per_second=content.get("row_bytes_per_second", ROW_BYTES_PER_SECOND),
        within_host_of={
            replicas: _link_of(link)
            for replicas, link in content.get("within_host_of", [])
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
        "gradients": [
            # Rows only where there are any: the last three fields.
            list(dataclasses.astuple(each)[: 6 if each.row_bytes else 3])
            for each in profile.gradients
        ],
        "step_seconds": [[*place, s] for place, s in model.step_seconds.items()],
    }


def _model_of(content: Any) -> MeasuredModel:
    steps = content["step_seconds"]
    seconds = {(processes, replicas): step for processes, replicas, step in steps}
    profile = ModelProfile.from_plain(_text(content["name"], "a model's name"), content)
    return MeasuredModel(profile, content["samples"], seconds)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise ConfigurationError(f"{name} must be a text of at most 200 characters")
    return value
