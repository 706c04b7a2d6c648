"""The benchmark harness on tiny subjects: right sums, right steps, whole reports."""

import json
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.bench.cases import CASES, REDUCTION_ARMS
from benchmarks.bench.gradient_sets import GRADIENT_SETS, count_parameters
from benchmarks.bench.one_process.arms import ARMS
from benchmarks.bench.one_process.reduction import check_sums, measure_reduction
from benchmarks.bench.one_process.runner import Failure, run_requests
from benchmarks.bench.request import Request
from benchmarks.bench.tables import format_result
from tests.support.fresh_python import run_python
from tfdp.errors import CollectiveError, DeviceError
from tfdp.tools.commands import info
from tfdp.tools.measuring.models import MODELS
from tfdp.tools.measuring.steps import make_step
from tfdp.tools.measuring.sums import make_reduction

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
SUM = CASES["allreduce-resnet50"]
# Not "stock-default": its collectives abort when strategies of different size meet in
# one process, as they do in a test session. The command, below, runs it.
ARMS_HERE = [
    "stock-hierarchical-copy",
    "stock-one-device",
    "tfdp",
    "tfdp-tensorflow-engine",
    "tfdp-cross-device-ops",
]


def gradients_on(devices):
    """Per device its own small integers, so that every order of sums is exact."""
    generator = np.random.default_rng(0)
    gradients = []
    for device in devices:
        with tf.device(device):
            gradients.append(
                [
                    tf.Variable(tf.cast(generator.integers(-9, 9, shape), tf.float32))
                    for shape in GRADIENT_SETS["tiny"]()
                ]
            )
    return gradients


@pytest.mark.parametrize("arm", ARMS_HERE)
def test_every_arm_sums_what_is_on_each_replica(arm):
    gradients = gradients_on(DEVICES)
    sums = make_reduction(ARMS[arm](DEVICES), gradients)()
    for index, on_replicas in enumerate(sums):
        expected = sum(mine[index].numpy() for mine in gradients)
        assert len(on_replicas) == len(DEVICES)
        for value in on_replicas:
            np.testing.assert_array_equal(value.numpy(), expected)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_arm_with_a_wrong_sum_is_not_timed(rank):
    gradients = gradients_on(DEVICES)
    sums = make_reduction(ARMS["stock-one-device"](DEVICES), gradients)()
    check_sums("right", sums, gradients)
    wrong = [list(on_replicas) for on_replicas in sums]
    # One part in a thousand of a sum that is not zero.
    wrong[0][rank] = wrong[0][rank] * 1.001
    with pytest.raises(CollectiveError, match=f"'wrong'.*gradient 0.*replica {rank}"):
        check_sums("wrong", wrong, gradients)


def test_stock_arms_with_wrong_sums_are_left_out():
    # HierarchicalCopyAllReduce halves the devices and, without a word, loses some of
    # an odd number of them.
    result = measure_reduction(
        Request(
            SUM,
            arms=("stock-hierarchical-copy", "stock-one-device"),
            quick=True,
            repeats=1,
        ),
        DEVICES[:3],
    )
    assert list(result.arms) == ["stock-one-device"]
    assert "off by" in result.left_out["stock-hierarchical-copy"]
    assert "left out: Arm 'stock-hierarchical-copy'" in format_result(result)


def test_sums_follow_the_gradients():
    # What TensorFlow had folded into constants while tracing would not.
    gradients = gradients_on(DEVICES)
    reduction = make_reduction(ARMS["tfdp"](DEVICES), gradients)
    before = [on_replicas[1].numpy() for on_replicas in reduction()]
    for gradient in gradients[2]:
        gradient.assign_add(tf.ones_like(gradient))
    for once, on_replicas in zip(before, reduction(), strict=True):
        np.testing.assert_array_equal(on_replicas[1].numpy(), once + 1)


def test_resnet50_has_214_gradients():
    shapes = GRADIENT_SETS["resnet50"]()
    assert len(shapes) == 214
    assert count_parameters(shapes) == 25_583_592


def build(name):
    model = MODELS[name]
    return model.build(model.input_shape, model.classes)


@pytest.mark.parametrize(
    "name, parameters", [("mlp-20m", 20_037_642), ("cnn-1m", 1_199_882)]
)
def test_models_have_the_stated_size(name, parameters):
    assert build(name).count_params() == parameters


def test_arms_train_the_same_model_on_the_same_data():
    devices = DEVICES[:2]
    losses = {}
    for arm in ("stock-one-device", "tfdp"):
        training = make_step(ARMS[arm](devices), MODELS["mlp-tiny"])
        assert training.global_batch == 128
        losses[arm] = [float(training.step()) for _ in range(4)]
        keras.utils.clear_session()
    # The loss moves by 1e-2 a step here; equal but for float32 rounding, 2^-24 times
    # some hundred additions of a batch: 1e-5.
    np.testing.assert_allclose(losses["tfdp"], losses["stock-one-device"], rtol=1e-5)
    assert len(set(losses["tfdp"])) == 4


def test_the_command_runs_and_writes_a_whole_report(tmp_path):
    path = tmp_path / "report.json"
    arguments = ["--case", "train-mlp", "--quick", "--json", str(path)]
    done = run_python("-m", "benchmarks.bench", *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text("utf-8"))
    assert report["failures"] == []
    assert report["command"] == " ".join(
        ["python", "-m", "benchmarks.bench", *arguments]
    )
    assert report["versions"]["tensorflow"] == tf.__version__
    assert report["machine"]["usable_cores"] >= 1
    (result,) = report["results"]
    assert result["devices"] == 2
    assert list(result["arms"]) == [
        "one-device",
        "stock-default",
        "tfdp",
        "tfdp-open-batch",
    ]
    for name, arm in result["arms"].items():
        assert len(arm["seconds"]) == 2 and min(arm["seconds"]) > 0
        assert arm["items_per_call"] == (64 if name == "one-device" else 128)
    assert "times as fast as stock-default" in done.stdout


def test_a_failing_case_is_told_and_the_rest_still_runs():
    outcomes = []
    report = run_requests(
        [
            Request(SUM, devices=9, quick=True, device_type="gpu"),
            Request(SUM, quick=True, repeats=1),
        ],
        command="",
        timeout_seconds=900,
        on_result=outcomes.append,
    )
    (failure,) = report.failures
    assert isinstance(outcomes[0], Failure)
    assert "9 GPUs were requested" in failure.reason
    assert DeviceError.__name__ in failure.reason
    (result,) = report.results
    assert list(result.arms) == list(REDUCTION_ARMS)


def test_a_worker_that_takes_too_long_is_stopped():
    report = run_requests([Request(SUM)], command="", timeout_seconds=0.5)
    assert "no result within 0.5 s" in report.failures[0].reason


def test_info_tells_what_would_be_chosen():
    done = run_python("-m", "tfdp", "info", "--json", "--virtual-devices", 3)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["strategy"]["class"] == "DataParallelStrategy"
    assert facts["strategy"]["topology"] == {"hosts": 1, "devices_per_host": 3}
    assert facts["strategy"]["engine"] == "in_process"
    assert "without copies" in facts["strategy"]["engine_reason"]
    assert [d["name"][-5:] for d in facts["devices"]["logical"]][:1] == ["CPU:0"]
    assert facts["versions"]["tensorflow"] == tf.__version__
    # Nothing of what TensorFlow's libraries print while they load.
    assert done.stderr == ""


def test_info_warns_of_a_single_device():
    (warning,) = info._setting_warnings(["/device:CPU:0"])
    assert "nothing to distribute" in warning
    assert info._setting_warnings(["/device:CPU:0", "/device:CPU:1"]) == []


def test_the_tfdp_command_is_installed():
    command = shutil.which("tfdp", path=sys.prefix + "/bin")
    assert command is not None
