"""Which files of tests import a changed module, and through how many others.

The imports are read from the source; nothing is imported. A package's `__init__` that
passes names on stands for the modules that define them, so `tfdp.layers.Dense` needs
`tfdp/layers/dense.py` and not all that `tfdp` offers. A text that names a module counts
as an import: that is how tests start programs.
"""

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterable

from tests.support.tiers import REPOSITORY

ROOTS = ("tfdp", "tests", "benchmarks")


class Imports:
    """The import graph of some modules.

    Args:
      sources: from a module's path in the repository to its text.
    """

    def __init__(self, sources: dict[str, str]):
        self._paths = {module_name(path): path for path in sources}
        self._sources = sources

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """From every file that imports one of those to the least number of imports."""
        importers = collections.defaultdict(set)
        for path in self._sources:
            for imported in self.of(path):
                importers[imported].add(path)
        found = {path: 0 for path in changed if path in self._sources}
        waiting = collections.deque(found)
        while waiting:
            path = waiting.popleft()
            for importer in importers[path] - found.keys():
                found[importer] = found[path] + 1
                waiting.append(importer)
        return found

    def of(self, path: str) -> set[str]:
        """The files that a file imports, also by a name that they define."""
        read = self._read(path)
        names, looked_into = set(read.bound.values()), set()
        for root, *below in read.attributes:
            start = read.bound.get(root, root)
            looked_into.add(start)
            names.add(".".join([start, *below]))
        # What is only looked into is as much as is taken out of it.
        names -= {name for name in looked_into if self._passes_on(name)}
        found = {self._file_of(name) for name in names}
        return (found | {self._paths.get(text) for text in read.texts}) - {path, None}

    def _passes_on(self, name: str) -> bool:
        return self._paths.get(name, "").endswith("__init__.py")

    def _file_of(self, name: str) -> str | None:
        """The file that defines a dotted name; a package that passes it on is none."""
        module, below = name, []
        while module and module not in self._paths:
            module, _, last = module.rpartition(".")
            below.insert(0, last)
        if below and self._passes_on(module):
            first, *others = below
            inner = ".".join(
                [self._read(self._paths[module]).bound.get(first, ""), *others]
            )
            if inner.partition(".")[0] in ROOTS and inner != name:
                return self._file_of(inner)
        return self._paths.get(module)

    @functools.cache  # noqa: B019 - as long as the graph
    def _read(self, path: str) -> "_Read":
        read, attributes = _Read(), []
        for node in ast.walk(ast.parse(self._sources[path])):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.texts.add(node.value)
            elif isinstance(node, ast.Attribute):
                attributes.append(dotted(node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                # Of the repository only, which has no relative imports.
                module = getattr(node, "module", None)
                for alias in node.names:
                    name = f"{module}.{alias.name}" if module else alias.name
                    if name.partition(".")[0] in ROOTS:
                        read.bound[alias.asname or alias.name] = name
        known = read.bound.keys() | set(ROOTS)
        read.attributes = {parts for parts in attributes if parts[0] in known}
        return read


@dataclasses.dataclass
class _Read:
    """What a file has of others: what its imports bind, texts, attributes it takes."""

    bound: dict[str, str] = dataclasses.field(default_factory=dict)
    texts: set[str] = dataclasses.field(default_factory=set)
    attributes: set[tuple[str, ...]] = dataclasses.field(default_factory=set)


def dotted(node: ast.Attribute) -> tuple[str, ...]:
    """`a.b.c` as its parts; a part without a name at the root gives ""."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else "", *parts)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def sources() -> dict[str, str]:
    """Every module of the repository that tests can import."""
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text("utf-8")
        for root in ROOTS
        for path in REPOSITORY.joinpath(root).rglob("*.py")
    }


def nearness(changed: Iterable[str]) -> dict[str, int]:
    """From each affected file of tests to its number of imports from a change."""
    changed = list(changed)
    found = Imports(sources()).distances(changed) if changed else {}
    return {
        path: distance
        for path, distance in found.items()
        if path.startswith("tests/") and path.rpartition("/")[2].startswith("test_")
    }
