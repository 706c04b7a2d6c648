"""What `import tfdp` does and does not do, each in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.support.fresh_python import run_program

EXTRAS_LINE = "pip install 'tfdp[cpu]' (no GPU), 'tfdp[gpu]' (CUDA) or 'tfdp[tpu]'"


def test_import_prints_nothing():
    done = run_program("import tfdp; tfdp.Communication; tfdp.errors")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_script_beside_a_folder_of_that_name_imports_the_package(tmp_path):
    """Such as one beside the clone, after an editable install."""
    (tmp_path / "tfdp").mkdir()
    script = tmp_path / "train.py"
    script.write_text("import tfdp\ntfdp.quiet()\nprint(tfdp.__file__)\n", "utf-8")
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, script]
    done = subprocess.run(command, env=outside, capture_output=True, text=True)
    assert done.stdout.endswith("tfdp/__init__.py\n"), done.stderr


def test_import_configures_no_logger():
    done = run_program(
        "import logging\n"
        "before = logging.root.level, list(logging.root.handlers)\n"
        "import tfdp, tfdp.plan.topology, tfdp.plan.buckets, tfdp.plan.communication\n"
        "assert (logging.root.level, list(logging.root.handlers)) == before\n"
        "for name, logger in logging.root.manager.loggerDict.items():\n"
        "    if isinstance(logger, logging.Logger):\n"
        "        assert not logger.handlers, name\n"
        "        assert logger.level == logging.NOTSET, name\n"
    )
    assert done.returncode == 0, done.stderr


def test_import_loads_no_framework():
    done = run_program(
        "import sys, tfdp, tfdp.cluster.machine\n"
        "import tfdp.plan.topology, tfdp.plan.buckets\n"
        "tfdp.Communication, tfdp.errors, dir(tfdp)\n"
        "print(sorted({'tensorflow', 'keras', 'jax', 'torch'} & set(sys.modules)))"
    )
    assert done.stdout == "[]\n", done.stderr


def test_without_tensorflow_one_line_names_the_extras():
    done = run_program("import tfdp", hidden=["tensorflow"])
    assert done.returncode == 0
    assert done.stdout == ""
    line, *source = done.stderr.splitlines()
    assert EXTRAS_LINE in line
    # From 3.13 on Python shows the line that was warned of, of `python -c` too.
    assert source in ([], ["  import tfdp"])


def test_without_tensorflow_the_pure_parts_work():
    done = run_program(
        "import tfdp\nprint(tfdp.Communication().bucket_bytes)",
        hidden=["tensorflow", "keras"],
    )
    assert done.stdout == "26214400\n", done.stderr


@pytest.mark.parametrize("name", ["DataParallelStrategy", "use_virtual_devices"])
def test_without_tensorflow_use_raises(name):
    done = run_program(
        "import tfdp\n"
        "try:\n"
        f"    tfdp.{name}\n"
        "except tfdp.errors.MissingDependencyError as error:\n"
        "    print(error)",
        hidden=["tensorflow"],
    )
    assert EXTRAS_LINE in done.stdout, done.stderr


@pytest.mark.parametrize(
    "name, hint",
    [
        ("DataParalelStrategy", "Did you mean DataParallelStrategy?"),
        ("callbacks.Chekpoint", "Did you mean Checkpoint?"),
        ("XYZ", "It has: Cluster, Communication,"),
    ],
)
def test_an_unknown_name_is_an_attribute_error(name, hint):
    done = run_program(f"import tfdp; tfdp.{name}")
    assert "AttributeError: module 'tfdp" in done.stderr
    assert hint in done.stderr


@pytest.mark.parametrize("backend", ["jax", "torch", "nonsense"])
def test_another_backend_of_keras_is_refused(backend):
    """Keras itself cannot load a backend that is not installed."""
    done = run_program(
        "import tfdp\ntfdp.data.FeatureSpec, tfdp.find_cluster\n"
        "try:\n    tfdp.DataParallelStrategy()\n"
        "except tfdp.errors.ConfigurationError as error:\n    print(error)\n",
        environment={"KERAS_BACKEND": backend},
    )
    assert f"KERAS_BACKEND={backend}: a strategy of tfdp works with" in done.stdout
    assert "Set KERAS_BACKEND=tensorflow before" in done.stdout
