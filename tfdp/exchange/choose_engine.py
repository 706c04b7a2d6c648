"""Which engine suits which devices, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp.exchange.in_process import InProcess
from tfdp.exchange.transport import Transport
from tfdp.plan.communication import Communication
from tfdp.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """An engine's name, the implementation of TensorFlow's collectives, and why."""

    name: str
    hint: str
    #: One sentence for `tfdp info`.
    reason: str


def choose_engine(devices: Sequence[str], communication: Communication) -> EngineChoice:
    """The engine that `communication` names; "auto": the one that suits `devices`."""
    kinds = {tf.DeviceSpec.from_string(device).device_type for device in devices}
    split_gpus = gpus_are_split()
    nccl = kinds == {"GPU"} and not split_gpus
    hint = "nccl" if nccl else "ring"
    if communication.engine != "auto":
        return EngineChoice(communication.engine, hint, "requested by name")
    if nccl and len(devices) > 1:
        return EngineChoice(
            "tensorflow", hint, "physical GPUs: packed buckets over NCCL"
        )
    if len(devices) == 1:
        return EngineChoice("in_process", hint, "one replica: nothing to exchange")
    if kinds == {"CPU"}:
        reason = "logical CPUs share memory: tensors are handed over without copies"
    elif split_gpus:
        reason = "logical GPUs share a GPU, which NCCL does not allow"
    else:
        reason = "mixed device types, which NCCL does not join"
    return EngineChoice("in_process", hint, reason)


def gpus_are_split() -> bool:
    """Whether a visible GPU is split into logical ones. TensorFlow does not start."""
    gpus = tf.config.get_visible_devices("GPU")
    parts = [tf.config.get_logical_device_configuration(gpu) for gpu in gpus]
    return any(part is not None and len(part) > 1 for part in parts)


def make_transport(
    devices: Sequence[str], topology: Topology, communication: Communication
) -> Transport:
    """The transport of `choose_engine`, set up for `devices` and `topology`."""
    choice = choose_engine(devices, communication)
    if choice.name == "in_process":
        return InProcess(devices, topology)
    from tfdp.exchange.collectives import Collectives

    return Collectives(devices, topology, hint=choice.hint)
