"""What says that there is a TPU, and what each known failure is explained as.

The environments and messages are those of the runtimes and reports named beside them.
"""

import pytest

from tfdp.cluster.tpu import explain_tpu_failure, find_tpu

COLAB_V5E = {  # Colab's one-core runtime: the chip hangs on the machine itself
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@pytest.mark.parametrize(
    "environment, files, address",
    [
        (COLAB_V5E, [], "local"),
        ({}, ["/dev/accel0", "/dev/accel1"], "local"),
        ({"PJRT_DEVICE": "TPU"}, [], "local"),
        ({"TPU_NAME": "local"}, ["/dev/accel0"], "local"),
        ({"TPU_NAME": "my-tpu"}, [], "my-tpu"),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, [], "grpc://10.0.0.2:8470"),
        ({"COLAB_TPU_ADDR": "grpc://10.0.0.2:8470"}, [], "grpc://10.0.0.2:8470"),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470", "TPU_NAME": "b"}, [], "b"),
    ],
)
def test_a_sign_gives_an_address(environment, files, address):
    found = find_tpu(environment, files)
    assert found is not None and found.address == address
    for name, value in environment.items():
        assert f"{name}={value}" in found.signs
    assert set(files) <= set(found.signs)


@pytest.mark.parametrize(
    "environment",
    [{}, {"PJRT_DEVICE": "CPU"}, {"TPU_NAME": "", "COLAB_TPU_ADDR": ""}],
)
def test_no_sign_gives_nothing(environment):
    assert find_tpu(environment, []) is None


NO_KERNEL = (
    "TPUs not found in the cluster. Failed in initialization: No OpKernel was "
    "registered to support Op 'ConfigureDistributedTPU' used by {{node "
    'ConfigureDistributedTPU}} with these attrs: [tpu_embedding_config=""]\n'
    "Registered devices: [CPU]"
)

FAILURES = {
    "no TPU build": (NO_KERNEL, "without TPU support", "tfdp[tpu]"),  # tf#96203
    "no name": (  # tf#70827
        "Please provide a TPU Name to connect to.",
        "No address was given",
        "Change runtime type",
    ),
    "old runtime": (  # tf#35700
        "'__inference__tpu_init_fn_4' is neither a type of a primitive operation nor "
        "a name of a function registered in binary running on n-3ea5ef93-w-0.",
        "another version",
        "runtime for this version",
    ),
    "libtpu": (
        "Failed to load libtpu: libtpu version 0.0.7 does not match",
        "(libtpu) is of another version",
        "libtpu-tf-releases",
    ),
    "no libtpu": (
        "libtpu.so: cannot open shared object file: No such file or directory",
        "(libtpu) is not installed",
        "tfdp[tpu]",
    ),
    "in use": (
        "The TPU is already in use by process with pid 1473.",
        "Another process",
        "End the other process",
    ),
    "workers": (  # transformers#28204
        "TPU initialization failed: Invalid slice_builder_worker_addresses specified. "
        "Expected 4 worker addresses, got 1.",
        "other workers",
        "TPU_PROCESS_ADDRESSES",
    ),
    "network": (
        "<urlopen error [Errno -2] Name or service not known>",
        "does not answer",
        "same network",
    ),
    "no cores": (
        "TPUs not found in the cluster.",
        "finds no TPU core",
        "Change runtime type",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_known_failure_says_what_it_is_and_what_to_do(name):
    message, meaning, advice = FAILURES[name]
    told = explain_tpu_failure(
        message, "local", ["TPU_NAME=local"], {"tensorflow-cpu": "2.21.0"}
    )
    assert meaning in told and advice in told
    assert "TPU_NAME=local" in told and "tensorflow-cpu 2.21.0" in told
    assert message.splitlines()[0][:300] in told


def test_an_unknown_failure_is_told_as_it_is():
    told = explain_tpu_failure("something else", "b")
    assert "no explanation" in told and "something else" in told
    assert "'b'" in told and "nothing in the environment" in told
    assert explain_tpu_failure("", "b")
