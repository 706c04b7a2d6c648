"""Connects to a TPU and starts it, once; explains what goes wrong."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import tensorflow as tf

from tfdp.cluster.tpu import explain_tpu_failure, find_tpu
from tfdp.errors import ConfigurationError, TPUError

__all__ = ["connect"]

PACKAGES = ("tensorflow-tpu", "tensorflow", "tensorflow-cpu", "libtpu", "keras")

# By address: starting a TPU again would throw away every variable that lies on it.
_CONNECTED: dict[str, Any] = {}


def connect(tpu: Any = "local") -> Any:
    """The resolver of a TPU that runs.

    Args:
      tpu: "local" for the cores of this machine, the name of a TPU,
        `grpc://host:port`, or a `tf.distribute.cluster_resolver.TPUClusterResolver`.

    Raises:
      ConfigurationError: when `tpu` is none of these.
      TPUError: when there is no such TPU or it does not start; it says what to do.
    """
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    is_resolver = isinstance(tpu, resolver_class)
    if not is_resolver and (not isinstance(tpu, str) or not tpu):
        raise ConfigurationError(
            "tpu must be 'local', the name of a TPU, grpc://host:port, or a "
            f"TPUClusterResolver. Received: {tpu!r}."
        )
    address = str(tpu.master() or "local") if is_resolver else tpu
    if address not in _CONNECTED:
        try:
            resolver = tpu if is_resolver else resolver_class(tpu=tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        # Errors of TensorFlow, of its library and of the network: one root each.
        except (tf.errors.OpError, RuntimeError, ValueError, OSError) as error:
            found = find_tpu()
            signs = found.signs if found is not None else ()
            raise TPUError(
                explain_tpu_failure(str(error), address, signs, installed_versions())
            ) from error
        _CONNECTED[address] = resolver
    return _CONNECTED[address]


def installed_versions() -> dict[str, str]:
    """The versions of the packages that a TPU's use depends on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
