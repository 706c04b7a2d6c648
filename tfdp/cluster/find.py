"""`find_cluster`: all claims that the environment makes, checked and combined."""

from __future__ import annotations

import collections
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.cluster.addresses import FIRST_PORT, LAST_PORT, with_slurm_address
from tfdp.cluster.description import (
    Claim,
    Cluster,
    integer,
    join_address,
    present,
    shortened,
)
from tfdp.cluster.job_key import find_job_key
from tfdp.cluster.launchers import (
    read_kubernetes,
    read_mpich,
    read_open_mpi,
    read_tfdp,
    read_torchrun,
)
from tfdp.errors import ClusterError
from tfdp.files.checked_json import parse_json

# Slurm: the variables of a job step, and its compressed lists of hosts.
#
# `srun` gives every task SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST.
# The batch script itself, and a shell of `salloc`, have the variables of the whole job
# with SLURM_PROCID=0 or none at all, but are one process: only a step names a cluster.


_Names = tuple[str, ...]
TASKS: _Names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NODES: _Names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NODE_COUNTS: _Names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
JOB: _Names = ("SLURM_JOB_ID", "SLURM_JOBID")
STEP: _Names = ("SLURM_STEP_ID", "SLURM_STEPID")
# More than Slurm manages in one cluster (65,533): a list that names more is no list.
MOST_HOSTS = 100_000
MOST_BRACKETS = 8
MOST_DIGITS = 12


def read_slurm(environment: Mapping[str, str]) -> Claim | None:
    """The claim of a Slurm step; None outside one.

    A batch script of several nodes gets an incomplete claim, so that forgetting
    `srun` is an error and not a training on the first node alone.
    """
    found = present(environment, "SLURM_PROCID")
    for names in (TASKS, NODES, NODE_COUNTS, JOB, STEP):
        found |= dict(list(present(environment, *names).items())[:1])
    rank = integer(found, "SLURM_PROCID", least=0)
    workers = _first_integer(found, TASKS, least=1)
    nodes = _first_integer(found, NODE_COUNTS, least=1)
    # Process 0 of a job without a step is the batch script; others are in a step.
    if not rank and not present(environment, *STEP, NODES[0]):
        if nodes is None or nodes == 1:
            return None
        missing: _Names = (
            f"a job step: this is the batch script of {nodes} nodes. Start the program "
            "with `srun python ...`, or set TFDP_WORKERS=1 to use this node alone",
        )
        return Claim("Slurm", found, missing=missing)

    hosts = _first(found, NODES)
    job = _first_integer(found, JOB, least=0)
    missing = tuple(
        " or ".join(accepted)
        for accepted, value in (
            (("SLURM_PROCID",), rank),
            (TASKS[:2], workers),
            (NODES[:2], hosts),
            (JOB[:1], job),
        )
        if value is None
    )
    coordinator, name = None, ""
    if hosts is not None and job is not None:
        step = _first_integer(found, STEP, least=0) or 0
        name = f"Slurm {job}.{step}"
        coordinator = join_address(expand_hosts(hosts)[0], slurm_port(job, step))
    return Claim(
        source="Slurm",
        found=found,
        workers=workers,
        rank=rank,
        coordinator=coordinator,
        missing=missing,
        one_task_per_node=workers is not None and workers == nodes,
        job=name,
    )


def slurm_port(job: int, step: int = 0) -> int:
    """The coordinator's port, 20000..29999, the same on all hosts without asking.

    Derived from the job's id, so that jobs which share a node differ, and the
    step's, so that the steps of one job do. The ids of jobs that run at a time are
    close to each other; steps are put 101 apart.

    >>> slurm_port(200505), slurm_port(200505, step=1)
    (20505, 20606)
    """
    return FIRST_PORT + (job + 101 * step) % (LAST_PORT + 1 - FIRST_PORT)


def expand_hosts(text: str) -> list[str]:
    """The hosts of Slurm's compressed list, in its order.

    >>> expand_hosts("node[01-03,7],other")
    ['node01', 'node02', 'node03', 'node7', 'other']
    >>> expand_hosts("rack[1-2]n[0-1]-ib")
    ['rack1n0-ib', 'rack1n1-ib', 'rack2n0-ib', 'rack2n1-ib']

    Raises:
      ClusterError: when the text is not such a list, or names over 100,000 hosts.
    """
    # A comma separates hosts only outside of brackets.
    items = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", text)
    if not items or ",".join(items) != text.strip():
        raise _bad_list(text)
    parsed = [_parse_item(item, text) for item in items]
    count = sum(
        math.prod(sum(len(numbers) for _, numbers in ranges) for ranges in brackets)
        for _, brackets in parsed
    )
    if count > MOST_HOSTS:
        raise ClusterError(
            f"Slurm's list of nodes names {count} hosts; at most {MOST_HOSTS} can be "
            f"meant. Received: {shortened(text)!r}."
        )
    return [host for names, ranges in parsed for host in _expand(names, ranges)]


# The width and the numbers of one part of what stands in brackets.
_Part = tuple[int, range]


def _parse_item(item: str, text: str) -> tuple[list[str], list[list[_Part]]]:
    """What stands around the brackets, and what each of them names."""
    pieces = re.split(r"\[([^\]]*)\]", item)
    if len(pieces) > 2 * MOST_BRACKETS + 1:
        raise _bad_list(text)
    brackets = []
    for ranges in pieces[1::2]:
        parts = []
        for part in ranges.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            if not match:
                raise _bad_list(text)
            first, last = match[1], match[2] or match[1]
            if max(len(first), len(last)) > MOST_DIGITS or int(last) < int(first):
                raise _bad_list(text)
            # The width of the first number holds for all: 01-03, 098-102.
            parts.append((len(first), range(int(first), int(last) + 1)))
        brackets.append(parts)
    return pieces[::2], brackets


def _expand(names: Sequence[str], brackets: Sequence[Sequence[_Part]]) -> list[str]:
    numbers = [
        [str(number).zfill(width) for width, numbers in parts for number in numbers]
        for parts in brackets
    ]
    return [
        "".join(itertools.chain(*zip(names, chosen, strict=False), names[-1:]))
        for chosen in itertools.product(*numbers)
    ]


def _bad_list(text: str) -> ClusterError:
    return ClusterError(
        "Slurm's list of nodes must look like node[01-03,7],other. "
        f"Received: {shortened(text)!r}."
    )


def _first(found: Mapping[str, str], names: _Names) -> str | None:
    return next((found[name] for name in names if name in found), None)


def _first_integer(found: Mapping[str, str], names: _Names, least: int) -> int | None:
    return next((integer(found, name, least) for name in names if name in found), None)


# `TF_CONFIG`, TensorFlow's own description of a cluster.
#
# Kubeflow, Vertex AI and SageMaker set it to JSON such as
#
#     {"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]},
#      "task": {"type": "worker", "index": 0}}
#
# The chief is rank 0 and the workers follow; without a chief, worker 0 is.


# In the order of their ranks. `master` is what older services call the chief.
TRAINING_TASKS = ("chief", "master", "worker")
REFUSED_TASKS = {
    "ps": "tfdp has no parameter servers, its workers exchange gradients with each "
    "other: start the job with workers only",
    "evaluator": "an evaluator takes no part in the training: evaluate in the "
    "workers with model.evaluate, or start the evaluator without tfdp",
}


def read_tf_config(environment: Mapping[str, str]) -> Claim | None:
    """The claim of `TF_CONFIG`; None when it is not set or names no cluster.

    Raises:
      ClusterError: when it is not the JSON described above, lists an address twice,
        or needs parameter servers or an evaluator.
    """
    found = present(environment, "TF_CONFIG")
    if not found:
        return None
    config = _parse(found["TF_CONFIG"])
    text = shortened(found["TF_CONFIG"])
    addresses = _addresses(config.get("cluster") or {}, text)
    if not any(addresses.values()):
        return None  # a service that trains on one machine sets it without a cluster
    kind, index = _task(config.get("task"), text)
    if kind in REFUSED_TASKS:
        raise ClusterError(
            f"TF_CONFIG makes this process a task of type {kind!r}: "
            f"{REFUSED_TASKS[kind]}. Received: {text}"
        )
    if addresses.get("ps"):
        raise ClusterError(
            f"TF_CONFIG lists parameter servers: {REFUSED_TASKS['ps']}. "
            f"Received: {text}"
        )
    if index >= len(addresses.get(kind, ())):
        raise ClusterError(
            f"TF_CONFIG says that this is {kind} {index}, but its cluster lists "
            f"{len(addresses.get(kind, ()))} of them. Received: {text}"
        )
    ranks = [
        (kind, index, address)
        for kind in TRAINING_TASKS
        for index, address in enumerate(addresses.get(kind, ()))
    ]
    return Claim(
        source="TF_CONFIG",
        found=found,
        workers=len(ranks),
        rank=[(kind, index) for kind, index, _ in ranks].index((kind, index)),
        coordinator=ranks[0][2],
    )


def _parse(text: str) -> dict[str, Any]:
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON: {error}. Received: {shortened(text)}"
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object. Received: {shortened(text)}"
        )
    return config


def _addresses(cluster: Any, text: str) -> dict[str, list[str]]:
    if not isinstance(cluster, dict) or not all(
        isinstance(listed, list) and all(isinstance(item, str) for item in listed)
        for listed in cluster.values()
    ):
        raise ClusterError(
            "TF_CONFIG's cluster must map task types to lists of 'host:port'. "
            f"Received: {text}"
        )
    training = [item for kind in TRAINING_TASKS for item in cluster.get(kind, ())]
    counts = collections.Counter(training)
    twice = sorted(item for item, count in counts.items() if count > 1)
    if twice:
        raise ClusterError(
            f"TF_CONFIG lists {shortened(', '.join(twice))} twice, so that more "
            "workers are counted than started. List every process once. "
            f"Received: {text}"
        )
    return cluster


def _task(task: Any, text: str) -> tuple[str, int]:
    kind = task.get("type") if isinstance(task, dict) else None
    index = str(task.get("index")) if isinstance(task, dict) else ""
    if kind not in (*TRAINING_TASKS, *REFUSED_TASKS) or not index.isdecimal():
        raise ClusterError(
            "TF_CONFIG's task must hold a type (chief or worker) and an index of at "
            f"least 0. Received: {text}"
        )
    number = integer({"TF_CONFIG's task index": index}, "TF_CONFIG's task index", 0)
    return kind, number or 0


# The first that knows the rank is believed; the others must agree with it.
READERS: tuple[Callable[[Mapping[str, str]], Claim | None], ...] = (
    read_tfdp,
    read_tf_config,
    read_slurm,
    read_kubernetes,
    read_open_mpi,
    read_mpich,
    read_torchrun,
)
MPI_SOURCES = ("Open MPI", "MPICH")


def find_cluster(environment: Mapping[str, str] | None = None) -> Cluster | None:
    """The cluster that the environment names, or None.

    Looked for in this order: `tfdp launch` (TFDP_WORKERS, TFDP_RANK,
    TFDP_COORDINATOR), TF_CONFIG, Slurm, Kubernetes, Open MPI, MPICH, torchrun.
    TFDP_COORDINATOR and TFDP_WORKERS also complete what another launcher leaves out;
    TFDP_JOB_KEY is the job's key, whoever started it.
    A launcher of one process around another launcher, as a Slurm allocation with one
    task (or one per node) around `mpiexec`, is no contradiction. TFDP_WORKERS=1 means
    alone, whatever else is set.

    A Slurm node whose name cannot be looked up here is given the address that Slurm
    has for it (`scontrol show node`).

    Args:
      environment: variables by name; None takes those of this process. With a mapping
        no name is looked up and nobody is asked.

    Raises:
      ClusterError: when a variable has no sense, two launchers contradict each
        other, or a part is missing; the message says what was found.

    >>> cluster = find_cluster({"RANK": "1", "WORLD_SIZE": "2",
    ...                         "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    >>> cluster.rank, cluster.workers, cluster.coordinator, cluster.source
    (1, 2, 'node1:29500', 'torchrun')
    """
    is_own = environment is None
    environment = os.environ if environment is None else environment
    devices = integer(
        present(environment, "TFDP_DEVICES_PER_WORKER"),
        "TFDP_DEVICES_PER_WORKER",
        least=1,
    )
    claims = [claim for read in READERS if (claim := read(environment)) is not None]
    claims = _without_surroundings(claims)
    if not claims:
        return None
    _refuse_contradictions(claims)
    cluster = _combine(claims, devices, find_job_key(environment))
    if is_own and cluster.source == "Slurm" and "TFDP_COORDINATOR" not in environment:
        return with_slurm_address(cluster)
    return cluster


def _without_surroundings(claims: Sequence[Claim]) -> list[Claim]:
    """The claims without those of launchers that merely surround another one."""
    alone = [claim for claim in claims if claim.workers == 1]
    if any(claim.source == "tfdp" for claim in alone):
        return [claim for claim in alone if claim.source == "tfdp"]
    inner = [claim for claim in claims if claim.workers != 1]
    if any(claim.source == "tfdp" and claim.rank is not None for claim in inner):
        # `tfdp launch` in pod 0: the job may have no other, no variable tells.
        inner = [c for c in inner if (c.workers, c.rank) != (None, 0)]
    if not any(claim.rank is not None for claim in inner):
        # Nobody but the lone process knows a rank: it is alone, if nobody objects.
        inner = list(claims)
    mpi = next((claim for claim in inner if claim.source in MPI_SOURCES), None)
    if mpi is None:
        return inner
    # mpiexec starts one daemon per node with srun, and its processes inherit the
    # variables of that step.
    return [
        claim
        for claim in inner
        if not (claim.one_task_per_node and claim.contradicts(mpi))
    ]


def _refuse_contradictions(claims: Sequence[Claim]) -> None:
    for place, claim in enumerate(claims):
        for other in claims[place + 1 :]:
            if claim.contradicts(other):
                raise ClusterError(
                    f"{claim.source} and {other.source} contradict each other: "
                    f"{claim.variables}, but {other.variables}. Start the program "
                    "with one of them, and unset the variables of the other."
                )


def _combine(
    claims: Sequence[Claim], devices: int | None, job_key: str | None
) -> Cluster:
    chosen = next((claim for claim in claims if claim.rank is not None), claims[0])
    # TFDP_COORDINATOR is for the user to set, so it comes before the chosen one's.
    by_preference = [
        *(claim for claim in claims if claim.source == "tfdp"),
        chosen,
        *claims,
    ]
    workers = next((c.workers for c in by_preference if c.workers is not None), None)
    coordinator = next((c.coordinator for c in by_preference if c.coordinator), None)
    lacks_coordinator = coordinator is None and chosen.needs_coordinator
    if chosen.rank is None or workers is None or (lacks_coordinator and workers > 1):
        raise ClusterError(
            "The environment names a cluster, but not all of it. Found: "
            f"{'; '.join(f'{c.variables} ({c.source})' for c in claims)}. "
            f"Missing: {', '.join(chosen.missing)}."
        )
    return _checked(chosen, workers, coordinator, devices, job_key, claims)


def _checked(
    chosen: Claim,
    workers: int,
    coordinator: str | None,
    devices: int | None,
    job_key: str | None,
    claims: Sequence[Claim],
) -> Cluster:
    try:
        return Cluster(
            workers=workers,
            rank=chosen.rank or 0,
            coordinator=coordinator,
            source=chosen.source,
            devices_per_worker=devices,
            job_key=job_key,
            job=chosen.job,
        )
    except ClusterError as error:
        found = "; ".join(f"{claim.variables} ({claim.source})" for claim in claims)
        raise ClusterError(f"{error} Found in the environment: {found}.") from None
