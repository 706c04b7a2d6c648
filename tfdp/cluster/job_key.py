"""The job key: a secret shared by the workers of one training."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping

from tfdp.errors import ClusterError

JOB_KEY = "TFDP_JOB_KEY"
KEY_BYTES = 32
# A peer that hears one worker's proof can try keys offline, so a key must not be short.
# It is passed in variables and command lines, so it has no spaces.
PATTERN = re.compile(r"[!-~]{16,256}")


def make_job_key() -> str:
    """A new key for one run: 64 hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


def checked_job_key(key: object, name: str = JOB_KEY) -> str:
    """`key` if valid; else a `ClusterError`, which does not contain it."""
    if not isinstance(key, str) or not PATTERN.fullmatch(key):
        length = f"{len(key)} characters" if isinstance(key, str) else type(key)
        raise ClusterError(
            f"{name} must be a str of 16 to 256 printable ASCII characters without "
            "spaces, the same for all workers: `python -c 'import secrets; "
            f"print(secrets.token_hex())'` makes one. Received: {length}."
        )
    return key


def find_job_key(environment: Mapping[str, str] | None = None) -> str | None:
    """The checked key in TFDP_JOB_KEY; None if it is not set or empty."""
    key = (os.environ if environment is None else environment).get(JOB_KEY, "").strip()
    return checked_job_key(key) if key else None
