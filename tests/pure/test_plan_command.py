"""`tfdp plan` where nothing is planned, or what was planned cannot be written."""

import contextlib
import types

import pytest

from tfdp.plan.sizes import bytes_of
from tfdp.tools.commands import cli, plan, tune

MODEL = ["plan", "model.py", "--batch", "8"]
FITS = types.SimpleNamespace(
    fits=True,
    print=lambda: print("It fits."),
    to_json=dict,
    page=lambda: "<p>",
)


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()
    return tmp_path


@pytest.mark.parametrize("option", ["--json", "--page"])
@pytest.mark.parametrize("path", [".", "folder", "", "no/file"])
def test_no_place_for_a_file_is_refused_before_the_work(
    option, path, in_folder, monkeypatch, capsys
):
    (in_folder / "folder").mkdir()
    monkeypatch.setattr(plan, "_answer", lambda *_: pytest.fail("it was planned"))
    assert cli.main([*MODEL, option, path]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tfdp plan: {option} ")


@pytest.mark.parametrize("option", ["--json", "--page"])
def test_what_cannot_be_written_is_not_taken_for_what_does_not_fit(
    option, in_folder, monkeypatch, capsys
):
    @contextlib.contextmanager
    def full_disk(path):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(plan, "_answer", lambda *_: FITS)
    assert cli.main([*MODEL, option, "file"]) == 0
    for writer in ("asked_for", "checked_json"):
        monkeypatch.setattr(f"tfdp.files.{writer}.replaced", full_disk)
    assert cli.main([*MODEL, option, "file"]) == 2
    said = capsys.readouterr()
    assert said.out.count("It fits.") == 2
    [line] = said.err.splitlines()
    assert "cannot be written (No space left on device)" in line


@pytest.mark.parametrize("code", [0, None, 1, "bad"])
def test_a_target_that_ends_the_program_was_not_planned(
    code, in_folder, monkeypatch, capsys
):
    def ends(*_):
        raise SystemExit(code)

    for command, inner in (("plan", "_answer"), ("check", "_check")):
        monkeypatch.setattr(f"tfdp.tools.commands.{command}.{inner}", ends)
        batch = ["--batch", "8"] if command == "plan" else []
        assert cli.main([command, "model.py", *batch]) == 2
        assert f"tfdp {command}: the target called sys.exit" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["", " ", "much", "0GB", "9" * 400, "²GB"])
@pytest.mark.parametrize(
    "command", [MODEL, ["tune", "model.py", "--batch", "8", "--replicas", "2"]]
)
def test_what_is_no_size_is_refused(command, size, in_folder, monkeypatch, capsys):
    monkeypatch.setattr(plan, "_answer", lambda *_: pytest.fail("it was planned"))
    monkeypatch.setattr(tune, "TuneRun", lambda *_, **__: pytest.fail("it was tuned"))
    assert cli.main([*command, "--memory", size]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tfdp {command[0]}: A size is a number and a unit")
    assert len(line) < 300


def test_a_size_without_a_unit_is_asked_for_one(in_folder, capsys):
    assert cli.main([*MODEL, "--memory", "16"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tfdp plan: 16 what? A size is a number and a unit: 16GB")


@pytest.mark.parametrize(
    "text, size_bytes", [("16GB", 16 * 10**9), ("1.5 kib", 1536), ("1000000TB", 10**18)]
)
def test_sizes_are_exact(text, size_bytes):
    assert bytes_of(text) == size_bytes


@pytest.mark.parametrize("shard", ["²", "4", "-1", "٣", ""])
def test_what_is_no_stage_is_refused(shard, capsys):
    assert cli.main([*MODEL, f"--shard={shard}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tfdp plan: shard must be one of")


@pytest.mark.parametrize("command", ["tune", "check"])
def test_others_say_what_cannot_be_written_too(command, in_folder, monkeypatch, capsys):
    found = types.SimpleNamespace(
        ok=True, inconclusive=False, run=lambda: found, to_json=dict
    )
    monkeypatch.setattr(tune, "_run_of", lambda _: found)
    monkeypatch.setattr(tune, "_document", lambda *_: {})
    monkeypatch.setattr("tfdp.tools.commands.check._check", lambda *_: found)
    batch = ["--batch", "8"] if command == "tune" else []
    for path, code in (("file", 0), ("n" * 300, 2)):
        assert cli.main([command, "model.py", *batch, "--json", path]) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tfdp {command}: --json ") and "cannot be written" in line
