"""Manifests for `kubectl apply -f -`: an Indexed Job or a JobSet, and its Secret.

Pod i is worker i: Kubernetes gives it JOB_COMPLETION_INDEX=i and a name, so that worker
0 has an address before it runs. A Job's pods are named by a Service of their own; a
JobSet's by the controller's (https://jobset.sigs.k8s.io, installed beside Kubernetes),
which also starts all pods again at once. The Secret holds the job's key.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.cluster.job_key import JOB_KEY
from tfdp.cluster.launchers import DEFAULT_PORT
from tfdp.cluster.progress import START_AGAIN
from tfdp.errors import ConfigurationError
from tfdp.launch.environment import UNBUFFERED, device_variables
from tfdp.launch.program import Program

# A pod's name, the Job's with "-INDEX", is a DNS label of at most 63 characters.
MOST_NAME_CHARACTERS = 52
# A JobSet's is NAME-workers-0-INDEX-XXXXX.
MOST_JOBSET_CHARACTERS = 40
REPLICATED_JOB = "workers"
LABEL = "tfdp-job"


def manifest(
    program: Program,
    image: str,
    *,
    workers: int,
    devices_per_worker: int | None = None,
    port: int | None = None,
    grace_seconds: float = 5.0,
    max_restarts: int = 0,
    gpus: int = 0,
    volumes: Sequence[Volume] = (),
    as_jobset: bool = False,
    job_key: str,
) -> list[dict[str, Any]]:
    """The Service, the Secret and the Job; or the Secret and the JobSet.

    Args:
      image: container image that holds Python, tfdp and the program.
      workers: pods, at least 1, all running at the same time.
      port: of worker 0, in its pod.
      max_restarts: how many failures of the group may be followed by a restart; 0:
        the first failed pod ends the Job.
      gpus: of NVIDIA, for each pod.
      volumes: claims that all pods mount.
      as_jobset: a JobSet in the Job's place.
      job_key: see `Cluster`.

    Raises:
      ConfigurationError: when the image's name is empty or holds spaces.
    """
    name, port = job_name(program), port or DEFAULT_PORT
    if as_jobset:
        name = name[:MOST_JOBSET_CHARACTERS].strip("-")
    first = f"{name}-{REPLICATED_JOB}-0-0" if as_jobset else f"{name}-0"
    spec = pod(
        checked_image(image),
        program.command("python"),
        variables={
            **UNBUFFERED,
            "TFDP_WORKERS": str(workers),
            "TFDP_COORDINATOR": f"{first}.{name}:{port}",
            **device_variables(devices_per_worker),
        },
        secret=name,
        port=port,
        grace_seconds=grace_seconds,
        gpus=gpus,
        volumes=volumes,
    )
    secret = _secret(name, job_key)
    if as_jobset:
        return [secret, _jobset(name, workers, spec, max_restarts)]
    job = _job(name, workers, {"subdomain": name, **spec}, max_restarts)
    return [_service(name, port), secret, job]


def _service(name: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "spec": {
            "clusterIP": "None",  # headless: a DNS name for every pod
            "selector": {LABEL: name},
            # Workers look for worker 0 while it still imports TensorFlow.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "coordinator", "port": port}],
        },
    }


def _secret(name: str, job_key: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "type": "Opaque",
        "stringData": {SECRET_ENTRY: job_key},
    }


def _indexed(name: str, workers: int, pod: dict[str, Any]) -> dict[str, Any]:
    """What the Job alone and the one in a JobSet have in common."""
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
        # With 0 the first failed pod ends the Job, which stops the others. Kubernetes
        # replaces pod by pod, and counts each; one that fails takes all with it.
        spec["backoffLimit"] = max_restarts * workers
        spec["podFailurePolicy"] = {"rules": _rules("Ignore", pod)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "spec": spec,
    }


def _jobset(
    name: str, workers: int, pod: dict[str, Any], max_restarts: int
) -> dict[str, Any]:
    job = _indexed(name, workers, pod)
    failures: dict[str, Any] = {"maxRestarts": max_restarts}
    if max_restarts:
        # The Job ends for a reason of its own, which the JobSet does not count.
        job["podFailurePolicy"] = {"rules": _rules("FailJob", pod)}
        failures["rules"] = [
            {
                "name": "saved",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ]
    replicated = {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "spec": {
            "failurePolicy": failures,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [replicated],
        },
    }


def _rules(action: str, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """What is not counted: a pod that has saved, or whose machine was wanted back."""
    codes = {
        "containerName": pod["containers"][0]["name"],
        "operator": "In",
        "values": [START_AGAIN],
    }
    return [
        {"action": action, "onExitCodes": codes},
        {
            "action": action,
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]


def job_name(program: Program) -> str:
    """A name that Kubernetes takes, from the program's.

    >>> job_name(Program("examples/My_Train.py"))
    'tfdp-my-train'
    """
    words = re.sub(r"[^a-z0-9]+", "-", program.name.lower())
    return f"tfdp-{words}"[:MOST_NAME_CHARACTERS].strip("-")


# The pod of one worker: its container, GPUs and volumes.


SECRET_ENTRY = "job-key"
# The resource of NVIDIA's device plugin.
GPU = "nvidia.com/gpu"
CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# NCCL hands over through shared memory, of which a container has 64 MiB.
SHARED_MEMORY = "/dev/shm"  # noqa: S108


@dataclasses.dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where the workers see it."""

    claim: str
    path: str


def parse_volume(text: str) -> Volume:
    """`CLAIM:/PATH`.

    Raises:
      ConfigurationError: when it is none, or Kubernetes has no such names.

    >>> parse_volume("records:/data")
    Volume(claim='records', path='/data')
    """
    claim, _, path = text.partition(":")
    if not CLAIM_NAME.fullmatch(claim) or not path.startswith("/") or ":" in path:
        raise ConfigurationError(
            "--volume needs CLAIM:/PATH, the name of a PersistentVolumeClaim and where "
            f"the workers are to see it. Received: {text!r}."
        )
    return Volume(claim, path)


def checked_image(image: str) -> str:
    """The image's name.

    Raises:
      ConfigurationError: when it is empty or holds spaces.
    """
    if not image or any(character.isspace() for character in image):
        raise ConfigurationError(
            "--kubernetes needs the name of a container image, as "
            f"registry.example/train:1. Received: {image!r}."
        )
    return image


def pod(
    image: str,
    command: Sequence[str],
    *,
    variables: Mapping[str, str],
    secret: str,
    port: int,
    grace_seconds: float,
    gpus: int = 0,
    volumes: Sequence[Volume] = (),
) -> dict[str, Any]:
    """The `spec` of a pod, which is not started again in its place.

    Args:
      image: that holds Python, tfdp and the program.
      command: of the container.
      variables: of its environment.
      secret: the name of the Secret with the job's key.
      port: of worker 0, where all meet.
      grace_seconds: between asking a pod to end and killing it.
      gpus: of NVIDIA, for this pod.
      volumes: claims to mount.
    """
    key = {"secretKeyRef": {"name": secret, "key": SECRET_ENTRY}}
    container: dict[str, Any] = {
        "name": "worker",
        "image": image,
        "command": list(command),
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": JOB_KEY, "valueFrom": key},
        ],
        "ports": [{"name": "coordinator", "containerPort": port}],
    }
    sources: list[tuple[str, dict[str, Any]]] = [
        (volume.path, {"persistentVolumeClaim": {"claimName": volume.claim}})
        for volume in volumes
    ]
    if gpus:
        container["resources"] = {"limits": {GPU: gpus}}
        sources.append((SHARED_MEMORY, {"emptyDir": {"medium": "Memory"}}))
    made: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(grace_seconds),
        "containers": [container],
    }
    if sources:
        container["volumeMounts"] = [
            {"name": f"volume-{place}", "mountPath": path}
            for place, (path, _) in enumerate(sources)
        ]
        made["volumes"] = [
            {"name": f"volume-{place}", **source}
            for place, (_, source) in enumerate(sources)
        ]
    return made


# Plain values as YAML that people edit: block style, what needs it in quotes.


# Words that no reader of YAML takes for anything but text, but for READ_OTHERWISE.
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
READ_OTHERWISE = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def yaml_text(value: Any) -> str:
    """A value of dicts, lists, str, int, bool and float as YAML, with a line's end.

    >>> print(yaml_text({"a": [1, "x: y"], "b": {"on": True}, "c": []}), end="")
    a:
    - 1
    - "x: y"
    b:
      "on": true
    c: []
    """
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
    # JSON is YAML. As it is, and not as pairs of surrogates, which YAML does not have.
    return json.dumps(value, ensure_ascii=False)


# The options of `tfdp launch --kubernetes` that no other way to start knows.


def add_manifest_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares them."""
    parser.add_argument(
        "--jobset", action="store_true", help="with --kubernetes: a JobSet, not a Job"
    )
    parser.add_argument(
        "--gpus",
        type=_count,
        default=0,
        metavar="G",
        help="with --kubernetes: GPUs to ask for, for each worker",
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:/PATH",
        help="with --kubernetes: a PersistentVolumeClaim, and where workers see it",
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"out of range: {text}")
    return number


def refuse_words_of_manifests(options: argparse.Namespace) -> None:
    """Where no manifest is written.

    Raises:
      ConfigurationError: when one of them is given.
    """
    for name, is_given, instead in (
        ("--jobset", options.jobset, "It is a kind of manifest."),
        ("--gpus", options.gpus, "Workers take the GPUs that there are."),
        ("--volume", options.volume, "Workers see the files of their machine."),
    ):
        if is_given:
            raise ConfigurationError(
                f"{name} has no effect without --kubernetes IMAGE. {instead}"
            )
