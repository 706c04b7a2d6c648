"""GPUs that the driver lists and TensorFlow does not: found, and what is said."""

import re

import pytest

from tfdp.cluster import nvidia
from tfdp.cluster.nvidia import driver_gpus, explain_unseen_gpus, gpu_names


def folder_of(tmp_path, models):
    for number, model in enumerate(models):
        gpu = tmp_path / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ: 3\n")
    return tmp_path


def test_the_driver_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_gpus(tmp_path / "none") == []
    models = ["NVIDIA A100", "NVIDIA A100"]
    assert driver_gpus(folder_of(tmp_path / "gpus", models)) == models


def test_nvidia_smi_is_asked_where_the_driver_has_no_folder(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA L4'\necho\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert driver_gpus(tmp_path / "none") == ["NVIDIA L4"]
    program.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert driver_gpus(tmp_path / "none") == []


@pytest.mark.parametrize(
    "visible, names",
    [
        (None, ["GPU-aa", "GPU-ab"]),
        ("1", ["GPU-ab"]),
        ("1,0", ["GPU-ab", "GPU-aa"]),
        ("GPU-ab", ["GPU-ab"]),
        ("GPU-ab,-1", ["GPU-ab"]),
        ("", []),
        # What is not known stays as it is: beyond the list, two that begin so, a part.
        ("2,GPU-a,MIG-c", ["2", "GPU-a", "MIG-c"]),
    ],
)
def test_gpus_have_unique_names(monkeypatch, visible, names):
    monkeypatch.setattr(nvidia, "query_gpus", lambda what: ["GPU-aa", "GPU-ab"])
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_names(environment) == names
    monkeypatch.setattr(nvidia, "query_gpus", lambda what: [])
    assert gpu_names(environment) == []  # "0" may be another one for another worker


SAID = [
    ({"built_with_cuda": False}, "trains on the CPU.*built without CUDA.*tfdp.gpu"),
    ({"reaches_driver": False}, "no device file.*--gpus all"),
    ({}, r"CUDA libraries are missing.*tfdp\[gpu\].*CUDA_VISIBLE_DEVICES=-1"),
    ({"environment": {"CUDA_VISIBLE_DEVICES": "7"}}, "DEVICES=7 names existing GPUs"),
    ({"seen": 1}, r"The driver sees 2 GPU\(s\) \(A100\), and TensorFlow sees 1:"),
]
PLAIN = {"seen": 0, "built_with_cuda": True, "reaches_driver": True, "environment": {}}


@pytest.mark.parametrize("given, words", SAID)
def test_the_remedy_fits_the_cause(given, words):
    said = explain_unseen_gpus(["A100", "A100"], **{**PLAIN, **given})
    assert re.search(words, said)


@pytest.mark.parametrize(
    "gpus, given",
    [
        ([], {}),
        (["A100"], {"seen": 1}),
        (["A100"], {"environment": {"CUDA_VISIBLE_DEVICES": ""}}),
        (["A100"], {"environment": {"CUDA_VISIBLE_DEVICES": "-1"}}),
        (["A100"] * 4, {"seen": 2, "environment": {"CUDA_VISIBLE_DEVICES": "1,3"}}),
    ],
)
def test_nothing_is_said_where_all_is_well(gpus, given):
    assert explain_unseen_gpus(gpus, **{**PLAIN, **given}) is None


def test_the_files_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "CONTROL_FILES", (tmp_path / "nvidiactl",))
    given = {**PLAIN, "reaches_driver": None}
    assert "--gpus all" in explain_unseen_gpus(["A100"], **given)
    (tmp_path / "nvidiactl").touch()
    assert "--gpus all" not in explain_unseen_gpus(["A100"], **given)
