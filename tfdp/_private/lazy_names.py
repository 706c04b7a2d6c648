"""Public names of a module that are imported when first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    module: str, public: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `module`; `public`: name -> defining module.

    A name that maps to its own module is that module. `dir(module)` is its `__all__`.
    """

    def resolve(name: str) -> Any:
        if name not in public:
            from tfdp.checks import did_you_mean

            hint = did_you_mean(name, public) or f" It has: {', '.join(public)}."
            raise AttributeError(f"module {module!r} has no attribute {name!r}.{hint}")
        value: Any = importlib.import_module(public[name])
        if public[name] != f"{module}.{name}":
            value = getattr(value, name)
        setattr(sys.modules[module], name, value)
        return value

    return resolve, lambda: [*vars(sys.modules[module])["__all__"]]
