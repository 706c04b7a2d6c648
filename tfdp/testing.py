"""The parity check: does a model train on N replicas as it does on one device?

Names are imported when first used, so that reports load without TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdp._private.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
