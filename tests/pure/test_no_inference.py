"""What a program means is not read from op types, frames or bytecode, but in one room.

`tfdp/lint` knows what operations do; `tfdp/_private/frames.py` reads Keras' frames,
where Keras offers nothing else; the table of seams checks that the names are there.
"""

import ast

from tests.support.package_source import modules

LINT = ("tfdp.lint", "tfdp.tools")
# Where the order of operations is decided: exchanges, copies and delays by their kind.
MOST_COMPARISONS = 10
FRAMES = {"_getframe", "f_locals", "f_back", "f_code", "f_globals", "currentframe"}
BYTECODE = {"co_names", "co_code", "co_consts", "co_freevars", "get_instructions"}


def compares_op_types(tree):
    """The lines that compare, or look up, the type of an operation."""

    def is_type(node):
        return isinstance(node, ast.Attribute) and node.attr == "type"

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            found += [node.lineno] * any(map(is_type, ast.walk(node)))
        elif isinstance(node, ast.Subscript) and is_type(node.slice):
            found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # `op.type.startswith(...)`, `TABLE.get(op.type)`
            is_lookup = node.func.attr == "get" and any(map(is_type, node.args))
            found += [node.lineno] * (is_type(node.func.value) or is_lookup)
    return sorted(found)


def attributes(tree, names):
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names
    }


def test_op_types_are_compared_in_lint():
    found = {
        module.path: compares_op_types(module.tree)
        for module in modules()
        if not module.name.startswith(LINT)
    }
    lines = [f"{path}:{line}" for path, all_ in found.items() for line in all_]
    assert len(lines) <= MOST_COMPARISONS, lines


def test_such_comparisons_are_seen():
    tree = ast.parse(
        "if op.type == 'A' or 'B' in (one.op.type,): pass\n"
        "x = TABLE[op.type]\n"
        "y = TABLE.get(op.type)\n"
        "z = op.type.startswith('C')\n"
        "kind.type = 3\n"
    )
    assert compares_op_types(tree) == [1, 1, 2, 3, 4]


def test_frames_are_read_in_one_file():
    found = {m.path for m in modules() if attributes(m.tree, FRAMES)}
    # tools: the stacks of threads that `tfdp selftest` shows when it waits.
    inner = {path for path in found if not path.startswith("tfdp/tools/")}
    assert inner == {"tfdp/_private/frames.py"}


def test_bytecode_is_read_to_check_the_table_only():
    found = [m.path for m in modules() if attributes(m.tree, BYTECODE)]
    assert found == ["tfdp/seams/table.py"]
