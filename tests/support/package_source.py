"""The package's own source as syntax trees, for the tests that hold its house rules."""

import ast
import dataclasses
import pathlib

REPOSITORY = pathlib.Path(__file__).parents[2]
PACKAGE = REPOSITORY / "tfdp"


@dataclasses.dataclass(frozen=True)
class Module:
    """One file: its dotted name, its path in the repository, its tree."""

    name: str
    path: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


def parse(source: str, name: str = "tfdp.example") -> Module:
    """A module from text, for tests of the rules themselves."""
    return Module(name, name.replace(".", "/") + ".py", ast.parse(source))


def modules() -> list[Module]:
    """Every module of tfdp, by name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(REPOSITORY)
        parts = relative.with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        tree = ast.parse(path.read_text("utf-8"), filename=str(relative))
        found.append(Module(".".join(parts), relative.as_posix(), tree))
    return found


def imported_names(module: Module) -> list[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, inside functions too.

    `from a.b import c` gives `a.b.c`: whether c is a module or a name in one is for
    the caller to tell. Relative imports are made absolute.
    """
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.package.split(".")
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found
