"""The Kubernetes manifest, checked by hand against the API's schema and rules."""

import re

import pytest

from tfdp.cluster import Cluster, find_cluster
from tfdp.errors import ConfigurationError
from tfdp.launch.kubernetes import (
    PodOptions,
    Resources,
    Volume,
    job_name,
    manifest,
    parse_variable,
    yaml_text,
)
from tfdp.launch.program import Program

KEY = "0123456789abcdef"
PROGRAM = Program("examples/digits.py", ("--epochs", "3"))
# Field -> type, or for a nested object its own table; [table] is a list of objects.
# From the API reference of v1 Service, batch/v1 Job and v1 Pod; what is not listed here
# is refused, so a misspelt field is seen.
LABELS = {"tfdp-job": str}
SERVICE = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": LABELS},
    "spec": {
        "clusterIP": str,
        "selector": LABELS,
        "publishNotReadyAddresses": bool,
        "ports": [{"name": str, "port": int}],
    },
}
SECRET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": LABELS},
    "type": str,
    "immutable": bool,
    "stringData": {"job-key": str},
}
# The last of `env`; the others hold a value.
KEY_VARIABLE = {"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}
POD = {
    "subdomain": str,
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "containers": [
        {
            "name": str,
            "image": str,
            "command": [str],
            "env": [{"name": str, "value": str}],
            "ports": [{"name": str, "containerPort": int}],
        }
    ],
}
JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": LABELS},
    "spec": {
        "completions": int,
        "parallelism": int,
        "completionMode": str,
        "backoffLimit": int,
        "template": {"metadata": {"labels": LABELS}, "spec": POD},
    },
}
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def mismatches(value, schema, path=""):
    """Paths at which a value has other fields or types than the schema."""
    if isinstance(schema, dict):
        if not isinstance(value, dict) or value.keys() != schema.keys():
            return [path]
        return [
            found
            for name in schema
            for found in mismatches(value[name], schema[name], f"{path}.{name}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [path]
        return [
            found
            for place, item in enumerate(value)
            for found in mismatches(item, schema[0], f"{path}[{place}]")
        ]
    return [] if type(value) is schema else [path]


def test_the_fields_are_those_of_the_api():
    made = manifest(PROGRAM, "image:1", workers=4, devices_per_worker=2, job_key=KEY)
    service, secret, job = made
    assert mismatches(service, SERVICE) == []
    assert mismatches(secret, SECRET) == []
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert mismatches(container["env"].pop(), KEY_VARIABLE) == []
    assert mismatches(job, JOB) == []
    assert (secret["apiVersion"], secret["kind"]) == ("v1", "Secret")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")


def test_the_schema_check_sees_a_wrong_field():
    _, _, job = manifest(PROGRAM, "image:1", workers=4, job_key=KEY)
    job["spec"]["completions"] = "4"
    job["spec"]["template"]["spec"]["containers"][0]["environment"] = []
    assert mismatches(job, JOB) == [
        ".spec.completions",
        ".spec.template.spec.containers[0]",
    ]


def test_all_pods_run_at_once_and_one_failure_ends_the_job():
    _, _, job = manifest(PROGRAM, "image:1", workers=4, grace_seconds=2.5, job_key=KEY)
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert (spec["completions"], spec["parallelism"]) == (4, 4)
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 3
    *_, job = manifest(PROGRAM, "image:1", workers=4, job_key=KEY)
    # As long as Kubernetes waits where nothing is said.
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30


RULES = [
    {
        "action": str,
        "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
    },
    {"action": str, "onPodConditions": [{"type": str, "status": str}]},
]


def test_restarts_are_those_of_kubernetes():
    made = manifest(PROGRAM, "image:1", workers=4, max_restarts=3, job_key=KEY)
    *_, job = made
    spec = job["spec"]
    # A policy of failures needs a pod that is not started again in its place.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    # A failure of one worker is one of each.
    assert spec["backoffLimit"] == 12
    policy = spec.pop("podFailurePolicy")
    for rule, schema in zip(policy["rules"], RULES, strict=True):
        assert mismatches(rule, schema) == []
    saved, disrupted = policy["rules"]
    assert saved["action"] == disrupted["action"] == "Ignore"
    assert saved["onExitCodes"]["values"] == [75]
    (container,) = spec["template"]["spec"]["containers"]
    assert saved["onExitCodes"]["containerName"] == container["name"]
    container["env"].pop()  # the key; see KEY_VARIABLE
    assert mismatches(job, JOB) == []


def test_the_service_gives_the_pods_their_names():
    service, _, job = manifest(PROGRAM, "image:1", workers=4, port=2345, job_key=KEY)
    template = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["ports"][0]["port"] == 2345


@pytest.mark.parametrize("rank", [0, 3])
def test_a_pod_finds_its_cluster(rank):
    _, secret, job = manifest(
        PROGRAM, "image:1", workers=4, devices_per_worker=2, job_key=KEY
    )
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *plain, key = container["env"]
    environment = {item["name"]: item["value"] for item in plain}
    place = key["valueFrom"]["secretKeyRef"]
    assert place["name"] == secret["metadata"]["name"]
    environment[key["name"]] = secret["stringData"][place["key"]]
    # Kubernetes adds the index, and names pod i of a Job JOB-i.SUBDOMAIN.
    environment["JOB_COMPLETION_INDEX"] = str(rank)
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]
    address = f"{name}-0.{subdomain['subdomain']}"
    port = container["ports"][0]["containerPort"]
    assert find_cluster(environment) == Cluster(
        4, rank, f"{address}:{port}", "Kubernetes", devices_per_worker=2
    )
    assert find_cluster(environment).job_key == KEY
    assert KEY not in str(job)
    assert container["command"] == ["python", *PROGRAM.command("")[1:]]


@pytest.mark.parametrize(
    "target, is_module",
    [
        ("examples/My_Train.py", False),
        ("3d.v2.py", False),
        ("__main__.py", False),
        ("package.train", True),
        ("x" * 90 + ".py", False),
        ("-" * 60 + "x.py", False),
        ("ü.py", False),
    ],
)
def test_names_are_dns_labels(target, is_module):
    name = job_name(Program(target, (), is_module))
    assert DNS_LABEL.fullmatch(name)
    assert len(f"{name}-99999") <= 63


JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": LABELS},
    "spec": {
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
        },
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "replicatedJobs": [{"name": str, "replicas": int, "template": dict}],
    },
}


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_jobset_starts_all_pods_again_at_once(max_restarts):
    secret, jobset = manifest(
        PROGRAM,
        "image:1",
        workers=4,
        max_restarts=max_restarts,
        as_jobset=True,
        job_key=KEY,
    )
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated.pop("template")["spec"]
    replicated["template"] = {}
    failures = jobset["spec"]["failurePolicy"]
    assert failures["maxRestarts"] == max_restarts
    if max_restarts:
        # A pod that has saved ends the Job for a reason that the JobSet does not count.
        assert failures["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
        saved, disrupted = job["podFailurePolicy"]["rules"]
        assert saved["action"] == disrupted["action"] == "FailJob"
        assert saved["onExitCodes"]["values"] == [75]
    else:
        failures["rules"] = [{"name": "", "action": "", "onJobFailureReasons": [""]}]
        assert "podFailurePolicy" not in job
    assert mismatches(jobset, JOBSET) == []
    assert job["backoffLimit"] == 0  # the first pod that fails ends the Job
    assert (job["completions"], job["parallelism"], replicated["replicas"]) == (4, 4, 1)


@pytest.mark.parametrize("target", ["examples/digits.py", "x" * 90 + ".py"])
def test_a_pod_of_a_jobset_finds_its_cluster(target):
    _, jobset = manifest(
        Program(target), "image:1", workers=4, as_jobset=True, job_key=KEY
    )
    name = jobset["metadata"]["name"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {item["name"]: item.get("value", KEY) for item in container["env"]}
    environment |= {"JOB_COMPLETION_INDEX": "2"}
    # JobSet's names: JOBSET-REPLICATEDJOB-JOBINDEX-PODINDEX.JOBSET, and a random end.
    first = f"{name}-{replicated['name']}-0-0"
    found = find_cluster(environment)
    assert (found.workers, found.rank) == (4, 2)
    assert found.coordinator == f"{first}.{name}:25000"
    assert len(f"{name}-{replicated['name']}-0-99999-abcde") <= 63
    assert DNS_LABEL.fullmatch(name)


def worker_of(job):
    [container] = job["spec"]["template"]["spec"]["containers"]
    return container


def expanded(word):
    """What the kubelet makes of a word of `command` without variables of that name.

    By the rules of the API reference (v1 Container): $$ is a $, and $(NAME) stays where
    NAME is unknown.
    """
    return word.replace("$$", "$")


@pytest.mark.parametrize("word", ["$HOME", "$$", "$", "a$(HOSTNAME)b", "$$(x)", "x$"])
def test_the_program_gets_its_arguments_as_they_were_given(word):
    *_, job = manifest(Program("a.py", (word,)), "image:1", workers=2, job_key=KEY)
    written = worker_of(job)["command"][-1]
    assert expanded(written) == word
    # No single $ is left that could begin a variable.
    assert "$" not in written.replace("$$", "")


def test_a_manifest_that_is_applied_again_changes_no_key_of_a_running_job():
    first, second = (
        manifest(PROGRAM, "image:1", workers=2, job_key=key) for key in (KEY, KEY[::-1])
    )
    differ = [a["kind"] for a, b in zip(first, second, strict=True) if a != b]
    assert differ == ["Secret"]
    # The API server refuses other data for it, and the Job is as it was.
    assert all(made[1]["immutable"] is True for made in (first, second))


def test_a_name_of_ones_own():
    made = manifest(PROGRAM, "image:1", workers=2, name="my-run", job_key=KEY)
    assert {each["metadata"]["name"] for each in made} == {"my-run"}
    variables = {each["name"]: each.get("value") for each in worker_of(made[-1])["env"]}
    assert variables["TFDP_COORDINATOR"] == "my-run-0.my-run:25000"


@pytest.mark.parametrize(
    "name, as_jobset",
    [("My", False), ("1a", False), ("a_b", False), ("-a", False), ("", False)]
    + [("a-", False), ("a" * 53, False), ("a" * 41, True), ("a.b", True)],
)
def test_a_bad_name_is_refused(name, as_jobset):
    with pytest.raises(ConfigurationError, match="--name needs lower-case letters"):
        manifest(PROGRAM, "i", workers=2, name=name, as_jobset=as_jobset, job_key=KEY)


def test_cpus_and_memory_are_requested_and_limited():
    *_, job = manifest(
        PROGRAM,
        "image:1",
        workers=2,
        resources=Resources(gpus=1, cpus=4, memory_bytes=16 * 10**9),
        job_key=KEY,
    )
    worker = worker_of(job)
    own = {"cpu": 4, "memory": 16 * 10**9}
    assert worker["resources"] == {
        "requests": own,
        "limits": {**own, "nvidia.com/gpu": 1},
    }
    # A process would otherwise start a thread for each core of the node.
    variables = {each["name"]: each.get("value") for each in worker["env"]}
    assert variables["OMP_NUM_THREADS"] == variables["TF_NUM_INTRAOP_THREADS"] == "4"
    *_, job = manifest(PROGRAM, "image:1", workers=2, job_key=KEY)
    assert "resources" not in worker_of(job)
    assert "OMP_NUM_THREADS" not in str(job)


def test_gpus_and_volumes_are_asked_for():
    *_, job = manifest(
        PROGRAM,
        "image:1",
        workers=2,
        resources=Resources(gpus=8),
        volumes=[Volume("records", "/data"), Volume("out", "/out")],
        job_key=KEY,
    )
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    sources = {volume.pop("name"): volume for volume in pod["volumes"]}
    mounted = {
        mount["mountPath"]: sources[mount["name"]]
        for mount in container["volumeMounts"]
    }
    assert mounted == {
        "/data": {"persistentVolumeClaim": {"claimName": "records"}},
        "/out": {"persistentVolumeClaim": {"claimName": "out"}},
        "/dev/shm": {"emptyDir": {"medium": "Memory"}},
    }


@pytest.mark.parametrize(
    "paths,gpus", [(("/data", "/data/"), 0), (("/dev/shm",), 8)], ids=str
)
def test_two_volumes_at_one_path_are_refused(paths, gpus):
    volumes = [Volume(f"claim-{place}", path) for place, path in enumerate(paths)]
    with pytest.raises(ConfigurationError, match=f"two volumes at '{paths[0]}'"):
        manifest(
            PROGRAM,
            "image:1",
            workers=2,
            resources=Resources(gpus=gpus),
            volumes=volumes,
            job_key=KEY,
        )


VALUES = {
    "on": "yes",
    "a": [1, 1.5, True, "1", "", "x: y", "- z", "null", "a#b", "é\n😀", "~", [], {}],
    "nested": [{"a": [{"b": {"c": ["d"]}}], "e": "f"}, ["g", ["h"]]],
    "path": "/data/x-y_z.1",
}


def test_yaml_is_read_as_it_was_meant():
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(yaml_text(VALUES)) == VALUES
    made = manifest(
        Program("a.py", ("$HOME", "${x}: y")),
        "image:1",
        workers=2,
        resources=Resources(gpus=1, cpus=2, memory_bytes=10**9),
        max_restarts=1,
        job_key=KEY,
    )
    text = "---\n".join(map(yaml_text, made))
    assert list(yaml.safe_load_all(text)) == made


PROBE = {
    "httpGet": {"path": str, "port": int},
    "timeoutSeconds": int,
    "periodSeconds": int,
    "failureThreshold": int,
}


@pytest.mark.parametrize("as_jobset", [False, True])
def test_probes_spread_secrets_and_variables(as_jobset):
    more = PodOptions(9400, ["registry"], True, {"NCCL_SOCKET_IFNAME": "eth0"})
    *_, job = manifest(
        *(PROGRAM, "image"), workers=2, as_jobset=as_jobset, job_key=KEY, more=more
    )
    spec = job["spec"]
    if as_jobset:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    [worker] = pod["containers"]
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert mismatches(worker[name], PROBE) == []
        assert worker[name]["httpGet"]["port"] == 9400
    assert worker["ports"][1] == {"name": "metrics", "containerPort": 9400}
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in worker["env"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    [spread] = pod["topologySpreadConstraints"]
    labels = spread.pop("labelSelector")["matchLabels"]
    assert labels.items() <= spec["template"]["metadata"]["labels"].items()
    assert spread == {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
    }


@pytest.mark.parametrize("text", ["NCCL", "1A=2", "=x", "TFDP_WORKERS=3"])
def test_a_bad_variable_is_refused(text):
    with pytest.raises(ConfigurationError, match="--env"):
        parse_variable(text)


def test_a_value_may_hold_anything():
    assert parse_variable("A=b=$c") == ("A", "b=$c")
