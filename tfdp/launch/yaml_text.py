"""Plain values as YAML that people edit: block style, what needs it in quotes."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["yaml_text"]

# Words that no reader of YAML takes for anything but text, but for READ_OTHERWISE.
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
READ_OTHERWISE = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def yaml_text(value: Any) -> str:
    """A value of dicts, lists, str, int, bool and float as YAML, with a line's end.

    >>> print(yaml_text({"a": [1, "x: y"], "b": {"on": True}, "c": []}), end="")
    a:
    - 1
    - "x: y"
    b:
      "on": true
    c: []
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for item in value.items() for line in _entry(*item)]
    if isinstance(value, list) and value:
        return [line for item in value for line in _item(item)]
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    inner = _lines(value)
    if isinstance(value, dict) and value:
        return [f"{_scalar(key)}:", *(f"  {line}" for line in inner)]
    if isinstance(value, list) and value:
        return [f"{_scalar(key)}:", *inner]
    return [f"{_scalar(key)}: {inner[0]}"]


def _item(value: Any) -> list[str]:
    first, *others = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in others)]


def _scalar(value: Any) -> str:
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    if is_plain and value.lower() not in READ_OTHERWISE:
        return str(value)
    # JSON is YAML. As it is, and not as pairs of surrogates, which YAML does not have.
    return json.dumps(value, ensure_ascii=False)
