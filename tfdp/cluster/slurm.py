"""Slurm: the variables of a job step, and its compressed lists of hosts.

`srun` gives every task SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST. The
batch script itself, and a shell of `salloc`, have the variables of the whole job with
SLURM_PROCID=0 or none at all, but are one process: only a step names a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdp.cluster.claim import Claim, integer, present
from tfdp.cluster.description import join_address
from tfdp.errors import ClusterError

__all__ = ["expand_hosts", "read_slurm", "slurm_port"]

_Names = tuple[str, ...]
TASKS: _Names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NODES: _Names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NODE_COUNTS: _Names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
JOB: _Names = ("SLURM_JOB_ID", "SLURM_JOBID")
STEP: _Names = ("SLURM_STEP_ID", "SLURM_STEPID")
FIRST_PORT, PORTS = 20000, 10000


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
    return FIRST_PORT + (job + 101 * step) % PORTS


def expand_hosts(text: str) -> list[str]:
    """The hosts of Slurm's compressed list, in its order.

    >>> expand_hosts("node[01-03,7],other")
    ['node01', 'node02', 'node03', 'node7', 'other']
    >>> expand_hosts("rack[1-2]n[0-1]-ib")
    ['rack1n0-ib', 'rack1n1-ib', 'rack2n0-ib', 'rack2n1-ib']

    Raises:
      ClusterError: when the text is not such a list.
    """
    # A comma separates hosts only outside of brackets.
    items = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", text)
    if not items or ",".join(items) != text.strip():
        raise _bad_list(text)
    return [host for item in items for host in _expand_item(item, text)]


def _expand_item(item: str, text: str) -> list[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, after = rest.partition("]")
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise _bad_list(text)
        first, last = match[1], match[2] or match[1]
        # The width of the first number holds for all: 01-03, 098-102.
        numbers += [
            str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)
        ]
    if not numbers:
        raise _bad_list(text)
    tails = _expand_item(after, text) if after else [""]
    return [f"{before}{number}{tail}" for number in numbers for tail in tails]


def _bad_list(text: str) -> ClusterError:
    return ClusterError(
        f"Slurm's list of nodes must look like node[01-03,7],other. Received: {text!r}."
    )


def _first(found: Mapping[str, str], names: _Names) -> str | None:
    return next((found[name] for name in names if name in found), None)


def _first_integer(found: Mapping[str, str], names: _Names, least: int) -> int | None:
    return next((integer(found, name, least) for name in names if name in found), None)
