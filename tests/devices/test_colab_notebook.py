"""The notebook for Colab: its cells run top to bottom, here without a TPU."""

import json
import re

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

NOTEBOOK = json.loads(
    REPOSITORY.joinpath("examples", "colab_tpu.ipynb").read_text("utf-8")
)
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_cleared():
    assert all(cell["outputs"] == [] for cell in CODE)
    assert all(cell["execution_count"] is None for cell in CODE)
    assert NOTEBOOK["nbformat"] == 4 and NOTEBOOK["metadata"]["accelerator"] == "TPU"


def test_it_installs_first():
    comment, source, command = "".join(CODE[0]["source"]).splitlines()
    assert comment.startswith("#") and source == 'TFDP = "tfdp[tpu]"'
    # One line says from where: IPython puts the value in.
    assert command.startswith('%pip install -q "{TFDP}" ')
    assert not any("pip" in "".join(cell["source"]) for cell in CODE[1:])


def test_cells_run_top_to_bottom_and_learn(tmp_path):
    # Commands of the notebook itself (%pip) are no Python; the rest is taken as it is.
    lines = "\n\n".join("".join(cell["source"]) for cell in CODE).splitlines()
    program = tmp_path / "notebook.py"
    program.write_text(
        "\n".join(line for line in lines if not line.startswith(("%", "!"))), "utf-8"
    )
    done = run_python(
        program,
        cwd=tmp_path,
        environment={"MPLBACKEND": "Agg", "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    assert "DataParallelStrategy(1 replica: CPU:0; engine in_process)" in done.stdout
    found = re.search(r"297 pictures, (\d+\.\d)% right", done.stdout)
    # Chance is 10%; this model reaches 90 on most seeds.
    assert found and float(found[1]) > 80, done.stdout
