"""The job key: what the workers of one training know and strangers do not."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping

from tfdp.errors import ClusterError

JOB_KEY = "TFDP_JOB_KEY"
KEY_BYTES = 32
# Who has heard one worker prove that it knows the key can try keys on his own machine:
# a key must not be short. It travels in variables and lines, so it has no spaces.
PATTERN = re.compile(r"[!-~]{16,256}")


def make_job_key() -> str:
    """A new key, for one run: 64 hexadecimal digits.

    >>> len(make_job_key())
    64
    """
    return secrets.token_hex(KEY_BYTES)


def checked_job_key(key: object, name: str = JOB_KEY) -> str:
    """The key, if it is one.

    Raises:
      ClusterError: when it is not; the message does not hold it.
    """
    if not isinstance(key, str) or not PATTERN.fullmatch(key):
        length = f"{len(key)} characters" if isinstance(key, str) else type(key)
        raise ClusterError(
            f"{name} must be a str of 16 to 256 printable ASCII characters without "
            "spaces, the same for all workers: `python -c 'import secrets; "
            f"print(secrets.token_hex())'` makes one. Received: {length}."
        )
    return key


def find_job_key(environment: Mapping[str, str] | None = None) -> str | None:
    """The key in the variable TFDP_JOB_KEY; None where it is not set, or is empty.

    Args:
      environment: variables by name; None takes those of this process.

    Raises:
      ClusterError: when it is set to something that is not a key.
    """
    key = (os.environ if environment is None else environment).get(JOB_KEY, "").strip()
    return checked_job_key(key) if key else None
