"""Private TensorFlow and Keras names are used in `tfdp/_private` and nowhere else.

But for the hooks of `tfdp._private.hooks`, which a class calls on `super()`.

Held on the source text: imports of private modules, attributes with a leading
underscore on anything but the object itself, and such names handed to `getattr`.
`tests/devices/test_private_overrides.py` holds what only the loaded classes show.
"""

import ast
import collections
import pathlib
import re

import pytest

from tests.support.package_source import REPOSITORY, imported_names, modules, parse
from tfdp._private.hooks import HOOKS

HOME = "tfdp._private"
PRIVATE_MODULES = (
    "tensorflow.compiler",
    "tensorflow.core",
    "tensorflow.python",
    "keras.src",
)
OWN_OBJECTS = {"self", "cls"}
# (file, attribute): underscore names of tfdp's own objects, read from outside.
# `os._exit` is the documented way to end a process without its handlers.
ALLOWED = {
    ("tfdp/hosts/mpi_link.py", "_exit"),
    ("tfdp/tools/commands/end_of_process.py", "_exit"),
    ("tfdp/cluster/helper_process.py", "_inheriting"),  # Python's own
    ("tfdp/strategies/multi_host.py", "_make_extended"),
    ("tfdp/strategies/multi_host.py", "_over_replicas"),
    ("tfdp/strategies/multi_host.py", "_reduce_values"),
    ("tfdp/strategies/multi_host.py", "_replicas"),
}
REFLECTION = {"getattr", "setattr", "hasattr", "delattr"}
MODULES = modules()


def is_home(module):
    return module.name == HOME or module.name.startswith(f"{HOME}.")


def is_private(attribute):
    return attribute.startswith("_") and not attribute.endswith("__")


def is_super(owner):
    return (
        isinstance(owner, ast.Call)
        and isinstance(owner.func, ast.Name)
        and owner.func.id == "super"
    )


def private_imports(module):
    return [
        (line, name)
        for line, name in imported_names(module)
        if f"{name}.".startswith(tuple(f"{private}." for private in PRIVATE_MODULES))
    ]


def private_attributes(module):
    """(line, attribute) of each underscore name on another object than self."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            is_own = isinstance(owner, ast.Name) and owner.id in OWN_OBJECTS
            if not is_own and not (is_super(owner) and node.attr in HOOKS):
                found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in REFLECTION and len(node.args) > 1:
                name = getattr(node.args[1], "value", None)
                if isinstance(name, str) and is_private(name):
                    found.append((node.lineno, name))
    return [
        (line, attribute)
        for line, attribute in found
        if (module.path, attribute) not in ALLOWED
    ]


OUTSIDE = [module for module in MODULES if not is_home(module)]


@pytest.mark.parametrize("module", OUTSIDE, ids=lambda module: module.name)
def test_no_private_framework_name_outside_its_home(module):
    assert private_imports(module) + private_attributes(module) == []


def test_each_private_name_is_imported_in_one_file_only():
    files = collections.defaultdict(set)
    for module in MODULES:
        for _, name in private_imports(module):
            files[name].add(module.path)
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_the_checked_versions_are_the_tested_ones():
    tree = ast.parse(pathlib.Path(REPOSITORY, "tfdp/seams/table.py").read_text("utf-8"))
    checked = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "CHECKED_VERSIONS"
    )
    constraints = pathlib.Path(REPOSITORY, "constraints.txt").read_text("utf-8")
    # Other than for an older Python.
    newest = re.sub(r"^.*python_version <.*$", "", constraints, flags=re.M)
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", newest, re.M))
    assert checked == {
        "tensorflow": pinned["tensorflow-cpu"],
        "keras": pinned["keras"],
    }


@pytest.mark.parametrize(
    "source",
    [
        "from tensorflow.python.distribute import values",
        "import keras.src.backend",
        "from keras import src",
        "def late():\n    from tensorflow.core.protobuf import config_pb2",
        "strategy._extended",
        "super()._gather_implementation(1)",
        "getattr(variable, '_values')",
        "self.optimizer._iterations",
    ],
)
def test_the_rule_sees_a_private_name(source):
    module = parse(source)
    assert len(private_imports(module) + private_attributes(module)) == 1


@pytest.mark.parametrize("source", ["self._mine", "cls._mine", "x.__class__"])
def test_the_rule_lets_own_names_pass(source):
    assert private_attributes(parse(source)) == []
