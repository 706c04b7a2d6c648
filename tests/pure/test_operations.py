"""`docs/operations.md` and `deploy/`: the tables and files agree with the code."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.package_source import REPOSITORY, modules
from tfdp.cluster.addresses import FIRST_PORT, LAST_PORT
from tfdp.cluster.find import slurm_port
from tfdp.cluster.launchers import DEFAULT_PORT
from tfdp.cluster.progress import START_AGAIN
from tfdp.hosts import mpi_link
from tfdp.launch.kubernetes import GRACE_SECONDS
from tfdp.launch.output import WorkerLogs
from tfdp.tools.commands import check, cli, plan
from tfdp.tools.runs.run_file import name_of_file
from tfdp.tools.selftest import command as selftest

PAGE = REPOSITORY.joinpath("docs", "operations.md").read_text("utf-8")
HOSTS = REPOSITORY.joinpath("docs", "hosts.md").read_text("utf-8")
DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = DEPLOY.joinpath("Dockerfile").read_text("utf-8")
SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg")


def section(title, page=PAGE):
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(title):
    rows = re.findall(r"^\| (.+?) \|", section(title), re.M)
    return rows[2:]  # without the heading and the line below it


def test_the_table_of_variables_has_all_of_tfdp():
    used = {
        node.value
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"TFDP_[A-Z_]+", node.value)
    }
    told = [
        name
        for cell in first_cells("Environment variables")
        for name in cell.split(", ")
    ]
    assert sorted(n for n in told if n.startswith("TFDP_")) == sorted(used)
    sources = "\n".join(ast.unparse(module.tree) for module in modules())
    others = [name for name in told if not name.startswith("TFDP_")]
    # Python itself reads TMPDIR, in `tempfile`.
    assert [n for n in others if f"'{n}'" not in sources] == ["TMPDIR"]


def test_the_ports_are_those_of_the_code():
    ports = section("Ports")
    assert f"from {FIRST_PORT} to {LAST_PORT}" in ports
    assert f"| {DEFAULT_PORT}; or `--port` |" in ports
    assert "20000 + (job id + 101 x step id) mod 10000" in ports
    assert slurm_port(200_505, 2) == 20_000 + (200_505 + 101 * 2) % 10_000


def test_the_exit_codes_are_those_of_the_code():
    told = first_cells("Exit codes")
    assert {str(START_AGAIN), str(mpi_link.EXIT_CODE)} <= set(told)
    assert f"130, {cli.READER_LEFT}" in told
    for command in (check, plan, selftest):
        assert command.FAILED == 2
    assert (check.HOLDS, check.FAILS, plan.FITS, plan.DOES_NOT_FIT) == (0, 1, 0, 1)
    assert (selftest.ALL_RIGHT, selftest.SOME_WRONG) == (0, 1)
    assert f"{GRACE_SECONDS:g} s" in section("Kubernetes", HOSTS)


def test_the_logs_have_the_names_of_the_code(tmp_path):
    WorkerLogs(str(tmp_path)).of(7).close()
    [log] = tmp_path.iterdir()
    names = {log.name, name_of_file(7)}
    assert len(names) == 2
    assert all(f"FOLDER/{n.replace('7', 'RANK')}`" in section("Logs") for n in names)


# --- the image


def instructions():
    """(word, rest) of each instruction of the Dockerfile."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def test_the_image_installs_what_setup_cfg_has():
    [pip] = [rest for word, rest in instructions() if "pip install" in rest]
    extras = re.search(r'"/tfdp\[\$\{EXTRA\},(\w+)\]" -c /tfdp/constraints.txt', pip)
    assert extras[1] in SETUP["options.extras_require"]
    arguments = dict(r.split("=") for word, r in instructions() if word == "ARG")
    in_comment = set(re.findall(r"EXTRA=(\w+)", DOCKERFILE)) - {"EXTRA"}
    offered = {arguments["EXTRA"], *in_comment}
    assert offered == {"cpu", "gpu"} <= set(SETUP["options.extras_require"])
    assert "[and-cuda]" in SETUP["options.extras_require"]["gpu"]
    python = f"Programming Language :: Python :: {arguments['PYTHON']}"
    assert python in SETUP["metadata"]["classifiers"]


def test_the_image_has_what_it_is_built_of():
    copied = [
        source
        for word, rest in instructions()
        if word == "COPY"
        for source in rest.split()[:-1]
    ]
    assert [path for path in copied if not REPOSITORY.joinpath(path).exists()] == []
    # What the build reads: the metadata's files.
    needed = {"setup.cfg", "pyproject.toml", SETUP["metadata"]["license_files"]}
    needed.add(SETUP["metadata"]["long_description"].removeprefix("file: "))
    assert needed <= set(copied)
    sent = DEPLOY.joinpath("Dockerfile.dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in sent if line.startswith("!")}
    assert kept == set(copied)


def test_the_commands_of_the_page_are_those_of_the_dockerfile():
    builds = re.findall(r"docker build .*", DOCKERFILE)
    assert len(builds) == 2
    assert all(command in PAGE for command in builds)


def a_builder_answers():
    """Whether `docker` can build here; its client alone cannot."""
    if shutil.which("docker") is None:
        return False
    done = subprocess.run(["docker", "info"], capture_output=True, timeout=60)
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not a_builder_answers(), reason="no Docker daemon answers here")
def test_the_image_is_built_and_runs():
    options = ["-f", "deploy/Dockerfile", "-t", "tfdp:test", "."]
    for command in (["build", *options], ["run", "--rm", "tfdp:test", "tfdp", "info"]):
        done = subprocess.run(
            ["docker", *command], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


# --- the job of Slurm


@pytest.mark.parametrize("code, requeued", [(0, ""), (75, "requeue 7\n"), (1, "")])
def test_the_job_is_started_again_where_it_has_saved(code, requeued, tmp_path):
    """With stand-ins for `srun` and `scontrol`, and the real `tfdp launch`."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").touch()
    for name, body in (
        ("srun", f'echo "$SRUN_CPUS_PER_TASK" "$@" > srun.txt; exit {code}'),
        ("scontrol", 'echo "$@" > scontrol.txt'),
        ("tfdp", f'exec "{sys.executable}" -m tfdp "$@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "16",
    }
    done = subprocess.run(
        ["bash", DEPLOY / "train.sbatch", "--epochs", "90"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    started = (tmp_path / "srun.txt").read_text()
    assert started.startswith("16 --kill-on-bad-exit=1 --label ")
    assert started.endswith("train.py --epochs 90\n")
    told = tmp_path / "scontrol.txt"
    assert (told.read_text() if told.exists() else "") == requeued
