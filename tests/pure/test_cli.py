"""The command line, as far as it goes without TensorFlow."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.fresh_python import run_program, run_python
from tests.support.package_source import REPOSITORY
from tfdp.tools.commands import cli, info

PROGRAM = """
import sys
sys.argv = ["tfdp", *{arguments!r}]
from tfdp.tools.commands.cli import main
try:
    code = main()
except SystemExit as exit:
    code = exit.code
loaded = {{"tensorflow", "keras", "numpy"}} & set(sys.modules)
print("loaded", sorted(loaded), "code", code)
"""


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--help"], "simulate"),
        (["--version"], "tfdp 0"),
        (["launch", "--help"], "--workers"),
        (["simulate", "--list"], "resnet50"),
        (["info", "--help"], "--json"),
        (["help"], "simulate"),
        (["help", "plan"], "--memory"),
    ],
)
def test_help_and_lists_load_no_tensorflow(arguments, expected):
    done = run_program(PROGRAM.format(arguments=arguments))
    assert expected in done.stdout
    assert done.stdout.endswith("loaded [] code 0\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("check trian.py", "Did you mean train.py?"),
        ("check --strategy tfdb train.py", "Did you mean tfdp?"),
        ("check train.py:biuld", "Did you mean build?"),
        ("check trian:build", "Did you mean train?"),
        ("plan srcipts/digits.py", "Did you mean scripts/digits.py?"),
        ("plan ResNet5 --batch 8", "Did you mean ResNet50?"),
        ("plan train.py --memory 16", "16 what?"),
        ("plan train.py --shard optimiser", "Did you mean optimizer?"),
        ("tune scripts/digit.py", "Did you mean scripts/digits.py?"),
        ("tune train.py --allow-lossy bfloat", "Did you mean bfloat16?"),
        ("report runs/digit", "Did you mean runs/digits?"),
        ("report rnus/digits", "Did you mean runs/digits?"),
        ("report runs/7", "No such file"),
        ("launch --wrokers 2 train.py", "Did you mean --workers?"),
        ("simulate --hardware a100", "usage: tfdp simulate [options] (tfdp simulate"),
        ("launch srcipts/digit.py", "Did you mean scripts/digits.py?"),
        ("merge rnus out.keras", "Did you mean runs?"),
        ("pln train.py", "Did you mean plan?"),
    ],
)
def test_simple_errors_come_before_tensorflow(arguments, expected, tmp_path):
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "digits.py").touch()
    (tmp_path / "train.py").write_text("def build(): pass\n")
    done = run_program(PROGRAM.format(arguments=arguments.split()), cwd=tmp_path)
    assert expected in done.stderr
    assert re.search(r"^loaded \[\] code [12]$", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("module", ["tfdp", "tfdp.tools.commands.cli"])
def test_the_package_runs_as_a_program(module):
    done = run_python("-m", module, "simulate", "--list")
    assert done.returncode == 0, done.stderr
    assert "resnet50" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["simulat"],
        ["simulate", "resnet50"],
        ["simulate", "--algorithm", "rings"],
        ["plan", "train.py", "--batch", "0"],
        ["simulate", "--devices", "two"],
        ["measure", "--output", "machine.json", "--repeats", "-1"],
        ["measure", "--output", "machine.json", "--models", "mine"],
    ],
)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: tfdp" in capsys.readouterr().err


def test_without_a_command_all_are_named(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    said = capsys.readouterr().err
    assert all(name in said for name in cli.COMMANDS)


def test_a_command_imports_no_other():
    code = (
        "import contextlib, sys; from tfdp.tools.commands import cli\n"
        "with contextlib.suppress(SystemExit): cli.main(['info', '--help'])\n"
        "assert 'tfdp.tools.commands.info' in sys.modules\n"
        "assert not {'tfdp.tools.commands.simulate', 'tfdp.launch'} & set(sys.modules)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def listed_into(command, **output):
    done = subprocess.run(
        [*command, sys.executable, "-m", "tfdp", "simulate", "--list"],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        **output,
    )
    return done.returncode, done.stderr


def test_a_reader_that_has_left_gets_no_traceback():
    """And no status by which a command says something of its answer."""
    reader, writer = os.pipe()
    os.close(reader)
    assert listed_into([], stdout=writer) == (141, "")
    os.close(writer)


def test_output_that_nobody_can_have_is_no_traceback():
    assert listed_into(["sh", "-c", 'exec "$@" >&-', "sh"]) == (0, "")
    with open("/dev/full", "w") as full:
        code, said = listed_into([], stdout=full)
    assert code == 2
    assert re.fullmatch("tfdp: the answer .*: .*No space left on device\n", said)


def test_info_without_tensorflow_says_what_to_install():
    done = run_program(
        PROGRAM.format(arguments=["info", "--json"])
        .replace(
            "from tfdp.tools.commands.cli",
            "import tfdp.tools.commands.info\nfrom tfdp.tools.commands.cli",
        )
        .replace(
            "try:",
            "info = tfdp.tools.commands.info\n"
            "versions = dict(info.installed_versions(), tensorflow=None)\n"
            "info.installed_versions = lambda: versions\n"
            "try:",
        ),
        hidden=["tensorflow", "keras"],
    )
    facts = json.loads(done.stdout[: done.stdout.rindex("loaded")])
    assert facts["versions"]["tensorflow"] is None
    assert facts["strategy"] is None
    assert re.search(r"tfdp\[cpu\]", facts["warnings"][0])
    assert done.stdout.endswith("code 1\n")


def version_warnings(tensorflow="2.21.0", keras="3.15.1"):
    return info._version_warnings(
        {"tensorflow": tensorflow, "keras": keras},
        {"tensorflow": "2.21.0", "keras": "3.15.1"},
    )


def test_the_checked_versions_get_no_warning():
    assert version_warnings() == []


@pytest.mark.parametrize(
    "versions, expected",
    [
        ({"tensorflow": "2.19.1"}, "tensorflow 2.19.1 is too old: tfdp needs 2.20"),
        ({"keras": "3.9.0"}, "keras 3.9.0 is too old: tfdp needs 3.12"),
        ({"keras": "3.16.0"}, "keras 3.16.0 is not the version"),
        ({"keras": None}, "keras is not installed"),
    ],
)
def test_other_versions_get_a_warning(versions, expected):
    (warning,) = version_warnings(**versions)
    assert warning.startswith(expected)
