"""Dotted names of tfdp, looked up in its sources: nothing is imported."""

import ast
import functools
import re

from tests.support.package_source import REPOSITORY, Module, modules

#: Rooms and files whose `__all__` users are told of; the package itself is another.
ROOMS = (
    "tfdp.callbacks",
    "tfdp.checkpoint",
    "tfdp.cluster",
    "tfdp.compression",
    "tfdp.data",
    "tfdp.errors",
    "tfdp.layers",
    "tfdp.losses",
    "tfdp.optimizers",
    "tfdp.planning",
    "tfdp.ray",
    "tfdp.schedules",
    "tfdp.sync",
    "tfdp.testing",
)


@functools.cache
def _modules() -> dict[str, Module]:
    return {module.name: module for module in modules()}


@functools.cache
def _names_in(module: str) -> dict[str, str]:
    """Name to where it is defined, of what a module defines or imports."""
    names: dict[str, str] = {}
    for node in ast.walk(_modules()[module].tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in _modules()[module].tree.body:
        for name in _defined(node):
            names[name] = f"{module}.{name}"
    return names


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def definition_of(name: str) -> str | None:
    """Where a dotted name is defined, `tfdp.module.name`; None: there is none.

    An attribute of a class counts where the class, or one of its bases in tfdp, has
    it, or where a base is not tfdp's: what that one has is not looked up.
    """
    if name in _modules():
        return name
    above, _, last = name.rpartition(".")
    if not above:
        return None
    parent = definition_of(above)
    if parent is None:
        return None
    if parent in _modules():
        found = _names_in(parent).get(last)
        if found is None or found == f"{parent}.{last}":
            return found
        return definition_of(found) if found.startswith("tfdp") else None
    return f"{parent}.{last}" if _class_has(parent, last) else None


def _class_has(name: str, attribute: str) -> bool:
    module, _, last = name.rpartition(".")
    found = [
        node
        for node in _modules()[module].tree.body
        if isinstance(node, ast.ClassDef) and node.name == last
    ]
    if not found:
        return False
    own = {defined for node in found[0].body for defined in _defined(node)}
    stored = {
        node.attr
        for node in ast.walk(found[0])
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    if attribute in own | stored:
        return True
    for base in found[0].bases:
        known = definition_of(f"{module}.{ast.unparse(base)}")
        if known is None or _class_has(known, attribute):
            return True
    return False


def arguments_of(name: str) -> set[str]:
    """What the docstring of a function or class has as `Args`."""
    module, _, last = (definition_of(name) or ".").rpartition(".")
    for node in _modules()[module].tree.body if module in _modules() else ():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == last:
            text = ast.get_docstring(node) or ""
            args = re.search(r"^Args:\n((?: .*\n?|\n)*)", text, re.M)
            return set(re.findall(r"^  (\w+):", args.group(1), re.M)) if args else set()
    return set()


def listed(module: str) -> list[str]:
    """The names in a module's `__all__`, dotted."""
    for node in _modules()[module].tree.body:
        if isinstance(node, ast.Assign) and _defined(node) == ["__all__"]:
            return [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    raise LookupError(f"{module} has no __all__ that can be read")


def public_names() -> list[str]:
    """Every public name: of the package, and of its rooms; the rooms themselves not."""
    for node in _modules()["tfdp"].tree.body:
        if isinstance(node, ast.Assign) and _defined(node) == ["_PUBLIC"]:
            top = [f"tfdp.{name}" for name in ast.literal_eval(node.value)]
    names = [name for name in top if name not in _modules()]
    return sorted({*names, *(name for room in ROOMS for name in listed(room))})


#: Notes for the developers, which are not on the site.
NOTES = REPOSITORY / "docs" / "notes"


def pages():
    """The pages for people, as paths."""
    return [
        *sorted(REPOSITORY.glob("*.md")),
        *sorted((REPOSITORY / "docs").rglob("*.md")),
        *sorted((REPOSITORY / "examples").rglob("*.md")),
    ]
