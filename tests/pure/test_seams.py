"""Objects of Keras and TensorFlow are changed in `tfdp/seams` and nowhere else.

Held on the source text: no write into the dictionary of an object, no `setattr`, no
change of a class; and each row of the table names something that the package replaces.
"""

import ast

import pytest

from tests.support.package_source import modules, parse

HOME = "tfdp.seams"
WRITES = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__"}
# Writes that replace nothing of another package.
ALLOWED = {
    "tfdp/hosts/python_calls.py": "Python's last error is dropped at exit",
    "tfdp/_private/lazy_names.py": "modules of tfdp get their public names",
    "tfdp/callbacks/training_state.py": "callbacks get the state that a file holds",
    "tfdp/strategies/multi_host_loops.py": "callbacks get the path of another folder",
}
MODULES = [
    module
    for module in modules()
    if not module.name.startswith((HOME, "tfdp.tools")) and module.path not in ALLOWED
]


def is_dictionary(node, names):
    """Whether an expression is the dictionary of an object, or a name for it."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars"
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__"
    return isinstance(node, ast.Name) and node.id in names


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def writes(tree):
    """The lines that write into an object from outside of its class."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    return sorted({line for scope in (tree, *functions) for line in writes_in(scope)})


def writes_in(tree):
    is_module = isinstance(tree, ast.Module)
    names = {
        target.id
        for node in ast.walk(tree)
        if not is_module
        and isinstance(node, ast.Assign)
        and is_dictionary(node.value, ())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            is_set = isinstance(called, ast.Name) and called.id in (
                "setattr",
                "delattr",
            )
            is_change = isinstance(called, ast.Attribute) and called.attr in WRITES
            if is_set or (is_change and is_dictionary(called.value, names)):
                found.append(node.lineno)
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Subscript) and is_dictionary(target.value, names):
                found.append(node.lineno)
            if isinstance(target, ast.Attribute) and target.attr == "__class__":
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_objects_of_others_are_changed_in_one_room(module):
    assert writes(module.tree) == []


@pytest.mark.parametrize(
    "source",
    [
        "vars(model)['call'] = call",
        "vars(model).update(call=call)",
        "del vars(model)['call']",
        "def f(model):\n    own = vars(model)\n    own['call'] = call",
        "def f(model):\n    own = model.__dict__\n    own.pop('call')",
        "setattr(keras.Variable, NAME, initialize)",
        "distributed.__class__ = Noticing",
    ],
)
def test_the_rule_sees_a_write(source):
    assert len(writes(parse(source).tree)) == 1


def texts(module):
    """The strings of a module, as in `NAME = "_losses"`, and the attributes it uses."""
    strings = {
        node.value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    nodes = ast.walk(module.tree)
    return strings | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def rows():
    """The attributes in the table, from its text: TensorFlow takes seconds."""
    [table] = [module for module in modules() if module.name == f"{HOME}.table"]
    calls = [node for node in ast.walk(table.tree) if isinstance(node, ast.Call)]
    for call in calls:
        name = getattr(call.func, "id", None)
        if name == "Seam" and isinstance(call.args[1], ast.Constant):
            yield call.args[1].value
        elif name == "_seams":
            yield from (one.arg for one in call.keywords if one.arg is not None)


def test_every_row_is_used():
    used = set().union(
        *(texts(module) for module in modules() if module.name != f"{HOME}.table")
    )
    unused = {name for name in rows() if name not in used}
    assert len(list(rows())) > 40
    assert unused == set()
