"""Cluster discovery, from variables that the real launchers set."""

import dataclasses

import pytest

from tests.support.fresh_python import run_program
from tests.support.launcher_environments import (
    JOBSET,
    KUBEFLOW,
    KUBERNETES,
    MPICH,
    OPEN_MPI,
    SAGEMAKER,
    SLURM,
    SLURM_BATCH,
    SLURM_INTERACTIVE,
    TFDP,
    TORCHRUN,
    VERTEX,
    tf_config,
)
from tfdp.cluster import Cluster, find_cluster
from tfdp.cluster.find import expand_hosts, slurm_port
from tfdp.errors import ClusterError, ConfigurationError

SLURM_PORT = 20000 + 200505 % 10000

SOURCES = [
    (TFDP, Cluster(2, 1, "127.0.0.1:23456", "tfdp")),
    (KUBEFLOW, Cluster(2, 1, "mnist-worker-0.ns.svc:2222", "TF_CONFIG")),
    (VERTEX, Cluster(3, 2, "cmle-training-workerpool0-12ab-0:2222", "TF_CONFIG")),
    (SAGEMAKER, Cluster(2, 1, "algo-1:8890", "TF_CONFIG")),
    (SLURM, Cluster(4, 3, f"gnode10:{SLURM_PORT}", "Slurm")),
    (KUBERNETES, Cluster(3, 2, "digits-0.digits:25000", "Kubernetes")),
    (JOBSET, Cluster(3, 2, "train-workers-0-0.train:25000", "Kubernetes")),
    (OPEN_MPI, Cluster(3, 2, None, "Open MPI")),
    (MPICH, Cluster(3, 2, None, "MPICH")),
    (TORCHRUN, Cluster(4, 3, "node1:29500", "torchrun")),
    (
        # torchrun itself listens on the other one.
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
        Cluster(4, 3, "node1:29501", "torchrun"),
    ),
]
NAMES = [
    *("tfdp", "Kubeflow", "Vertex AI", "SageMaker", "Slurm", "Kubernetes", "JobSet"),
    *("Open MPI", "MPICH", "torchrun", "torchrun by itself"),
]


@pytest.mark.parametrize("environment, expected", SOURCES, ids=NAMES)
def test_every_source(environment, expected):
    assert find_cluster({"PATH": "/bin", **environment}) == expected


@pytest.mark.parametrize("environment, expected", SOURCES, ids=NAMES)
def test_every_source_takes_the_launchers_devices(environment, expected):
    found = find_cluster({**environment, "TFDP_DEVICES_PER_WORKER": "4"})
    assert found == dataclasses.replace(expected, devices_per_worker=4)


def test_this_process_environment_is_the_default(monkeypatch):
    for name, value in TFDP.items():
        monkeypatch.setenv(name, value)
    assert find_cluster() == SOURCES[0][1]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin", "HOSTNAME": "laptop"},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {}, "task": {}, "environment": "cloud"}'},
        # Too common to mean a cluster on their own.
        {"RANK": "3"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
        {"TFDP_DEVICES_PER_WORKER": "2"},
        # A job with eight tasks on one node, for its cores, and no srun.
        {**SLURM_BATCH, "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"},
    ],
)
def test_no_cluster(environment):
    assert find_cluster(environment) is None


def test_the_chief_is_rank_0_and_the_workers_follow():
    cluster = {"chief": ["c:1"], "worker": ["a:1", "b:1"]}
    ranks = [
        find_cluster(tf_config(cluster, kind, index)).rank
        for kind, index in [("chief", 0), ("worker", 0), ("worker", 1)]
    ]
    assert ranks == [0, 1, 2]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("node[01-03,7],other", ["node01", "node02", "node03", "node7", "other"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("gpu-[3].site.org", ["gpu-3.site.org"]),
        ("10-0-3-12", ["10-0-3-12"]),
    ],
)
def test_slurm_lists_of_hosts(text, expected):
    assert expand_hosts(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "n[", "n[1-]", "n]1[", "n[a-b]", "n[1", "a,,b", "n[5-3]", "n[5-3,7]"),
        # Some 10^10 hosts, from one pair of brackets, from several, from many items.
        "n[1-9999999999]",
        "n[1-9999][1-9999][1-99]",
        ",".join(["n[1-99999]"] * 100_000),
        pytest.param("n" + "[1-2]" * 5000, id="5000 brackets"),
        pytest.param(f"n[1-1{'0' * 5000}]", id="a number of 5001 digits"),
    ],
    ids=lambda text: text[:30],
)
def test_broken_lists_of_hosts_are_refused(text):
    with pytest.raises(ClusterError, match="list of nodes"):
        expand_hosts(text)


def test_the_port_of_a_job_step():
    ports = [slurm_port(job, step) for job in (0, 9999, 10**7) for step in (0, 1, 50)]
    assert all(20000 <= port <= 29999 for port in ports)
    assert slurm_port(7) != slurm_port(8) != slurm_port(7, step=1)
    # The interactive step's number is near 2**32.
    assert 20000 <= slurm_port(1731563, 4294967290) <= 29999


def test_a_step_that_uses_a_part_of_the_job():
    part = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gnode20"}
    found = find_cluster({**SLURM, **part, "SLURM_PROCID": "1"})
    assert (found.workers, found.rank) == (2, 1)
    assert found.coordinator.startswith("gnode20:")


def test_one_task_is_a_cluster_of_one():
    assert find_cluster(SLURM_INTERACTIVE).workers == 1


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
@pytest.mark.parametrize(
    "slurm",
    [
        SLURM_BATCH,
        SLURM_INTERACTIVE,
        # What the daemons of mpiexec inherit: a step of one task on each node.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        # srun --mpi=pmi2 itself: both say the same.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"},
    ],
    ids=["batch", "interactive", "daemons", "same"],
)
def test_mpi_within_slurm(mpi, slurm):
    found = find_cluster({**slurm, **mpi})
    assert (found.workers, found.rank) == (3, 2)
    # Only what Slurm says of the same processes may name the place to meet.
    same = slurm["SLURM_PROCID"] == "2"
    assert (found.coordinator is not None) == same


def test_tfdp_launch_within_a_single_task():
    assert find_cluster({**SLURM_INTERACTIVE, **TFDP}).source == "tfdp"
    assert find_cluster({"JOB_COMPLETION_INDEX": "0", **TFDP}).rank == 1


def test_a_coordinator_completes_and_overrides():
    place = {"TFDP_COORDINATOR": "10.0.0.1:4000"}
    for environment in (OPEN_MPI, SLURM, TORCHRUN, VERTEX):
        found = find_cluster({**environment, **place})
        assert found.coordinator == "10.0.0.1:4000"
        assert found.source == find_cluster(environment).source


def test_alone_on_request_whatever_else_is_set():
    for environment in (SLURM_BATCH, SLURM, OPEN_MPI, {"JOB_COMPLETION_INDEX": "2"}):
        found = find_cluster({**environment, "TFDP_WORKERS": "1"})
        assert (found.workers, found.rank, found.source) == (1, 0, "tfdp")


@pytest.mark.parametrize(
    "first, second, named",
    [
        (TFDP, SLURM, ["tfdp", "Slurm", "TFDP_RANK=1", "SLURM_PROCID=3"]),
        (VERTEX, TORCHRUN, ["TF_CONFIG", "torchrun", "WORLD_SIZE=4"]),
        (SLURM, OPEN_MPI, ["Slurm", "Open MPI", "OMPI_COMM_WORLD_SIZE=3"]),
        (SLURM, {"WORLD_SIZE": "8"}, ["Slurm", "torchrun", "WORLD_SIZE=8"]),
        (TFDP, {"JOB_COMPLETION_INDEX": "3"}, ["Kubernetes", "TFDP_RANK=1"]),
        (OPEN_MPI, {**MPICH, "PMI_RANK": "1"}, ["MPICH", "PMI_RANK=1"]),
        (SLURM, {"TFDP_WORKERS": "5"}, ["TFDP_WORKERS=5", "SLURM_STEP_NUM_TASKS=4"]),
    ],
)
def test_contradictions_are_refused_naming_both(first, second, named):
    with pytest.raises(ClusterError, match="contradict") as refused:
        find_cluster({**first, **second})
    assert [text for text in named if text not in str(refused.value)] == []


def without(environment, *names):
    return {name: text for name, text in environment.items() if name not in names}


@pytest.mark.parametrize(
    "environment, found, missing",
    [
        (without(TFDP, "TFDP_RANK"), "TFDP_WORKERS=2", "TFDP_RANK"),
        (without(TFDP, "TFDP_WORKERS"), "TFDP_RANK=1", "TFDP_WORKERS"),
        (without(TFDP, "TFDP_COORDINATOR"), "TFDP_RANK=1", "TFDP_COORDINATOR"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0", "TFDP_WORKERS"),
        (without(KUBERNETES, "TFDP_COORDINATOR"), "=2", "TFDP_COORDINATOR"),
        (without(JOBSET, "JOBSET_NAME"), "=2", "TFDP_COORDINATOR"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "Open MPI", "WORLD_SIZE"),
        (without(MPICH, "PMI_RANK"), "PMI_SIZE=3", "PMI_RANK"),
        (without(TORCHRUN, "MASTER_PORT"), "RANK=3", "MASTER_PORT"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE=4", "RANK"),
        (without(SLURM, "SLURM_JOB_ID", "SLURM_JOBID"), "PROCID=3", "SLURM_JOB_ID"),
        (SLURM_BATCH, "SLURM_NTASKS=4", "srun"),
        (without(SLURM_BATCH, "SLURM_PROCID"), "SLURM_NTASKS=4", "srun"),
    ],
)
def test_missing_parts_are_refused_with_what_was_found(environment, found, missing):
    with pytest.raises(ClusterError) as refused:
        find_cluster(environment)
    before, after = str(refused.value).split("Missing: ")
    assert found in before
    assert missing in after


@pytest.mark.parametrize(
    "environment, message",
    [
        ({**TFDP, "TFDP_RANK": "2"}, "from 0 to 1.*Received: 2.*TFDP_RANK=2"),
        ({**TFDP, "TFDP_RANK": "-1"}, "TFDP_RANK must be .*Received: '-1'"),
        ({**TFDP, "TFDP_WORKERS": "0"}, "TFDP_WORKERS must be .*Received: '0'"),
        ({**TFDP, "TFDP_COORDINATOR": "host"}, "'host:port'.*Received: 'host'"),
        ({**TFDP, "TFDP_COORDINATOR": "host:99999"}, "65535.*'host:99999'"),
        ({**TFDP, "TFDP_DEVICES_PER_WORKER": "two"}, "DEVICES_PER_WORKER.*'two'"),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, "WORLD_SIZE must be .*'4.0'"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n["}, "list of nodes"),
        ({**JOBSET, "JOB_INDEX": "1"}, "JOB_INDEX=1.*replicas to 1"),
        ({"TF_CONFIG": "worker 1"}, "TF_CONFIG is not JSON.*worker 1"),
        ({"TF_CONFIG": "[1]"}, r"JSON object.*\[1\]"),
        ({"TF_CONFIG": '{"cluster": {"worker": "a:1"}}'}, "lists of 'host:port'"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "task must hold a type"),
        (tf_config({"worker": ["a:1", "b:1"]}, "worker", 2), "worker 2.*lists 2"),
        (tf_config({"worker": ["a:1"]}, "chief", 0), "chief 0.*lists 0"),
        (tf_config({"worker": ["a:1"]}, "boss", 0), "task must hold a type"),
        (tf_config({"worker": ["a:1"], "ps": ["p:1"]}, "ps", 0), "no parameter"),
        (tf_config({"worker": ["a:1"], "ps": ["p:1"]}, "worker", 0), "lists param"),
        (tf_config({"worker": ["a:1"]}, "evaluator", 0), "model.evaluate"),
        (tf_config({"master": ["a:1"], "worker": ["a:1"]}, "worker", 0), "a:1 twice"),
        (tf_config({"worker": ["a", "b"]}, "worker", 0), "'host:port'"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-9999999999]"}, "9999999999 hosts"),
        (tf_config({"worker": ["a:1"] * 10**6}, "worker", 0), "a:1 twice"),
        (tf_config({"worker": ["a:1"]}, "worker", "9" * 5000), "task index must be"),
        ({"TF_CONFIG": "[" * 100_000}, "nested too deeply"),
        ({"TF_CONFIG": "9" * 5000}, "not JSON"),
        ({**TORCHRUN, "MASTER_ADDR": "a" * 64}, "63 between dots"),
        ({**TORCHRUN, "MASTER_ADDR": ".".join("a" * 200)}, "at most 253 characters"),
    ],
    ids=range(28),
)
def test_nonsense_is_refused_with_the_value(environment, message):
    with pytest.raises(ClusterError, match=message):
        find_cluster(environment)


HUGE = [str(10**30), str(2**63), "9" * 5000, "9" * 10**6]


@pytest.mark.parametrize("value", HUGE, ids=lambda value: f"{len(value)} digits")
@pytest.mark.parametrize("environment, expected", SOURCES, ids=NAMES)
def test_huge_numbers_are_refused_wherever_they_stand(environment, expected, value):
    """Every variable of every launcher in turn: some are names, some are not read."""
    for name in (*environment, "TFDP_DEVICES_PER_WORKER"):
        try:
            found = find_cluster({**environment, name: value})
        except ClusterError as error:
            assert len(str(error)) < 5000
        else:
            changed = dataclasses.replace(found, coordinator=expected.coordinator)
            assert changed == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 10**30},
        {"workers": 10**5000},
        {"workers": 10**9, "rank": 10**8},
        {"rank": 10**5000},
        {"coordinator": "a" * 10**6 + ":2000"},
        {"workers": 0},
        {"workers": True},
        {"workers": "2"},
        {"rank": 2},
        {"rank": -1},
        {"coordinator": "node1"},
        {"coordinator": "node1:0"},
        {"coordinator": "::1:2000"},
        {"coordinator": ("node1", 2000)},
        {"devices_per_worker": 0},
    ],
)
def test_a_cluster_is_checked_when_made(changes):
    facts = {"workers": 2, "rank": 1, "coordinator": "[::1]:2000", **changes}
    with pytest.raises(ConfigurationError, match="Received"):
        Cluster(**facts)


def test_an_ipv6_coordinator_gets_its_brackets():
    found = find_cluster({**TORCHRUN, "MASTER_ADDR": "fd00::1"})
    assert found.coordinator == "[fd00::1]:29500"


@pytest.mark.parametrize(
    "environment, code, expected",
    [
        ({}, 0, "the environment names no cluster"),
        (TFDP, 0, "Cluster(workers=2, rank=1, coordinator='127.0.0.1:23456'"),
        ({"TFDP_RANK": "1"}, 1, "Missing: TFDP_WORKERS, TFDP_COORDINATOR"),
    ],
)
def test_the_module_prints_what_it_finds(environment, code, expected):
    done = run_program(
        "import os, runpy\n"
        f"os.environ.clear(); os.environ.update({environment!r})\n"
        "runpy.run_module('tfdp.cluster', run_name='__main__')"
    )
    assert done.returncode == code
    assert expected in (done.stderr if code else done.stdout)


@pytest.mark.parametrize(
    "environment, what",
    [(["TFDP_WORKERS=2"], "It is list"), ({"TFDP_WORKERS": 2}, "TFDP_WORKERS is int")],
)
def test_what_is_no_environment_is_refused(environment, what):
    with pytest.raises(ClusterError, match=f"a dict of texts.* {what}"):
        find_cluster(environment)
