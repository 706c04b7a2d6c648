"""How `tfdp measure` fits a machine's numbers; a stand-in replaces the processes."""

import dataclasses
import doctest
import math

import pytest

from tfdp.plan.topology import Topology
from tfdp.tools.commands import cli, measure
from tfdp.tools.measuring import machine as measuring
from tfdp.tools.measuring import places
from tfdp.tools.measuring.gradient_sets import GRADIENT_SETS
from tfdp.tools.measuring.machine import BETWEEN_SETS, WITHIN_SETS, SumTimes, fit_link
from tfdp.tools.measuring.places import Arrangement, Figures, Work
from tfdp.tools.simulator.measured import MeasuredModel, read_machine
from tfdp.tools.simulator.model import Compute, GradientSize, ModelProfile
from tfdp.tools.simulator.step import Training, simulate_exchange

CALL_SECONDS = 0.003  # from Python into TensorFlow and back
SETS = {
    **{name: WITHIN_SETS.tensors(name) for name in WITHIN_SETS.names},
    **{name: BETWEEN_SETS.tensors(name) for name in BETWEEN_SETS.names},
}
ROW_RATE = 1.5e9
CODING = {"int8": 1.5e9}
GRADIENTS = [[4 * 10**6, 5.0, "float32"], [400, 0.0, "float32"]]


def seconds_of_sum(name, processes, replicas, machine):
    """What the simulator says of a set of tensors, all there at once."""
    model = ModelProfile(name, tuple(GradientSize(each, 1.0) for each in SETS[name]))
    training = Training(
        model, Compute(1e-12, 1e-12), machine.machine(replicas), algorithm="sockets"
    )
    return simulate_exchange(training, Topology(processes, replicas))


class Machine:
    """Stands in for processes: sums and steps take what a known machine says."""

    def __init__(self, machine, step_seconds, share=0.75):
        self.machine, self.step_seconds, self.share = machine, step_seconds, share
        self.asked = []

    def measure(self, place, wanted, repeats, timeout_seconds, hosts=None):
        return [self.figures(place, work, repeats) for work in wanted]

    def figures(self, place, work, repeats):
        processes, replicas = place.processes, place.replicas
        self.asked.append(work)
        if work.kind == "sums":
            taken = seconds_of_sum(work.subject, processes, replicas, self.machine)
            seconds, busy = CALL_SECONDS + taken, CALL_SECONDS + 2 * self.share * taken
            return Figures([seconds] * repeats, [busy] * repeats)
        profile = {
            "gradients": GRADIENTS,
            "forward_flops_per_sample": 10.0,
            "local_batch": 64,
        }
        seconds = self.step_seconds[processes, replicas]
        # One of three figures is off, as on a busy machine.
        return Figures([seconds, 9 * seconds, seconds], [seconds] * 3, profile)


@pytest.fixture
def machine(monkeypatch):
    from tests.pure.test_simulator_machine_file import MACHINE

    places = {(1, 1): 0.1, (1, 2): 0.15, (1, 4): 0.3, (2, 1): 0.11, (2, 2): 0.2}
    # Four replicas are joined by half of what two are.
    slower = dataclasses.replace(MACHINE.within_host, bytes_per_second=4e9)
    stand_in = Machine(dataclasses.replace(MACHINE, within_host_of={4: slower}), places)
    monkeypatch.setattr(measuring, "measure_place", stand_in.measure)
    monkeypatch.setattr(measuring, "usable_cores", lambda: 2)
    monkeypatch.setattr(measuring, "measure_rows", lambda *given: ROW_RATE)
    monkeypatch.setattr(measuring, "measure_coding", lambda *given: dict(CODING))
    return stand_in


@pytest.mark.parametrize("sets", [WITHIN_SETS, BETWEEN_SETS])
def test_the_sets_are_what_the_fit_takes_them_for(sets):
    total = {name: sum(sets.tensors(name)) for name in sets.names}
    assert total[sets.few] == total[sets.many] == 4 << 20
    assert total[sets.large] == 4 * sum(map(math.prod, GRADIENT_SETS["widening"]()))
    assert sets.units(sets.few) < sets.units(sets.many)


@pytest.mark.parametrize("sets", [WITHIN_SETS, BETWEEN_SETS])
def test_a_link_is_found_again_whatever_a_call_costs(sets):
    # 1 us a unit and 1 GB/s for each of 3 times the bytes; half of 2 cores.
    times = {}
    for name in sets.names:
        taken = 1e-6 * sets.units(name) + 3 * sum(sets.tensors(name)) / 1e9
        times[name] = SumTimes(taken + 0.5, 0.5 * 2 * taken + 0.7)
    link = fit_link(sets, times, 3, rounds=1, cores=2)
    assert link.latency_seconds == pytest.approx(1e-6)
    assert link.bytes_per_second == pytest.approx(1e9)
    assert link.compute_share == pytest.approx(0.5)


def test_noise_gives_no_link_that_means_nothing():
    times = {name: SumTimes(0.1, 9.0) for name in WITHIN_SETS.names}
    link = fit_link(WITHIN_SETS, times, 1, rounds=1, cores=2)
    assert link.latency_seconds > 0 and link.bytes_per_second > 0
    assert 0 <= link.compute_share <= 1


@pytest.mark.parametrize("rate", ["nan", "", "0mbit", "-1gbit", "100", "1e3mbit"])
def test_a_rate_that_is_none_is_refused_first(rate, tmp_path, capsys):
    path = tmp_path / "machine.json"
    assert cli.main(["measure", "--output", str(path), f"--link={rate}"]) == 2
    assert "a number above 0 and a unit" in capsys.readouterr().err
    assert not path.exists()


def test_measure_writes_what_simulate_reads(machine, tmp_path, capsys):
    path = tmp_path / "machine.json"
    assert cli.main(["measure", "--output", str(path), "--models", "cnn-1m"]) == 0
    said = capsys.readouterr().out
    assert "cnn-1m 2x2: 200.0 ms a step of 64 samples" in said and str(path) in said
    found, expected = read_machine(path), machine.machine
    assert found.link == "loopback" and found.cores == 2
    assert found.coding == CODING and found.row_bytes_per_second == ROW_RATE
    assert found.models["cnn-1m"].step_seconds == pytest.approx(machine.step_seconds)
    assert found.within_host.rate == pytest.approx(expected.within_host.rate)
    latency = expected.within_host.latency_seconds
    assert found.within_host.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert found.within(4).rate == pytest.approx(expected.within(4).rate)
    assert found.within(4).rate == pytest.approx(found.within_host.rate / 2)
    assert found.between_hosts.rate == pytest.approx(expected.between_hosts.rate)
    assert found.between_hosts.compute_share == pytest.approx(0.75)
    steps = {work for work in machine.asked if work.subject == "cnn-1m"}
    assert steps == {Work("steps without sums", "cnn-1m", 8)}
    assert cli.main(["simulate", "--machine", str(path), "--devices", "1", "4"]) == 0


def test_an_own_model_stands_beside_the_links(machine, tmp_path, monkeypatch, capsys):
    def measured(text, replicas, **options):
        assert options == {"samples": 8, "steps": 9, "timeout_seconds": 900}
        seconds = {(1, number): 0.1 * number for number in replicas}
        profile = ModelProfile("mine", (GradientSize(400, 1.0),), 2.0)
        return MeasuredModel(profile, options["samples"], seconds)

    monkeypatch.setattr("tfdp.tools.commands.measure.measure_target", measured)
    path = tmp_path / "machine.json"
    asked = ["--target", "mine.py", "--batch", "8", "--places", "1x2", "2x1"]
    assert cli.main(["measure", "--output", str(path), *asked]) == 0
    (found,) = read_machine(path).models.values()
    assert found.step_seconds == {(1, 1): 0.1, (1, 2): 0.2}
    assert cli.main(["simulate", "--machine", str(path), "--devices", "4"]) == 0
    assert "mine, 8 samples a replica" in capsys.readouterr().out


def test_processes_on_a_core_each_take_a_part_of_these_cores(machine, monkeypatch):
    # Of four cores two are used; the stand-in's sums take 0.75 of these.
    link = measuring.measure_link(Arrangement(2, 1), "loopback", 4, 3, 60)
    assert link.compute_share == pytest.approx(0.75)


@pytest.mark.parametrize(
    "arguments",
    [
        ["measure", "--output", "/nowhere/machine.json"],
        ["measure", "--output", "/tmp"],
        ["measure", "--output", "m.json", "--batch", "3"],
        ["measure", "--output", "m.json", "--target", "none.py"],
        ["measure", "--output", "m.json", "--target", "a b"],
        ["measure", "--output", "m.json", "--repeats", "0"],
        ["measure", "--output", "m.json", "--timeout-seconds", "0"],
    ],
)
def test_what_cannot_act_is_refused_before_anything_runs(
    arguments, machine, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(arguments)
    except SystemExit as left:
        code = left.code
    assert code == 2 and capsys.readouterr().err
    assert machine.asked == [] and list(tmp_path.iterdir()) == []


def test_the_figures_of_processes_are_joined():
    first = {"seconds": [1.0, 4.0], "processor_seconds": [0.5, 0.25], "profile": {}}
    second = {**first, "seconds": [2.0, 3.0], "profile": {"other": 1}}
    found = places._join([first, second])
    assert found == Figures([2.0, 4.0], [1.0, 0.5], {})


def test_examples_hold():
    for module in (places, measure):
        assert doctest.testmod(module).failed == 0


def test_numbers_that_cannot_be_written_are_printed(machine, tmp_path, capsys):
    path = tmp_path / ("n" * 300)
    arguments = ["measure", "--models", "cnn-1m", "--output", str(path)]
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert "200.0 ms a step" in said.out
    assert f"tfdp measure: --output {path} cannot be written" in said.err
