"""The parity check: does a model train on N replicas as it does on one device?

Names are resolved when first used, so that reports and causes load without TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.tools.testing.parity import check_parity
    from tfdp.tools.testing.report import Finding, ParityReport, VariableRow

# Public name -> module that defines it.
_PUBLIC = {
    "Finding": "tfdp.tools.testing.report",
    "ParityReport": "tfdp.tools.testing.report",
    "VariableRow": "tfdp.tools.testing.report",
    "check_parity": "tfdp.tools.testing.parity",
}

__all__ = ["Finding", "ParityReport", "VariableRow", "check_parity"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdp.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
