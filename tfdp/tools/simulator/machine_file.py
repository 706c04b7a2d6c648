"""A measured machine as a file: JSON with a checksum, read as a stranger's."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import replaced
from tfdp.files.checked_json import checksum_of, parse_json, with_checksum
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.measured import (
    ROW_BYTES_PER_SECOND,
    MeasuredMachine,
    MeasuredModel,
)
from tfdp.tools.simulator.model import Gradient, ModelProfile

__all__ = ["read_machine", "write_machine"]

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
