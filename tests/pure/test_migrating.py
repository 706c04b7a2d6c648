"""The pages for those who come from elsewhere: each has a script before and after.

What comes after is run by `tests/devices/test_docs.py`. What comes before is only
parsed: most of the packages that it imports are not among tfdp's.
"""

import ast
import re

import pytest

from tests.support.package_source import REPOSITORY

PAGES = sorted(REPOSITORY.joinpath("docs", "migrating").glob("*.md"))
BLOCK = re.compile(r"^```(py|python)\n(.*?)^```$", re.M | re.S)
# What the script before must use.
USES = {
    "horovod": "horovod",
    "keras-distribution": "keras.distribution.set_distribution",
    "pytorch": "torch.distributed",
    "tensorflow": "tf.distribute",
}


def names_used(source):
    """Modules that a script imports, and its dotted names of two parts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from (alias.name, alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, node.module.partition(".")[0])
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_every_page_is_known():
    assert sorted(USES) == [page.stem for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_script_before_and_one_after(page):
    text = page.read_text("utf-8")
    assert text.count("\n") <= 200
    kinds, sources = zip(*BLOCK.findall(text), strict=True)
    assert kinds[:2] == ("py", "python") and set(kinds[2:]) <= {"python"}
    before, after = (set(names_used(source)) for source in sources[:2])
    assert USES[page.stem] in before and "tfdp" not in before
    assert "tfdp" in after and USES[page.stem] not in after


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_found(page):
    path = page.relative_to(REPOSITORY / "docs").as_posix()
    for where in ("docs/contents.md", "mkdocs.yml"):
        assert path in REPOSITORY.joinpath(where).read_text("utf-8")
