"""Every Python block of the README and the docs runs.

The blocks of a file run one after the other in one namespace, in a process and an
empty folder of their own. Blocks marked as anything but `python` are only read. Blocks
of the playbooks, which are for the developers, may import `tests`.
"""

import os
import re

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY
from tests.support.public_names import pages

PLAYBOOKS = REPOSITORY / "docs" / "playbooks"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def program_of(text):
    """The blocks as one program whose line numbers are those of the page."""
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text[: block.start(1)].count("\n")
        body = block.group(1).splitlines()
        lines[first : first + len(body)] = body
    return "\n".join(lines)


def name_of(page):
    return page.relative_to(REPOSITORY).as_posix()


def environment_of(page):
    if page.parent != PLAYBOOKS:
        return {}
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths)}


WITH_CODE = [page for page in pages() if BLOCK.search(page.read_text("utf-8"))]


@pytest.mark.worth_seconds(24)
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page, tmp_path):
    # Not the page's own name: a program's folder is where it imports from first.
    program = tmp_path / "program" / f"page_{page.stem}.py"
    program.parent.mkdir()
    program.write_text(program_of(page.read_text("utf-8")), "utf-8")
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run_python(program, cwd=folder, environment=environment_of(page))
    assert done.returncode == 0, f"{name_of(page)}:\n{done.stdout}\n{done.stderr}"


def test_a_program_keeps_the_line_numbers_of_its_page():
    page = (
        "# Title\n\n```python\na = 1\n```\ntext\n```bash\nls\n```\n```python\nb\n```\n"
    )
    assert program_of(page).splitlines()[3] == "a = 1"
    assert program_of(page).splitlines()[10] == "b"
    assert "ls" not in program_of(page)
