"""Ways to send fewer bytes of a gradient: `Communication(compression=...)`.

method      the interface: what is compressed, the state, the exchange, its bytes
blocks      shared by methods that cut numbers into blocks
cast, int8, fp8, sign_sgd, top_k, random_k, power_sgd   one method each
"""

from typing import Any

from tfdp.compression.casting import Cast
from tfdp.compression.floats import FP8
from tfdp.compression.integers import Int4, Int8
from tfdp.compression.method import Method
from tfdp.compression.power_sgd import PowerSGD
from tfdp.compression.random_k import RandomK
from tfdp.compression.sign_sgd import SignSGD
from tfdp.compression.top_k import TopK
from tfdp.errors import ConfigurationError

_METHODS: dict[str, type[Method]] = {
    method.__name__: method
    for method in (Cast, FP8, Int4, Int8, PowerSGD, RandomK, SignSGD, TopK)
}


def from_config(config: dict[str, Any]) -> Method:
    """The method that returned `config` from its `get_config`.

    Raises:
      ConfigurationError: when `config` names no method.
    """
    values = dict(config)
    name = values.pop("method", None)
    if name not in _METHODS:
        raise ConfigurationError(
            f"No method of tfdp.compression is called {name!r}. Known: "
            f"{', '.join(sorted(_METHODS))}."
        )
    return _METHODS[name](**values)


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


def __dir__() -> list[str]:
    return [*__all__]
