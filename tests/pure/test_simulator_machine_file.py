"""The file of `tfdp measure`: written and read again, and files of strangers."""

import dataclasses
import json

import pytest

from benchmarks.prediction import machine_here, training_here
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.checked_json import with_checksum
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.measured import (
    MeasuredMachine,
    MeasuredModel,
    read_machine,
    write_machine,
)
from tfdp.tools.simulator.model import GradientSize, ModelProfile
from tfdp.tools.simulator.step import predict_step

PROFILE = ModelProfile(
    "net", (GradientSize(4_000_000, 3.0), GradientSize(400, 1.0)), 12.0
)
MODEL = MeasuredModel(PROFILE, 64, {(1, 1): 0.1, (1, 2): 0.15, (2, 1): 0.11})
MACHINE = MeasuredMachine(
    "here",
    2,
    Link(1e-4, 8e9, compute_share=1.0),
    Link(2e-4, 2e9, compute_share=0.5),
    "loopback",
    {"net": MODEL},
    load=0.5,
    measured="2026-11-23",
)
SOME_LINK = {"latency_seconds": 1e-4, "bytes_per_second": 1e9, "compute_share": 0.5}


@pytest.fixture
def path(tmp_path):
    return write_machine(MACHINE, tmp_path / "machine.json")


def test_what_was_written_is_read(path):
    assert read_machine(path) == MACHINE
    rows = ModelProfile("words", (GradientSize(4000, 0.0, "float32", 72, True, 99),))
    models = {"words": MeasuredModel(rows, 8, {(1, 1): 0.1})}
    machine = dataclasses.replace(MACHINE, models=models)
    write_machine(machine, path)
    assert read_machine(path) == machine
    assert [entry.name for entry in path.parent.iterdir()] == ["machine.json"]


def test_as_many_replicas_have_a_link_of_their_own(path):
    of_four = dataclasses.replace(MACHINE.within_host, bytes_per_second=5e9)
    machine = dataclasses.replace(MACHINE, within_host_of={4: of_four})
    write_machine(machine, path)
    assert read_machine(path) == machine
    assert [machine.within(n).bytes_per_second for n in (1, 2, 3, 4, 8)] == [
        *(8e9, 8e9, 5e9, 5e9, 5e9),
    ]
    assert machine.machine(4).within_host == of_four
    # Two of a process share one core of two.
    assert machine_here(machine, Topology(2, 2)).within_host.rate == 4e9


def test_hosts_like_it_share_cores_as_it_does():
    training = MACHINE.training("net", devices_per_host=2)
    assert training.sharing_factor(1) == pytest.approx(1.0)
    assert training.sharing_factor(2) == pytest.approx(1.5)
    found = predict_step(training, 2)
    # 0.15 s of computing; two read and one written of 4 MB and of 400 bytes at 8 GB/s,
    # a latency of each on each replica, during which nobody computes.
    sums = 3 * 4_000_400 / 8e9 + 4 * 1e-4
    assert found.step_seconds == pytest.approx(0.15 + sums, rel=1e-6)


def test_processes_of_this_machine_share_its_cores():
    found = predict_step(training_here(MACHINE, "net", Topology(2, 1)), 2)
    assert found.part_seconds["compute"] == pytest.approx(0.1)
    assert found.part_seconds["sharing cores"] == pytest.approx(0.01)
    assert found.part_seconds["communication"] > 0


def test_each_of_two_processes_adds_on_a_core_of_its_own():
    here = machine_here(MACHINE, Topology(2, 2))
    assert here.within_host.rate == MACHINE.within_host.rate / 2
    # Each replica keeps a core busy, also where processor time tells of fewer.
    light = dataclasses.replace(MACHINE.within_host, compute_share=0.4)
    here = machine_here(dataclasses.replace(MACHINE, within_host=light), Topology(2, 2))
    assert here.within_host.compute_share == 1.0
    assert here.within_host.rate == light.rate / 2
    assert here.within_host.latency_seconds == light.latency_seconds
    here = machine_here(MACHINE, Topology(4, 2))
    assert here.within_host.compute_share == 1.0
    assert here.within_host.rate == MACHINE.within_host.rate / 4
    # Half of four cores were busy: of one of them it takes all, at half the rate.
    half = dataclasses.replace(MACHINE.within_host, compute_share=0.5)
    of_four = dataclasses.replace(MACHINE, cores=4, within_host=half)
    here = machine_here(of_four, Topology(2, 2))
    assert here.within_host.compute_share == 1.0
    assert here.within_host.rate == half.rate / 2
    assert machine_here(of_four, Topology(1, 2)).within_host == half
    assert here.between_hosts == MACHINE.between_hosts
    assert MACHINE.machine(2).within_host == MACHINE.within_host


def test_what_was_not_measured_is_refused():
    with pytest.raises(ConfigurationError, match="Measured: net"):
        MACHINE.training("other", 2)
    with pytest.raises(ConfigurationError, match="measured: 1x1, 1x2, 2x1"):
        training_here(MACHINE, "net", Topology(2, 2))
    with pytest.raises(ConfigurationError, match="1x1"):
        MeasuredModel(PROFILE, 64, {(2, 1): 0.1})


def changed(path, change):
    """The file with another content, and a checksum that fits."""
    found = json.loads(path.read_text("utf-8"))
    change(found)
    path.write_text(with_checksum(found), "utf-8")


def set_at(*place, value):
    def change(found):
        for key in place[:-1]:
            found = found[key]
        found[place[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_at("kind", value="other"),
        set_at("version", value=1),
        set_at("version", value=True),
        set_at("cores", value=0),
        set_at("cores", value=1.5),
        set_at("load", value="high"),
        set_at("load", value=float("nan")),
        set_at("name", value=7),
        set_at("name", value="a\x1b[2J"),
        set_at("name", value="x" * 300),
        set_at("within_host", value=[]),
        set_at("within_host", "bytes_per_second", value=float("inf")),
        set_at("within_host", "bytes_per_second", value=-1),
        set_at("within_host", "compute_share", value=2),
        set_at("within_host", "more", value=1),
        set_at("within_host_of", value=3),
        set_at("within_host_of", value=[[4, 3]]),
        set_at("within_host_of", value=[4]),
        set_at("within_host_of", value=[[1, SOME_LINK]]),
        set_at("within_host_of", value=[["4", SOME_LINK]]),
        set_at("within_host_of", value=[[[], SOME_LINK]]),
        set_at("between_hosts", "latency_seconds", value=None),
        set_at("between_hosts", "latency_seconds", value=10**400),
        set_at("models", value={}),
        set_at("models", value=[3]),
        set_at("models", 0, "gradients", value=[]),
        set_at("models", 0, "gradients", value=[[1]]),
        set_at("models", 0, "gradients", value=[[-1, 2, "float32"]]),
        set_at("models", 0, "gradients", value=[[1, 2, None]]),
        set_at("models", 0, "gradients", value=3),
        set_at("models", 0, "gradients", value=[[1, 2, "float32", -1]]),
        set_at("models", 0, "gradients", value=[[1, 2, "float32", 4, "yes"]]),
        set_at("models", 0, "gradients", value=[[1, 2, "float32", 4, True, 1, 1]]),
        set_at("models", 0, "gradients", value=[[1, 2, "float32", 4, True, -1]]),
        set_at("models", 0, "samples", value=0),
        set_at("models", 0, "step_seconds", value=[]),
        set_at("models", 0, "step_seconds", value=[[1, 1, 0]]),
        set_at("models", 0, "step_seconds", value=[[1, 2, 1.0]]),
        set_at("models", 0, "step_seconds", value=[[[], 2, 1.0]]),
        lambda found: found.pop("models"),
        lambda found: found["models"][0].pop("samples"),
    ],
)
def test_what_means_nothing_is_refused_with_its_path(path, change):
    changed(path, change)
    with pytest.raises(DataError, match="machine.json"):
        read_machine(path)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"kind": 1}']
)
def test_other_files_are_refused(path, text):
    path.write_bytes(text)
    with pytest.raises(DataError, match="tfdp measure --output"):
        read_machine(path)


def test_a_changed_digit_is_seen(path):
    text = path.read_text("utf-8")
    path.write_text(text.replace("4000000", "4000001"), "utf-8")
    with pytest.raises(DataError, match="checksum"):
        read_machine(path)


def test_a_missing_file_and_one_too_large(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="cannot be read"):
        read_machine(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_machine(tmp_path)
    monkeypatch.setattr("tfdp.tools.simulator.measured.MOST_BYTES", 10)
    with pytest.raises(DataError, match="more than 10 bytes"):
        read_machine(write_machine(MACHINE, tmp_path / "machine.json"))
