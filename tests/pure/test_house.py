"""`docs/house.md` tells of the rooms as they are, and the rooms keep their measures."""

import ast
import dataclasses
import graphlib
import re

import pytest

from tests.pure.test_layers import FACES, LAYERS, imported_modules, is_face_of, unit_of
from tests.support.package_source import (
    PACKAGE,
    REPOSITORY,
    imported_names,
    modules,
    parse,
)

PAGE = REPOSITORY.joinpath("docs", "house.md").read_text("utf-8")
# A room of tools is `tools.tune`.
ROOMS = sorted(
    ".".join(path.parent.relative_to(PACKAGE).parts)
    for pattern in ("*/__init__.py", "tools/*/__init__.py")
    for path in PACKAGE.glob(pattern)
)
MODULES = modules()
# They make a training step. Others use the names that the page lists.
INNER_ROOMS = {"chain", "exchange", "hosts", "sharding", "step", "tracing"}
# They are built on the inner rooms; "" hands public names on.
BUILT_ON_THEM = {"", "grid", "strategies", "variables"}
MOST_INNER_NAMES = 31
MOST_LINES = 600
MOST_CODE_LINES = 60
MOST_LINES_OF_A_SCRIPT = 600
# Ten layers with two or three files in each. The longest: `plan` on top of a strategy
# of several hosts, down to the private names.
MOST_FILES_IN_A_CHAIN = 19
# A docstring begins with a verb or a noun: what it does, or what it is.
HEADLESS = set(
    "After As At Before Between By Called For From In Instead Into Its Of On Outside "
    "Over That Then Those Unless What When Where While Whose With Within".split()
)


def first_line(room):
    tree = ast.parse(
        PACKAGE.joinpath(*room.split("."), "__init__.py").read_text("utf-8")
    )
    return ast.get_docstring(tree).splitlines()[0]


def test_the_table_holds_each_room_with_its_layer_and_its_first_line():
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \| (.+) \|$", PAGE, re.M)
    told = {room: (int(layer), line) for layer, room, line in rows}
    assert told == {room: (LAYERS[room], first_line(room)) for room in ROOMS}


def test_the_files_in_no_room_are_named():
    loose = {path.name for path in PACKAGE.glob("*.py")}
    text = PAGE[PAGE.index("Files outside any room") : PAGE.index("## What other")]
    assert set(re.findall(r"tfdp/(\w+\.py)", text)) == loose
    assert len(loose) <= 10


def inner_names_used_in(module):
    if unit_of(module.name).split(".")[0] in INNER_ROOMS | BUILT_ON_THEM:
        return set()
    names = {name.removeprefix("tfdp.") for _, name in imported_names(module)}
    return {name for name in names if name.split(".")[0] in INNER_ROOMS}


def listed_inner_names():
    text = PAGE[PAGE.index("## What other rooms") : PAGE.index("## Three walks")]
    return re.findall(r"`(\w+\.\w+(?:\.\w+)?)`", text)


def test_other_rooms_use_the_listed_names_of_inner_rooms():
    listed = listed_inner_names()
    assert len(set(listed)) == len(listed) <= MOST_INNER_NAMES
    assert set().union(*map(inner_names_used_in, MODULES)) == set(listed)


def test_the_list_sees_an_import_of_another_name():
    for source in (
        "from tfdp.step.call import StepCall",
        "def late():\n    import tfdp.hosts.ring",
        "from tfdp.chain import stages",
    ):
        outside = parse(source, "tfdp.callbacks.example")
        assert inner_names_used_in(outside) - set(listed_inner_names())


@pytest.mark.parametrize("name", listed_inner_names())
def test_a_listed_name_says_in_a_line_what_it_is(name):
    [module] = [m for m in MODULES if f"tfdp.{name}.".startswith(f"{m.name}.")][-1:]
    text = ast.get_docstring(module.tree)
    last = name.rpartition(".")[2]
    if module.name != f"tfdp.{name}":
        defined = {getattr(node, "name", ""): node for node in module.tree.body}
        source = REPOSITORY.joinpath(module.path).read_text("utf-8")
        said = re.search(rf"^#: (.+)\n{last} = ", source, re.M)
        text = said[1] if said else ast.get_docstring(defined[last])
    assert len(text.partition("\n")[0]) > 30


PLAYBOOKS = sorted(REPOSITORY.joinpath("docs", "playbooks").glob("*.md"))


def test_every_file_that_is_named_is_there():
    pages = [PAGE, *(page.read_text("utf-8") for page in PLAYBOOKS)]
    named = re.findall(r"`((?:tfdp|tests)/[\w/]+\.py)`", "".join(pages))
    # Playbooks call a file that is to be written so.
    there = [path for path in named if not path.endswith("NAME.py")]
    assert [path for path in there if not REPOSITORY.joinpath(path).exists()] == []
    assert len(named) > 20


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda page: page.stem)
def test_the_house_leads_to_each_playbook(playbook):
    assert f"(playbooks/{playbook.name})" in PAGE


def test_the_reading_tour_takes_two_hours():
    page = REPOSITORY.joinpath("docs", "reading.md").read_text("utf-8")
    tour = re.findall(r"^\| \d+ \| `(tfdp/[\w/]+\.py)` \| (up to `(\w+)`)?", page, re.M)
    lines = 0
    for path, _, until in tour:
        text = REPOSITORY.joinpath(path).read_text("utf-8")
        lines += len(text.partition(f"def {until}(")[0].splitlines())
    assert len(tour) == 12 and lines <= 3000


def test_rooms_have_no_circle():
    graph = {room: set() for room in ROOMS}
    for module in MODULES:
        room = unit_of(module.name)
        for _, name in imported_modules(module):
            is_room = room in graph and unit_of(name) in graph
            if is_room and unit_of(name) != room and not is_face_of(module, name):
                graph[room].add(unit_of(name))
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(ROOMS)


def test_what_a_worker_throws_away_lies_in_the_launchers_folder():
    # Others are no workers of a launcher; `quiet` has a file without a name.
    importing = {
        module.name
        for module in MODULES
        for _, name in imported_names(module)
        if name.split(".")[0] == "tempfile"
        and unit_of(module.name) not in ("tools.processes", "tools.commands", "launch")
    }
    assert importing == {"tfdp.cluster.scratch", "tfdp.strategies.quiet"}


def test_rooms_have_no_folders():
    places = [path.relative_to(PACKAGE).parts for path in PACKAGE.rglob("*.py")]
    assert max(len(place) - (place[0] == "tools") for place in places) == 2


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_a_file_holds_one_idea(module):
    lines = REPOSITORY.joinpath(module.path).read_text("utf-8").count("\n")
    assert lines <= MOST_LINES
    long = [name for name, count in functions(module.tree) if count > MOST_CODE_LINES]
    assert long == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_docstrings_begin_with_what_they_name(module):
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, documented)]
    lines = [(ast.get_docstring(node) or "").partition("\n")[0] for node in nodes]
    assert [line for line in lines if is_headless(line)] == []


def is_headless(line):
    return line.partition(" ")[0].strip(",;:.") in HEADLESS


def test_the_interface_of_transports_is_small():
    """Nine exchanges, their context, groups and places; all else is a fact."""
    [module] = [m for m in MODULES if m.name == "tfdp.exchange.transport"]
    [transport] = [node for node in module.tree.body if isinstance(node, ast.ClassDef)]
    methods = [
        node.name
        for node in transport.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not any(ast.unparse(d) == "property" for d in node.decorator_list)
    ]
    assert len(methods) <= 12, methods


def test_the_benchmark_scripts_keep_their_measure():
    scripts = REPOSITORY.joinpath("benchmarks").rglob("*.py")
    lines = [path.read_text("utf-8").count("\n") for path in scripts]
    assert len(lines) > 20 and max(lines) <= MOST_LINES_OF_A_SCRIPT


def functions(tree):
    """(name, lines without the docstring) of each function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            is_documented = ast.get_docstring(node) is not None
            start = first.end_lineno if is_documented else node.lineno - 1
            yield node.name, node.end_lineno - start


def test_no_chain_of_imports_grows_longer():
    """What must be read below a file, at most; imports in functions begin no chain.

    A package's face only hands names on.
    """
    files = [m for m in MODULES if not m.is_package and m.name not in FACES]
    at_top = {module.name: imported_at_top(module) for module in files}
    length: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(at_top).static_order():
        length[name] = 1 + max((length[below] for below in at_top[name]), default=0)
    assert max(length.values()) <= MOST_FILES_IN_A_CHAIN


def imported_at_top(module):
    """The files of tfdp that are read when `module` is; faces of packages left out."""
    body = [node for node in module.tree.body if not is_for_types_only(node)]
    top = dataclasses.replace(module, tree=without_functions(body))
    faces = {other.name for other in MODULES if other.is_package} | FACES
    return {name for _, name in imported_modules(top)} - faces - {module.name}


def is_for_types_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def without_functions(body):
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    kept = [node for node in body if not isinstance(node, definitions)]
    return ast.Module(kept, [])


def test_a_class_name_has_one_meaning():
    names = [
        node.name
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    several = {name for name in names if names.count(name) > 1}
    # Public, in two modules: the callback, and what it saves with.
    assert several == {"Checkpoint"}
