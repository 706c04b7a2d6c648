"""Manifests for `kubectl apply -f -`: an Indexed Job or a JobSet, and its Secret.

Pod i is worker i: JOB_COMPLETION_INDEX=i. Worker 0 has an address before it runs: a
Service names a Job's pods; a JobSet's controller (https://jobset.sigs.k8s.io, installed
separately) names its pods and restarts all at once. The Secret holds the job's key.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.checks import integer_from
from tfdp.cluster.job_key import JOB_KEY
from tfdp.cluster.launchers import DEFAULT_PORT
from tfdp.cluster.progress import START_AGAIN
from tfdp.errors import ConfigurationError
from tfdp.launch.environment import UNBUFFERED, device_variables, thread_variables
from tfdp.launch.program import Program
from tfdp.plan.sizes import bytes_of

# A pod's name, the Job's plus "-INDEX", is a DNS label of at most 63 characters.
MOST_NAME_CHARACTERS = 52
MOST_JOBSET_CHARACTERS = 40  # a JobSet's pod is called NAME-workers-0-INDEX-XXXXX
REPLICATED_JOB = "workers"
LABEL = "tfdp-job"
SECRET_ENTRY = "job-key"
GPU = "nvidia.com/gpu"  # the resource of NVIDIA's device plugin
# What Kubernetes itself waits between SIGTERM and SIGKILL: workers save meanwhile.
GRACE_SECONDS = 30.0
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
PULL_SECRET = "--image-pull-secret"  # noqa: S105
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# NCCL uses shared memory, of which a container has only 64 MiB by default.
SHARED_MEMORY = "/dev/shm"  # noqa: S108


@dataclasses.dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and its mount path in the workers."""

    claim: str
    path: str


@dataclasses.dataclass(frozen=True)
class Resources:
    """The resources of each pod, also its limits; 0: neither request nor limit."""

    gpus: int = 0
    cpus: int = 0
    memory_bytes: int = 0

    def fields(self) -> dict[str, dict[str, Any]]:
        """`resources` of a container; {} if nothing is requested."""
        wanted: dict[str, Any] = {}
        if self.cpus:
            wanted["cpu"] = self.cpus
        if self.memory_bytes:
            wanted["memory"] = self.memory_bytes
        limits = {**wanted, **({GPU: self.gpus} if self.gpus else {})}
        return {
            **({"requests": wanted} if wanted else {}),
            **({"limits": limits} if limits else {}),
        }


@dataclasses.dataclass(frozen=True)
class PodOptions:
    """Options of each pod.

    Args:
      probe_port: of `tfdp.callbacks.Prometheus`; None: the program has none.
      pull_secrets: Secrets with which the image is pulled.
      spreads: whether the scheduler prefers a node of its own for each pod.
      variables: of the environment, besides tfdp's.
    """

    probe_port: int | None = None
    pull_secrets: Sequence[str] = ()
    spreads: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def add_to(self, pod: dict[str, Any], job: str) -> None:
        """Adds them to the spec of a pod of `job`."""
        if self.probe_port is not None:
            [worker] = pod["containers"]
            port = {"name": "metrics", "containerPort": self.probe_port}
            worker["ports"].append(port)
            worker.update(_probes(self.probe_port))
        if self.pull_secrets:
            pod["imagePullSecrets"] = [{"name": one} for one in self.pull_secrets]
        if self.spreads:
            pod["topologySpreadConstraints"] = [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {LABEL: job}},
                }
            ]


def _probes(port: int) -> dict[str, Any]:
    """Probes of a container that trains with `tfdp.callbacks.Prometheus`."""

    def ask(path: str, period_seconds: int, failures: int) -> dict[str, Any]:
        get = {"path": path, "port": port}
        numbers = {"periodSeconds": period_seconds, "failureThreshold": failures}
        return {"httpGet": get, "timeoutSeconds": 5, **numbers}

    return {
        # The port opens when `fit` begins: a program may prepare for two hours.
        "startupProbe": ask("/healthy", 10, 720),
        "livenessProbe": ask("/healthy", 30, 3),
        "readinessProbe": ask("/ready", 10, 3),
    }


def manifest(
    program: Program,
    image: str,
    *,
    workers: int,
    name: str | None = None,
    devices_per_worker: int | None = None,
    port: int | None = None,
    grace_seconds: float = GRACE_SECONDS,
    max_restarts: int = 0,
    resources: Resources = Resources(),
    volumes: Sequence[Volume] = (),
    as_jobset: bool = False,
    job_key: str,
    more: PodOptions | None = None,
) -> list[dict[str, Any]]:
    """The Service, the Secret and the Job; or the Secret and the JobSet.

    Args:
      image: container image with Python, tfdp and the program.
      workers: number of pods, at least 1, all running at the same time.
      name: of all objects; None: "tfdp-" and the program's.
      port: of worker 0, in its pod.
      max_restarts: failures of the group to restart after; 0: one failed pod ends all.
      resources: of each pod.
      volumes: claims that all pods mount.
      more: other options of each pod.
    """
    more = more or PodOptions()
    if not image or any(character.isspace() for character in image):
        raise ConfigurationError(
            "--kubernetes needs the name of a container image, as "
            f"registry.example/train:1. Received: {image!r}."
        )
    most = MOST_JOBSET_CHARACTERS if as_jobset else MOST_NAME_CHARACTERS
    name = job_name(program, most) if name is None else checked_name(name, most)
    port = port or DEFAULT_PORT
    first = f"{name}-{REPLICATED_JOB}-0-0" if as_jobset else f"{name}-0"
    variables = {
        **more.variables,
        **UNBUFFERED,
        "TFDP_WORKERS": str(workers),
        "TFDP_COORDINATOR": f"{first}.{name}:{port}",
        **device_variables(devices_per_worker),
        # A limit of time on all cores of the node: one thread per core would wait.
        **(thread_variables(resources.cpus) if resources.cpus else {}),
    }
    # Kubernetes replaces $(NAME) by a variable, and $$ by $.
    command = [word.replace("$", "$$") for word in program.command("python")]
    worker = _container(image, command, variables, name, port)
    if fields := resources.fields():
        worker["resources"] = fields
    spec = _pod(worker, grace_seconds, _mounts(resources.gpus, volumes))
    more.add_to(spec, name)
    secret = _object(
        *("v1", "Secret", name),
        type="Opaque",
        # Applied again, the manifest has a new key, which pods that are replaced later
        # would use among those with the first one: the cluster refuses it.
        immutable=True,
        stringData={SECRET_ENTRY: job_key},
    )
    if as_jobset:
        return [secret, _jobset(name, workers, spec, max_restarts)]
    service = {
        "clusterIP": "None",  # headless: a DNS name per pod
        "selector": {LABEL: name},
        # Workers resolve worker 0 while it still imports TensorFlow.
        "publishNotReadyAddresses": True,
        "ports": [{"name": "coordinator", "port": port}],
    }
    job = _job(name, workers, {"subdomain": name, **spec}, max_restarts)
    return [_object("v1", "Service", name, spec=service), secret, job]


def _object(version: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {LABEL: name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _indexed(name: str, workers: int, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "completions": workers,
        "parallelism": workers,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod},
    }


def _job(
    name: str, workers: int, pod: dict[str, Any], max_restarts: int
) -> dict[str, Any]:
    spec = _indexed(name, workers, pod)
    if max_restarts:
        # Kubernetes replaces and counts single pods, and a failed one takes down all.
        # With 0 the first failed pod ends the Job, which stops the others.
        spec["backoffLimit"] = max_restarts * workers
        spec["podFailurePolicy"] = {"rules": _rules("Ignore", pod)}
    return _object("batch/v1", "Job", name, spec=spec)


def _jobset(
    name: str, workers: int, pod: dict[str, Any], max_restarts: int
) -> dict[str, Any]:
    job = _indexed(name, workers, pod)
    failures: dict[str, Any] = {"maxRestarts": max_restarts}
    if max_restarts:
        # The Job then fails with a reason that the JobSet does not count.
        job["podFailurePolicy"] = {"rules": _rules("FailJob", pod)}
        failures["rules"] = [
            {
                "name": "saved",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ]
    replicated = {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}
    spec = {
        "failurePolicy": failures,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [replicated],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec=spec)


def _rules(action: str, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Rules for uncounted ends: a pod that has saved, or was evicted."""
    container = pod["containers"][0]["name"]
    codes = {"containerName": container, "operator": "In", "values": [START_AGAIN]}
    evicted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": action, "onExitCodes": codes},
        {"action": action, "onPodConditions": [evicted]},
    ]


def job_name(program: Program, most_characters: int = MOST_NAME_CHARACTERS) -> str:
    """A valid Kubernetes name, derived from the program's."""
    words = re.sub(r"[^a-z0-9]+", "-", program.name.lower())
    return f"tfdp-{words}"[:most_characters].strip("-")


def checked_name(name: str, most_characters: int) -> str:
    """`name`, or a ConfigurationError if it cannot be the name of these objects."""
    if not NAME.fullmatch(name) or len(name) > most_characters:
        raise ConfigurationError(
            "--name needs lower-case letters, digits and hyphens, begins with a letter "
            f"and has at most {most_characters} characters. Received: {name!r}."
        )
    return name


def parse_variable(text: str) -> tuple[str, str]:
    """Parses `NAME=VALUE`; raises ConfigurationError for anything else."""
    name, is_there, value = text.partition("=")
    if not is_there or not VARIABLE_NAME.fullmatch(name):
        raise ConfigurationError(
            "--env needs NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0. Received: "
            f"{text!r}."
        )
    if name.startswith("TFDP_"):
        raise ConfigurationError(
            f"--env cannot set {name}: tfdp launch sets the TFDP_ variables of pods."
        )
    return name, value


def checked_secret(name: str) -> str:
    """`name`, or a ConfigurationError if no Secret can have it."""
    if not CLAIM_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{PULL_SECRET} needs the name of a Secret of the namespace. "
            f"Received: {name!r}."
        )
    return name


def parse_volume(text: str) -> Volume:
    """Parses `CLAIM:/PATH`; raises ConfigurationError for anything else."""
    claim, _, path = text.partition(":")
    if not CLAIM_NAME.fullmatch(claim) or not path.startswith("/") or ":" in path:
        raise ConfigurationError(
            "--volume needs CLAIM:/PATH, the name of a PersistentVolumeClaim and where "
            f"the workers are to mount it. Received: {text!r}."
        )
    return Volume(claim, path)


def _container(
    image: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    secret: str,
    port: int,
) -> dict[str, Any]:
    key = {"secretKeyRef": {"name": secret, "key": SECRET_ENTRY}}
    return {
        "name": "worker",
        "image": image,
        "command": list(command),
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": JOB_KEY, "valueFrom": key},
        ],
        "ports": [{"name": "coordinator", "containerPort": port}],
    }


def _mounts(gpus: int, volumes: Sequence[Volume]) -> list[tuple[str, dict[str, Any]]]:
    """(path, source of the volume) for each."""
    claims: list[tuple[str, dict[str, Any]]] = [
        (volume.path, {"persistentVolumeClaim": {"claimName": volume.claim}})
        for volume in volumes
    ]
    memory = (SHARED_MEMORY, {"emptyDir": {"medium": "Memory"}})
    found = [*claims, memory] if gpus else claims
    paths = [path.rstrip("/") for path, _ in found]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigurationError(
                f"--volume cannot mount two volumes at {path!r}. Give each its own path"
                f"{'' if path != SHARED_MEMORY else '; --gpus mounts memory there'}."
            )
    return found


def _pod(
    container: dict[str, Any],
    grace_seconds: float,
    mounts: Sequence[tuple[str, dict[str, Any]]],
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(grace_seconds),
        "containers": [container],
    }
    if mounts:
        container["volumeMounts"] = [
            {"name": f"volume-{place}", "mountPath": path}
            for place, (path, _) in enumerate(mounts)
        ]
        spec["volumes"] = [
            {"name": f"volume-{place}", **source}
            for place, (_, source) in enumerate(mounts)
        ]
    return spec


# Strings that YAML reads as text without quotes, except READ_OTHERWISE.
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
READ_OTHERWISE = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def yaml_text(value: Any) -> str:
    """Block-style YAML of nested dicts, lists, str, int, bool and float."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for item in value.items() for line in _entry(*item)]
    if isinstance(value, list) and value:
        return [line for item in value for line in _item(item)]
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    inner = _lines(value)
    if isinstance(value, dict) and value:
        return [f"{_scalar(key)}:", *(f"  {line}" for line in inner)]
    if isinstance(value, list) and value:
        return [f"{_scalar(key)}:", *inner]
    return [f"{_scalar(key)}: {inner[0]}"]


def _item(value: Any) -> list[str]:
    first, *others = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in others)]


def _scalar(value: Any) -> str:
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    if is_plain and value.lower() not in READ_OTHERWISE:
        return str(value)
    # JSON is YAML, but without surrogate pairs.
    return json.dumps(value, ensure_ascii=False)


def add_manifest_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only `--kubernetes` has."""
    add = parser.add_argument_group("with --kubernetes").add_argument
    name = "of the Job and its other objects (default: tfdp- and the program's)"
    add("--name", metavar="NAME", help=name)
    cpus = "cores of each worker, and as many threads"
    add("--cpus", type=integer_from(1), default=0, metavar="C", help=cpus)
    memory = "of each worker, such as 16GB or 16GiB"
    add("--memory", metavar="SIZE", help=memory)
    gpus = "NVIDIA GPUs of each worker"
    add("--gpus", type=integer_from(0), default=0, metavar="G", help=gpus)
    volume = "a PersistentVolumeClaim and its path in the workers; may be repeated"
    add("--volume", action="append", default=[], metavar="CLAIM:/PATH", help=volume)
    add("--jobset", action="store_true", help="a JobSet, not a Job")
    probes = "probes of tfdp.callbacks.Prometheus(port=P), which the program has"
    add("--probe-port", type=integer_from(1, 65535), metavar="P", help=probes)
    secret = "a Secret with which the image is pulled; may be repeated"
    add(PULL_SECRET, action="append", default=[], metavar="NAME", help=secret)
    spread = "prefer a node of its own for each worker"
    add("--spread", action="store_true", help=spread)
    variable = "a variable of the workers' environment; may be repeated"
    add("--env", action="append", default=[], metavar="NAME=VALUE", help=variable)


def resources_of(options: argparse.Namespace) -> Resources:
    """`--gpus`, `--cpus` and `--memory`."""
    memory_bytes = 0 if options.memory is None else bytes_of(options.memory)
    return Resources(options.gpus, options.cpus, memory_bytes)


def pod_options_of(options: argparse.Namespace) -> PodOptions:
    """`--probe-port`, `--image-pull-secret`, `--spread` and `--env`."""
    return PodOptions(
        options.probe_port,
        [checked_secret(name) for name in options.image_pull_secret],
        options.spread,
        dict(map(parse_variable, options.env)),
    )


def check_manifest_options(options: argparse.Namespace) -> None:
    """Raises a ConfigurationError for an option that needs `--kubernetes`."""
    for name, is_given, instead in (
        ("--name", options.name, "It names the Job."),
        ("--cpus", options.cpus, "Workers share the cores that they find."),
        ("--memory", options.memory, "Workers take the memory that they find."),
        ("--gpus", options.gpus, "Workers take the GPUs that they find."),
        ("--volume", options.volume, "Workers see the files of their machine."),
        ("--jobset", options.jobset, "It is a kind of manifest."),
        ("--probe-port", options.probe_port, "Nothing probes the workers."),
        (PULL_SECRET, options.image_pull_secret, "There is no image."),
        ("--spread", options.spread, "--hosts names the machines."),
        ("--env", options.env, "Set the variable in front of the command."),
    ):
        if is_given:
            raise ConfigurationError(
                f"{name} has no effect without --kubernetes IMAGE. {instead}"
            )
