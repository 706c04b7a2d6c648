"""Which engine GPUs get, by TensorFlow's settings; there is no GPU here."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

import tfdp
from tfdp.exchange.choose_engine import choose_engine
from tfdp.strategies import connect_hosts

GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(4)]


def pretend(monkeypatch, visible, parts):
    """Four GPUs, of which `visible` are seen, each cut into so many `parts`."""
    piece = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
    logical = [
        tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU")
        for i in range(len(visible) * parts)
    ]
    answers = {
        "list_physical_devices": lambda kind=None: GPUS,
        "get_visible_devices": lambda kind=None: visible,
        "list_logical_devices": lambda kind=None: logical,
        # TensorFlow's answer for a device that nobody has set up is None.
        "get_logical_device_configuration": lambda gpu: (
            [piece] * parts if parts > 1 else None
        ),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(tf.config, name, answer)
    return [device.name for device in logical]


@pytest.mark.parametrize(
    "visible, parts, name, hint",
    [
        (GPUS, 1, "tensorflow", "nccl"),
        (GPUS[:2], 1, "tensorflow", "nccl"),
        # Fewer logical ones than the machine has, and yet two on one GPU.
        (GPUS[:1], 2, "in_process", "ring"),
        (GPUS, 2, "in_process", "ring"),
    ],
)
def test_logical_gpus_that_share_one_are_not_given_to_nccl(
    monkeypatch, visible, parts, name, hint
):
    devices = pretend(monkeypatch, visible, parts)
    choice = choose_engine(devices, tfdp.Communication())
    assert (choice.name, choice.hint) == (name, hint)
    assert ("share a GPU" in choice.reason) == (parts > 1)
    # Several hosts ask the same.
    assert ("share a GPU" in connect_hosts._why_not_here("")) == (parts > 1)


@pytest.mark.parametrize(
    "others, visible, reasons",
    [
        (["GPU-a", "GPU-b\nGPU-d"], [0, 1], {}),
        (
            ["GPU-a", "GPU-c\nGPU-a"],
            [0],
            {1: "GPU-a is also worker 0's GPU", 2: "GPU-c is also worker 1's GPU"},
        ),
        # A program may have hidden all but its own from TensorFlow, not from CUDA.
        (["GPU-d", "GPU-a"], [1], {}),
        # Without nvidia-smi, and of one that sends what is no name.
        (["", "\xff"], [0, 1, 7], {}),
    ],
)
def test_gpus_that_workers_share_are_not_given_to_nccl(
    monkeypatch, others, visible, reasons
):
    class Link:
        def gather(self, blob, label, most_bytes):
            assert len(blob) <= most_bytes
            return [*(each.encode("latin-1") for each in others), blob]

    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{n}") for n in visible]
    monkeypatch.setattr(connect_hosts, "local_gpus", lambda: gpus)
    monkeypatch.setattr(
        connect_hosts, "gpu_names", lambda environment: ["GPU-c", "GPU-e"]
    )
    found = connect_hosts._shared_gpus(Link())
    assert found.keys() == reasons.keys()
    for rank, words in reasons.items():
        assert words in found[rank] and "NCCL refuses" in found[rank]
