"""`tfdp simulate`: table, JSON and page agree; options that cannot act are refused."""

import json
import sys

import pytest

from tests.pure.test_simulator_machine_file import MACHINE
from tests.support.pictures import pictures_in
from tfdp.tools.commands import cli
from tfdp.tools.simulator.measured import write_machine
from tfdp.tools.simulator.step import PARTS

KNOWN = ["simulate", "--model", "resnet50", "--hardware", "p100-25gbit"]
H100 = ["--model", "resnet50", "--hardware", "h100-8x400gbit"]
RATE = ["--samples-per-second", "219", "--batch", "64"]


def test_table_json_and_page_say_the_same(tmp_path, capsys):
    page = tmp_path / "curve.html"
    extra = ["--device-hours-between-failures", "1000", "--price-per-device-hour", "2"]
    assert cli.main([*KNOWN, *RATE, *extra, "--plot", str(page)]) == 0
    said = capsys.readouterr()
    assert str(page) in said.err
    assert cli.main([*KNOWN, *RATE, *extra, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    points = found["points"]
    assert [point["devices"] for point in points] == [2**power for power in range(15)]
    for point in points:
        assert tuple(point["part_seconds"]) == PARTS
        total = sum(point["part_seconds"].values())
        assert total == pytest.approx(point["step_seconds"])
        assert f"{100 * point['efficiency']:.1f}%" in said.out
    assert points[0]["efficiency"] > points[-1]["efficiency"]
    assert points[-1]["largest_loss"] in said.out
    panels = pictures_in(page.read_text("utf-8"))
    assert len(panels) == 3
    assert ">16k</text>" in panels[0] and ">predicted</text>" in panels[1]


def test_chosen_numbers_and_other_links(capsys):
    def efficiency(*arguments):
        both = [*KNOWN, *RATE, "--devices", "1", "64", "--jitter", "0", *arguments]
        assert cli.main([*both, "--json"]) == 0
        points = json.loads(capsys.readouterr().out)["points"]
        assert [point["devices"] for point in points] == [1, 64]
        return points[1]["efficiency"]

    assert efficiency() > efficiency("--between-bytes-per-second", "3e8")
    assert efficiency() > efficiency("--no-overlap")
    assert efficiency() > efficiency("--input-samples-per-second", "400")
    assert efficiency() > efficiency("--between-latency-seconds", "0.01")
    assert efficiency("--algorithm", "ring") != efficiency("--algorithm", "tree")


@pytest.mark.parametrize("per_host, last", [(3, 16383), (12, 16380), (20000, 16384)])
def test_hosts_of_any_size_have_a_curve(per_host, last, capsys):
    hosts = ["--devices-per-host", str(per_host)]
    assert cli.main([*KNOWN, *RATE, *hosts, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert points[-1]["devices"] == last


def test_a_measured_machine_is_read(tmp_path, capsys):
    path = str(write_machine(MACHINE, tmp_path / "machine.json"))
    assert cli.main(["simulate", "--machine", path, "--devices", "1", "2", "8"]) == 0
    said = capsys.readouterr().out
    assert "net, 64 samples a replica, on here, 2 devices a host; sockets" in said
    assert "sharing cores" in said


@pytest.mark.parametrize("option", ["--list", "--published"])
def test_lists(option, capsys):
    assert cli.main(["simulate", option]) == 0
    said = capsys.readouterr().out
    assert "Llama 3" in said or "llama-3-8b" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "--hardware"),
        (["--hardware", "p100-25gbit"], "--model must be one of"),
        (["--hardware", "p100-25gbit", "--model", "x"], "`tfdp measure --target`"),
        ([*KNOWN[1:]], "--samples-per-second"),
        ([*KNOWN[1:], "--machine", "x"], "either"),
        ([*KNOWN[1:], *RATE, "--flops-per-second", "1e12"], "leave one out"),
        ([*KNOWN[1:], "--samples-per-second", "0"], "above 0"),
        ([*KNOWN[1:], "--samples-per-second", "nan"], "above 0"),
        ([*H100, "--flops-per-second", "0"], "above 0"),
        (["--list", "--json"], "--list prints a text"),
        (["--published", "--model", "x"], "--model has no effect"),
        (["--published", "--list"], "--published has no effect"),
        (["--published", "--json"], "--published prints a text"),
        (["--published", "--plot", "curve.html"], "--published prints a text"),
        ([*KNOWN[1:], "--samples-per-second", "5", "--batch", "0"], "at least 1"),
        ([*KNOWN[1:], *RATE, "--devices", "0"], "whole number"),
        ([*KNOWN[1:], *RATE, "--devices", "6"], "do not fill hosts"),
        ([*KNOWN[1:], *RATE, "--devices-per-host", "0"], "devices_per_host"),
        ([*KNOWN[1:], *RATE, "--jitter", "-1"], "at least 0"),
        ([*KNOWN[1:], *RATE, "--jitter", "inf"], "at least 0"),
        ([*KNOWN[1:], *RATE, "--bucket-bytes", "0"], "bucket_bytes"),
        ([*KNOWN[1:], *RATE, "--restart-seconds", "5"], "acts only with"),
        ([*KNOWN[1:], *RATE, "--algorithm", "in_process"], "on one host"),
        ([*KNOWN[1:], *RATE, "--between-bytes-per-second", "0"], "bytes_per_second"),
        (["--machine", "/nowhere/machine.json"], "cannot be read"),
    ],
)
def test_what_cannot_act_is_refused(arguments, said, capsys):
    assert cli.main(["simulate", *arguments]) == 2
    refused = capsys.readouterr()
    assert said in refused.err and refused.err.startswith("tfdp simulate: ")
    assert refused.out == ""


def test_a_picture_without_matplotlib_is_refused_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*KNOWN, *RATE]) == 0
    capsys.readouterr()
    assert cli.main([*KNOWN, *RATE, "--plot", str(tmp_path / "curve.html")]) == 2
    refused = capsys.readouterr()
    assert "pip install 'tfdp[plots]'" in refused.err and refused.out == ""


def test_a_picture_without_a_folder_is_refused_first(tmp_path, capsys):
    for path in (tmp_path / "missing" / "curve.html", tmp_path):
        assert cli.main([*KNOWN, *RATE, "--plot", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def test_a_cluster_that_never_gets_anything_done_is_told(tmp_path, capsys):
    page = tmp_path / "curve.html"
    always = ["--device-hours-between-failures", "1e-9", "--plot", str(page)]
    assert cli.main([*KNOWN, *RATE, *always, "--price-per-device-hour", "1"]) == 0
    assert "inf" in capsys.readouterr().out
    assert cli.main([*KNOWN, *RATE, *always, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert {point["step_seconds"] for point in points} == {None}
    assert len(pictures_in(page.read_text("utf-8"))) == 3


def test_a_measured_machine_says_its_own_batch(tmp_path, capsys):
    path = str(write_machine(MACHINE, tmp_path / "machine.json"))
    assert cli.main(["simulate", "--machine", path, "--batch", "3"]) == 2
    assert "the measured value is used" in capsys.readouterr().err
