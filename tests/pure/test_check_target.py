"""What `tfdp check` accepts as its target; none of it needs TensorFlow."""

import re
import sys

import pytest

from tests.support.fresh_python import run_program
from tfdp.errors import ConfigurationError
from tfdp.tools.commands import cli
from tfdp.tools.commands.check_target import (
    Target,
    errors_of_target,
    is_run,
    load_target,
    parse_target,
)

BUILD_AND_DATA = """
def build():
    return "a model"

def pair():
    return build, [1, 2]

def options():
    return {"build": build, "data": [3], "steps": 7, "seed": 1}

def nothing():
    pass

def three():
    return build, [1], 4

def two_arrays():
    return [1], [2]

def unknown():
    return {"build": build, "data": [3], "epochs": 7}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Loading a target puts its folder on the path.
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "some_target", raising=False)
    (tmp_path / "some_target.py").write_text(BUILD_AND_DATA, "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "text, expected",
    [
        ("some_target.py:pair", Target("some_target.py", "pair")),
        ("some_target.py", Target("some_target.py", None)),
        ("package.module:pair", Target("package.module", "pair")),
    ],
)
def test_forms_of_a_target(folder, text, expected):
    assert parse_target(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("gone.py", "There is no script 'gone.py'"),
        ("gone.py:pair", "There is no script 'gone.py'"),
        ("some_target", "TARGET must be"),
        ("some target:pair", "TARGET must be"),
        ("some_target.py:pa ir", "'pa ir' is not the name of a function"),
        ("", "TARGET must be"),
    ],
)
def test_other_targets_are_refused_with_status_2(folder, text, expected, capsys):
    with pytest.raises(ConfigurationError, match=expected):
        parse_target(text)
    assert cli.main(["check", text]) == 2
    assert "tfdp check: " in capsys.readouterr().err


def test_a_missing_folder_for_the_report_is_refused_before_the_check(folder, capsys):
    assert cli.main(["check", "some_target.py:pair", "--json", "no/report.json"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--replicas", "1"], ["--steps", "0"], ["--strategy", "none"], []]
)
def test_bad_options_are_refused(folder, options, capsys):
    target = ["some_target.py"] if options else []
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", *target, *options])
    assert stopped.value.code == 2
    assert "usage: tfdp check" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["some_target.py", "some_target"])
def test_a_function_gives_build_and_data(folder, module):
    found = load_target(parse_target(f"{module}:pair"))
    assert (found.build(), found.data, found.options) == ("a model", [1, 2], {})
    found = load_target(parse_target(f"{module}:options"))
    assert (found.data, found.options) == ([3], {"steps": 7, "seed": 1})


def test_a_script_alone_defines_build_model_and_make_data(folder):
    (folder / "alone.py").write_text(
        "def build_model(): return 'mine'\ndef make_data(): return (1, 2)\n", "utf-8"
    )
    found = load_target(parse_target("alone.py"))
    assert (found.build(), found.data) == ("mine", (1, 2))
    with pytest.raises(ConfigurationError, match="no function 'build_model'.*TARGET"):
        load_target(parse_target("some_target.py"))


@pytest.mark.parametrize(
    "source, expected",
    [
        ("def build_model(): pass\ndef make_data(rows=1, *, seed=2): pass", False),
        ("from models import build_model\nmake_data = lambda: 1", False),
        ("def build_model(): pass", True),
        ("def build_model(units): pass\ndef make_data(): pass", True),
        ("def build_model(): pass\ndef make_data(*, path): pass", True),
        ("if True:\n    def build_model(): pass\n    def make_data(): pass", True),
        ("this is no Python", True),
    ],
)
def test_scripts_without_both_functions_are_run(folder, source, expected):
    (folder / "train.py").write_text(source, "utf-8")
    assert is_run(parse_target("train.py")) is expected
    assert not is_run(Target("train.py", "function"))


MISSPELT = {
    "some_targt.py": "no script 'some_targt.py'. Did you mean some_target.py?",
    "some_target.py:pairr": "no function 'pairr'. Did you mean pair?",
    "some_targt:pair": "no module 'some_targt'.*Did you mean some_target?",
    "ResNet5O": "no model 'ResNet5O' in keras.applications. Did you mean ResNet50",
}


@pytest.mark.parametrize("text", MISSPELT)
@pytest.mark.parametrize("command", ["check", "plan", "tune"])
def test_a_misspelt_name_is_found_before_tensorflow_starts(
    folder, command, text, capsys, monkeypatch
):
    if command == "check" and text == "ResNet5O":
        pytest.skip("no target of tfdp check")
    # An import of it fails.
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    batch = [] if command == "check" else ["--batch", "8"]
    replicas = ["--replicas", "2"] if command == "tune" else []
    assert cli.main([command, text, *batch, *replicas]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert re.search(MISSPELT[text], said), said


@pytest.mark.parametrize("command", ["check", "plan", "tune"])
def test_only_a_script_that_is_run_takes_arguments(folder, command, capsys):
    batch = [] if command == "check" else ["--batch", "8"]
    assert cli.main([command, "some_target.py:pair", *batch, "--", "--x", "1"]) == 2
    assert "is imported, not run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "function, expected",
    [
        ("nothing", "returned: NoneType"),
        ("three", "returned: tuple"),
        ("two_arrays", r"must return \(build, data\)"),
        ("unknown", r"unknown keys \['epochs'\]"),
        ("gone", "no function 'gone'"),
    ],
)
def test_what_a_function_may_not_give(folder, function, expected):
    with pytest.raises(ConfigurationError, match=expected):
        load_target(parse_target(f"some_target.py:{function}"))


def test_a_missing_module_is_told_from_a_missing_import_of_it(folder):
    with pytest.raises(ConfigurationError, match="no module 'nowhere'"):
        load_target(parse_target("nowhere.models:pair"))
    (folder / "imports_a_gap.py").write_text("import a_gap\n", "utf-8")
    with pytest.raises(ModuleNotFoundError, match="a_gap"):
        load_target(parse_target("imports_a_gap:pair"))


def test_help_loads_no_tensorflow():
    done = run_program(
        "import sys\n"
        "from tfdp.tools.commands.cli import main\n"
        "try:\n"
        "    main(['check', '--help'])\n"
        "except SystemExit as stopped:\n"
        "    loaded = {'tensorflow', 'keras', 'numpy'} & set(sys.modules)\n"
        "    print(stopped.code, sorted(loaded))\n"
    )
    assert "TARGET" in done.stdout
    assert done.stdout.endswith("0 []\n"), done.stdout + done.stderr


def test_a_traceback_begins_in_the_script(folder, capsys):
    (folder / "bad.py").write_text("def broken():\n    1 / 0\n", "utf-8")
    with pytest.raises(ConfigurationError, match="^it failed$"):
        with errors_of_target("it failed"):
            load_target(parse_target("bad.py:broken"))
    said = capsys.readouterr().err
    assert "bad.py" in said and "ZeroDivisionError" in said
    assert "check_target.py" not in said
