"""Ways to send fewer bytes of a gradient: `Communication(compression=...)`.

method      the interface: what is compressed, the state, the exchange, its bytes
blocks      shared by methods that cut numbers into blocks
cast, int8, fp8, sign_sgd, top_k, random_k, power_sgd   one method each
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdp._private.lazy_names import lazy_names
from tfdp.errors import ConfigurationError

if TYPE_CHECKING:
    from tfdp.compression.casting import Cast
    from tfdp.compression.floats import FP8
    from tfdp.compression.integers import Int4, Int8
    from tfdp.compression.method import Method
    from tfdp.compression.power_sgd import PowerSGD
    from tfdp.compression.random_k import RandomK
    from tfdp.compression.sign_sgd import SignSGD
    from tfdp.compression.top_k import TopK

# Imported when first used: a method -> its module.
_METHODS = {
    "Cast": "tfdp.compression.casting",
    "FP8": "tfdp.compression.floats",
    "Int4": "tfdp.compression.integers",
    "Int8": "tfdp.compression.integers",
    "PowerSGD": "tfdp.compression.power_sgd",
    "RandomK": "tfdp.compression.random_k",
    "SignSGD": "tfdp.compression.sign_sgd",
    "TopK": "tfdp.compression.top_k",
}


def from_config(config: dict[str, Any]) -> Method:
    """The method that returned `config` from its `get_config`.

    Raises:
      ConfigurationError: when `config` names no method.
    """
    values = dict(config) if isinstance(config, Mapping) else {"method": config}
    name = values.pop("method", None)
    if name not in _METHODS:
        raise ConfigurationError(
            f"No method of tfdp.compression is called {name!r}. Known: "
            f"{', '.join(sorted(_METHODS))}."
        )
    method: Method = __getattr__(name)(**values)
    return method


__all__ = [
    "FP8",
    "Cast",
    "Int4",
    "Int8",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TopK",
    "from_config",
]
__getattr__, __dir__ = lazy_names(__name__, _METHODS)
