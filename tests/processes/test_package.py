"""Source archive and wheel: what is in them, and that the wheel imports alone."""

import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.support.package_source import PACKAGE, REPOSITORY
from tfdp import __version__

# setuptools copies what it builds into `build/`; the sources stay as they are.
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def run(*command, cwd):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive and, built from it, the wheel; with no network."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    for path in [*PACKAGE.rglob("*"), *REPOSITORY.glob("benchmarks/**/*.py")]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(REPOSITORY)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "build", "--no-isolation"),
        *("--outdir", folder, copy),
        cwd=copy,
    )
    return pathlib.Path(folder)


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_source_archive_holds_what_the_wheel_is_built_of(built):
    (path,) = built.glob("*.tar.gz")
    root = f"tfdp-{__version__}"
    assert path.name == f"{root}.tar.gz"
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    modules = (path.relative_to(REPOSITORY) for path in PACKAGE.rglob("*.py"))
    needed = {*SOURCES, *(module.as_posix() for module in modules)}
    assert {f"{root}/{name}" for name in needed} <= names


def test_the_wheel_holds_every_module_and_the_licence(wheel):
    assert wheel.name == f"tfdp-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(REPOSITORY).as_posix() for path in PACKAGE.rglob("*.py")
    }
    assert modules <= names
    assert "tfdp/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    outside = ("benchmarks/", "tests/", "examples/")
    assert not any(name.startswith(outside) for name in names)


def test_the_wheel_states_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    lines = archive.read(metadata).decode("utf-8").splitlines()
    assert "Requires-Python: <3.14,>=3.10" in lines
    assert "License-Expression: Apache-2.0" in lines
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {
        "cpu",
        "gpu",
        "tpu",
        "tfds",
        "grain",
        "tensorboard",
        "prometheus",
        "tune",
        "plots",
        "mpi",
        "docs",
        "examples",
        "dev",
    }
    plain = {
        line.split()[1].split(">=")[0]
        for line in lines
        if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert plain == {
        "keras",
        "numpy",
        "absl-py",
        "safetensors",
        "google-crc32c",
        "rich",
    }


def test_the_citation_names_this_version():
    citation = (REPOSITORY / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert "\ncff-version: 1.2.0\n" in f"\n{citation}"


def test_the_wheel_imports_in_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    # pip of this environment installs into the other; `--no-deps` keeps it empty.
    python = environment / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", wheel),
        cwd=tmp_path,
    )
    done = run(python, "-c", "import tfdp; print(tfdp.__version__)", cwd=tmp_path)
    assert done.stdout == f"{__version__}\n"
    (line,) = done.stderr.splitlines()
    assert "tfdp[cpu]" in line
    listed = run(environment / "bin" / "tfdp", "simulate", "--list", cwd=tmp_path)
    assert "resnet50" in listed.stdout
