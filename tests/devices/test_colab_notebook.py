"""The notebooks for Colab: their cells run top to bottom, here on logical CPUs.

The outputs in `colab.ipynb` are those of a run:
`jupyter nbconvert --to notebook --execute --inplace examples/colab.ipynb`, in a clone.
"""

import configparser
import json
import re

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

NAMES = ("colab.ipynb", "colab_tpu.ipynb")
# A folder that only the machine has on which the outputs were made.
OWN_FOLDER = re.compile(r"/(home|root|tmp|work|opt|usr|content)/")


def cells_of(name):
    notebook = json.loads(REPOSITORY.joinpath("examples", name).read_text("utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source_of(cell):
    return "".join(cell["source"])


def text_of(cell):
    """What a cell has printed."""
    streams = [o for o in cell["outputs"] if o["output_type"] == "stream"]
    return "".join("".join(stream["text"]) for stream in streams)


def test_outputs_of_the_notebook_for_a_tpu_are_cleared():
    """It was not run on one."""
    cells = cells_of("colab_tpu.ipynb")
    assert all(cell["outputs"] == [] for cell in cells)
    assert all(cell["execution_count"] is None for cell in cells)


def test_the_other_notebook_holds_the_outputs_of_a_run():
    cells = cells_of("colab.ipynb")
    numbers = [cell["execution_count"] for cell in cells]
    assert numbers == list(range(1, len(cells) + 1))
    all_outputs = json.dumps([cell["outputs"] for cell in cells])
    assert OWN_FOLDER.search(all_outputs) is None
    assert '"error"' not in all_outputs
    said = "".join(map(text_of, cells))
    assert "DataParallelStrategy(2 replicas: CPU:0, CPU:1" in said
    assert "Epoch 6/6" in said and "throughput" in said
    kinds = {o["output_type"] for cell in cells for o in cell["outputs"]}
    assert "display_data" in kinds


@pytest.mark.parametrize("name", NAMES)
def test_it_first_installs_from_a_clone(name):
    first, *others = map(source_of, cells_of(name))
    lines = first.splitlines()
    # Nothing is fetched by the name tfdp: no index has it.
    assert 'REPOSITORY = ""' in lines
    assert '    !git clone -q --depth 1 "{REPOSITORY}" tfdp' in lines
    [install] = [line for line in lines if line.startswith("%pip")]
    assert install.startswith('%pip install -q "{source}[')
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    for extra in re.findall(r"\b(tpu|gpu|cpu|examples)\b", first):
        assert extra in setup["options.extras_require"]
    assert not any("%pip" in source or "!pip" in source for source in others)


def run_cells(name, folder):
    # Commands of the notebook itself (%, !) are no Python; the rest is taken as it is.
    lines = "\n\n".join(map(source_of, cells_of(name)[1:])).splitlines()
    program = folder / "notebook.py"
    program.write_text(
        "\n".join(line for line in lines if not line.startswith(("%", "!"))), "utf-8"
    )
    done = run_python(
        program,
        cwd=folder,
        environment={"MPLBACKEND": "Agg", "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cells_of_the_notebook_for_a_tpu_run_and_learn(tmp_path):
    said = run_cells("colab_tpu.ipynb", tmp_path)
    assert "DataParallelStrategy(1 replica: CPU:0; engine in_process)" in said
    found = re.search(r"297 pictures, (\d+\.\d)% right", said)
    # Chance is 10%; this model reaches 90 on most seeds.
    assert found and float(found[1]) > 80, said


def test_the_cells_of_the_other_notebook_run_and_learn(tmp_path):
    said = run_cells("colab.ipynb", tmp_path)
    assert "DataParallelStrategy(2 replicas: CPU:0, CPU:1; engine in_process)" in said
    found = re.findall(r"val_accuracy: (0\.\d+)", said)
    # Chance is 0.1; this model reaches 0.9 on most seeds.
    assert len(found) == 6 and float(found[-1]) > 0.8, said
    difference = re.search(r"largest difference .*: (\S+)", said)
    # A sum of 64 rows is off by 64 x 2^-24 of a clipped gradient's length 1 at most.
    # The rate is 0.1, momentum makes of it 1, and 24 steps add up: 9e-5. Half of each
    # batch (a missing exchange) gives 0.27.
    assert float(difference[1]) < 1e-4, said
    assert (tmp_path / "run" / "worker-0.jsonl").stat().st_size > 0
