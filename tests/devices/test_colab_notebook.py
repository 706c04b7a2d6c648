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
    first = "".join(CODE[0]["source"])
    assert first.startswith("%pip install") and "tfdp[tpu]" in first
    assert not any("pip" in "".join(cell["source"]) for cell in CODE[1:])


def test_cells_run_top_to_bottom_and_learn(tmp_path):
    # Commands of the notebook itself (%pip) are no Python; the rest is taken as it is.
    cells = ["".join(cell["source"]) for cell in CODE]
    program = tmp_path / "notebook.py"
    program.write_text(
        "\n\n".join(cell for cell in cells if not cell.startswith(("%", "!"))), "utf-8"
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
