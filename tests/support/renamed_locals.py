"""Compiles a function of a library again, with other names for local variables."""

import ast
import contextlib
import inspect
import textwrap


class _Renaming(ast.NodeTransformer):
    def __init__(self, names):
        self.names = names

    def visit_Name(self, node):
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_FunctionDef(self, node):
        node.name = self.names.get(node.name, node.name)
        self.generic_visit(node)
        return node


def locals_of(function):
    """The names that `renamed` can rename."""
    code = inspect.unwrap(function).__code__
    return [name for name in (*code.co_varnames, *code.co_cellvars) if name != "self"]


@contextlib.contextmanager
def renamed(function, *names):
    """Within this, local variables have other names; the signature is the same."""
    function = inspect.unwrap(function)
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    tree.decorator_list = []
    others = {name: f"other_{name}" for name in names}
    arguments = tree.args
    for part in tree.body:
        _Renaming(others).visit(part)
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    moves = [
        f"{others[one.arg]} = {one.arg}; del {one.arg}"
        for one in every
        if one.arg in others
    ]
    tree.body = [*ast.parse("\n".join(moves)).body, *tree.body]
    # `super()` reads the class from the function around.
    around = ast.parse("def around(__class__):\n    pass").body[0]
    around.body = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    module = ast.fix_missing_locations(ast.Module([around], []))
    space = {}
    exec(compile(module, inspect.getsourcefile(function), "exec"), space)
    before, function.__code__ = function.__code__, space["around"](None).__code__
    try:
        yield
    finally:
        function.__code__ = before
