"""Checks of the installed versions, and of `balance`."""

from __future__ import annotations

import functools
import warnings

import keras
import tensorflow as tf

from tfdp.checks import check_one_of
from tfdp.errors import ConfigurationError, UncheckedVersionWarning
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding
from tfdp.seams.losses import replace_loss_functions
from tfdp.seams.table import CHECKED_VERSIONS, check_seams, is_of_keras_3_16
from tfdp.tracing.statements import register_results


def check_versions() -> None:
    """Refuses frameworks with other methods than tfdp replaces, replaces the functions
    that are replaced for good, and warns, once, of other minor versions."""
    check_seams()
    replace_loss_functions()
    register_results()
    if is_of_keras_3_16():
        from tfdp._private.newer_keras import mend_newer_keras

        mend_newer_keras()
    warn_of_other_versions()


#: What `balance` may be, besides None.
BALANCES = ("speed",)


@functools.cache
def warn_of_other_versions() -> None:
    """Warns, once, of minor versions that tfdp was not checked with."""
    installed = {"tensorflow": tf.__version__, "keras": keras.__version__}
    for package, checked in CHECKED_VERSIONS.items():
        if installed[package].split(".")[:2] != checked.split(".")[:2]:
            warnings.warn(
                f"tfdp was checked with {package} {checked}, and this is "
                f"{installed[package]}. Results may differ from one device's without "
                f"an error: install {package}=={checked}, or compare your model with "
                "one device by `tfdp check`.",
                UncheckedVersionWarning,
                stacklevel=4,
            )


def checked_balance(
    balance: str | None, hosts: int, communication: Communication, sharding: Sharding
) -> str | None:
    """`balance`, if hosts can share batches so, else a ConfigurationError."""
    if balance is None:
        return None
    check_one_of("balance", balance, BALANCES)
    if hosts == 1:
        raise ConfigurationError(
            f"balance={balance!r} gives hosts rows of a batch by their speed, and here "
            "is one host. Leave it out; tfdp.auto_strategy does so itself."
        )
    if communication.min_hosts is not None:
        raise ConfigurationError(
            f"balance={balance!r} splits batches by what all hosts have measured in "
            "the same step, and with Communication(min_hosts=...) hosts train apart. "
            "Leave out one of the two."
        )
    if sharding.stage:
        raise ConfigurationError(
            f"balance={balance!r} needs the time that each host computes, and with "
            f"shard={sharding.what!r} hosts wait for each other's shards meanwhile. "
            "Leave out one of the two."
        )
    return balance
