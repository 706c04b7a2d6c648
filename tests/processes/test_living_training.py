"""Trainings with DiLoCo of which hosts die, stop and come back.

After every meeting the outer weights and momenta of all who are present are the same
bits, and they are what one process in NumPy makes of the mean over those present.
"""

import pytest

import tfdp
from tests.support import living_training as training
from tests.support.launching import Launches, lines_until
from tests.support.living_group import LivingGroup
from tests.support.living_reference import check_meetings, lines_of

MODULE = "tests.support.living_training"
SYNCS = {
    "diloco": tfdp.sync.DiLoCo(every=training.EVERY),
    "local": tfdp.sync.LocalSGD(training.EVERY),
}


def run(folder, workers, epochs, *plans, sync="diloco", devices=1, **options):
    plans = (*plans, f"sync={sync}")
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    with LivingGroup(
        workers, MODULE, folder, epochs, *plans, variables=variables, **options
    ) as group:
        codes = group.run(seconds=600)
        outputs = group.outputs()
    return codes, check_meetings(folder, workers, SYNCS[sync]), outputs


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize(
    ("workers", "who", "sync", "devices"),
    [
        (2, 1, "diloco", 1),
        pytest.param(2, 1, "local", 1, marks=pytest.mark.slow),
        pytest.param(3, 0, "diloco", 1, marks=pytest.mark.slow),
        pytest.param(2, 0, "diloco", 2, marks=pytest.mark.slow),
    ],
)
def test_the_others_train_on(tmp_path, workers, who, sync, devices):
    codes, took_part, outputs = run(
        tmp_path, workers, 6, f"die={who}@10", sync=sync, devices=devices
    )
    assert codes == [-9 if rank == who else 0 for rank in range(workers)], outputs
    others = tuple(rank for rank in range(workers) if rank != who)
    assert took_part == {
        4: tuple(range(workers)),
        8: tuple(range(workers)),
        **dict.fromkeys((12, 16, 20, 24), others),
    }, outputs


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", ["die", "stop"])
def test_one_comes_back_and_ends_with_the_others(tmp_path, workers, who, fault):
    # Until it is back, which takes the start of TensorFlow, and for a while after.
    codes, took_part, outputs = run(
        tmp_path,
        workers,
        120,
        f"{fault}={who}@10",
        "step_seconds=0.3",
        comes_back=True,
        sleep_seconds=9.0,
    )
    assert codes == [0] * workers, outputs
    counts = [len(took_part[update]) for update in sorted(took_part)]
    assert sorted(took_part) == list(range(4, 481, 4)), outputs
    assert counts[0] == counts[-1] == workers and workers - 1 in counts, outputs
    # It ends where they end, in the last step of the last epoch.
    ends = {lines[-1]["update"] for lines in lines_of(tmp_path).values()}
    assert 480 in ends and len(ends) <= 2, outputs


@pytest.mark.slow
def test_the_launcher_brings_one_back_while_the_other_goes_on(tmp_path):
    script = f"""
from tests.support import living_training
living_training.main({str(tmp_path)!r}, 120, "die=1@10", "step_seconds=0.3")
"""
    options = ["--workers", 2, "--max-restarts", 2, "--restart", "one"]
    folder = tmp_path / "launch"
    folder.mkdir()
    with Launches(folder) as launches:
        process = launches.start(script, *options)
        said = lines_until(process, "starts worker 1 again")
        assert any("the others go on" in line for line in said)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    took_part = check_meetings(tmp_path, 2, SYNCS["diloco"])
    assert took_part[480] == (0, 1), err
    assert (0,) in took_part.values(), err
