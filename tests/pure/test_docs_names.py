"""The pages name what there is, and the reference every public name, once."""

import ast
import re

import pytest

from tests.support.package_source import REPOSITORY
from tests.support.public_names import (
    NOTES,
    ROOMS,
    arguments_of,
    definition_of,
    listed,
    pages,
    public_names,
)

REFERENCE = REPOSITORY / "docs" / "reference"
ENTRY = re.compile(r"^::: (\S+)$", re.M)
#: `tfdp.a.b` in running text, in tables and in blocks of code, up to a call.
NAME = re.compile(r"(?<![\w./-])tfdp(?:\.[A-Za-z_]\w*)+(?![\w/]|\.(?:py|md|html|ray))")
#: `tfdp.a(b=c)` with nothing in parentheses within, and the options that it is given.
CALL = re.compile(r"(?<![\w./-])(tfdp(?:\.[A-Za-z_]\w*)+)\(([^()]*)\)")
OPTION = re.compile(r"(?:^|[,\s])([a-z_]\w*)=(?!=)")
# Notes name what there was when they measured.
PAGES = [page for page in pages() if page.parent != NOTES]


def entries():
    return [
        name
        for page in sorted(REFERENCE.glob("*.md"))
        for name in ENTRY.findall(page.read_text("utf-8"))
    ]


def test_every_public_name_is_in_the_reference():
    told = {definition_of(name) for name in entries()}
    missing = [name for name in public_names() if definition_of(name) not in told]
    assert missing == []
    assert len(public_names()) > 80


def test_an_entry_is_a_public_name_and_stands_once():
    found = entries()
    assert [name for name in found if name not in public_names()] == []
    defined = [definition_of(name) for name in found]
    assert sorted(defined) == sorted(set(defined))


def test_every_room_with_public_names_is_known():
    rooms = {
        f"tfdp.{name}"
        for name in re.findall(
            r'^    "(\w+)": "tfdp\.\1"',
            (REPOSITORY / "tfdp/__init__.py").read_text(),
            re.M,
        )
    }
    assert rooms | {"tfdp.cluster"} == set(ROOMS)


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
def test_a_page_names_what_there_is(page):
    names = set(NAME.findall(page.read_text("utf-8")))
    assert sorted(name for name in names if definition_of(name) is None) == []


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
def test_a_page_gives_options_that_there_are(page):
    unknown = [
        f"{name}({option}=)"
        for name, options in CALL.findall(page.read_text("utf-8"))
        for option in OPTION.findall(options)
        if option not in arguments_of(name)
    ]
    assert unknown == []


def test_options_are_looked_up():
    assert {"cpu_devices", "shard"} <= arguments_of("tfdp.auto_strategy")
    assert "bucket_bytes" in arguments_of("tfdp.Communication")
    assert "nothing" not in arguments_of("tfdp.Communication")
    calls = CALL.findall("`tfdp.A(b=1, c_d=x)`, if tfdp.e(f == g)")
    assert calls == [("tfdp.A", "b=1, c_d=x"), ("tfdp.e", "f == g")]
    assert [OPTION.findall(options) for _, options in calls] == [["b", "c_d"], []]


def test_names_are_looked_up():
    assert definition_of("tfdp.Cluster") == definition_of("tfdp.cluster.Cluster")
    assert definition_of("tfdp.Communication.bucket_bytes") is not None
    assert definition_of("tfdp.cluster.progress.note_step") is not None
    assert definition_of("tfdp.nothing") is None
    assert definition_of("tfdp.Communication.nothing") is None
    assert "tfdp.sync.DiLoCo" in listed("tfdp.sync")
    assert NAME.findall("`tfdp.a.b(c)` tfdp/x.py my.tfdp.x") == ["tfdp.a.b"]


TEN = ["auto_strategy", "quiet", "Communication", "shard=", "remat", "Checkpoint"]
TEN += ["RunRecord", "LARS", "LAMB", "LinearWarmup", "read_tfrecords"]


def test_the_reference_opens_with_the_ten_names():
    text = (REPOSITORY / "docs/reference/index.md").read_text("utf-8")
    table = text.partition("| name | what it is |")[2].partition("\n\n")[0]
    assert re.findall(r"\[`(?:tfdp\.)?(?:\w+\.)?(\w+=?)`\]", table) == TEN
    assert text.index(table) < 3000


def test_the_reference_of_auto_strategy_refers_to_no_other():
    tree = ast.parse((REPOSITORY / "tfdp/strategies/auto.py").read_text("utf-8"))
    [function] = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "auto_strategy"
    ]
    names = {each.arg for each in function.args.kwonlyargs}
    assert names == arguments_of("tfdp.auto_strategy")
    args = ast.get_docstring(function).partition("Args:")[2].partition("Raises:")[0]
    assert "see `" not in args
