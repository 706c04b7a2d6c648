"""What the workers of one exchange must have alike, in a header of 24 bytes.

A kind, a number and a size are told in full, so that an error can name the other
worker's. Label, types, shapes, ranges and the wire's type are told by their digest:
equal sizes do not make float32 [2] and int32 [2] the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Sequence

import numpy as np

from tfdp.checks import is_whole
from tfdp.hosts.ring import wire_type

KINDS = (
    "sum",
    "scatter",
    "shards",
    "gather",
    "all to all",
    "mpi sum",
    "mpi scatter",
    "mpi shards",
    "mpi all to all",
)
SUMS = ("sum", "mpi sum")
# Place of the kind, number modulo 2^32, bytes, digest.
DIGEST_BYTES = 11
HEADER = struct.Struct(f"<BIQ{DIGEST_BYTES}s")
NUMBERS = 2**32
# A note is for a person: of very many arrays it tells the first ones.
MOST_ARRAYS_IN_NOTE = 500
MOST_ARRAYS_IN_WORDS = 3
MOST_TOLD = 1 << 63
# Keras numbers the names of layers by what a process has made before ("dense_1"): a
# model that only one worker looks at moves the numbers of all that it makes later.
NUMBER_OF_NAME = re.compile(r"_\d+(?![0-9A-Za-z])")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What one worker brings to an exchange.

    Args:
      kind: one of KINDS.
      number: which exchange of its channel it is, from 1.
      size_bytes: what travels of it; in a gather the most that each worker may bring.
      label: names it in errors.
      arrays: type, shape and ranges of each, in words.
      wire_dtype: the type in which the numbers travel; None for their own.
      left_out: how many more arrays there are, in what another worker has told.
    """

    kind: str
    number: int
    size_bytes: int
    label: str
    arrays: tuple[str, ...] = ()
    wire_dtype: str | None = None
    left_out: int = 0

    @property
    def header(self) -> bytes:
        """What is compared."""
        label = NUMBER_OF_NAME.sub("", self.label)
        told = "\0".join((label, str(self.wire_dtype), *self.arrays))
        digest = hashlib.blake2b(told.encode(), digest_size=DIGEST_BYTES).digest()
        number = self.number % NUMBERS
        return HEADER.pack(KINDS.index(self.kind), number, self.size_bytes, digest)

    @property
    def note(self) -> str:
        """What another worker needs to tell the difference."""
        fields = dataclasses.asdict(self)
        fields["arrays"] = self.arrays[:MOST_ARRAYS_IN_NOTE]
        fields["left_out"] = len(self.arrays[MOST_ARRAYS_IN_NOTE:])
        return json.dumps(fields)

    @classmethod
    def from_note(cls, note: str) -> Fingerprint | None:
        """The terms that the note tells; None when it tells none."""
        try:
            fields = json.loads(note)
            told = cls(**{**fields, "arrays": tuple(map(str, fields["arrays"]))})
            numbers = told.number, told.size_bytes, told.left_out
            are_numbers = all(is_whole(each, 0, MOST_TOLD) for each in numbers)
            are_texts = isinstance(told.label, str) and told.kind in KINDS
            return told if are_numbers and are_texts else None
        except (ValueError, TypeError, KeyError):
            return None


class CollectiveMismatch(Exception):
    """The worker before sent another header."""

    def __init__(self, mine: Fingerprint, their_header: bytes):
        super().__init__("out of step")
        self.mine = mine
        self.their_header = their_header


def fingerprint_of(
    kind: str,
    number: int,
    arrays: Sequence[np.ndarray],
    label: str,
    wire_dtype: str | None = None,
    parts: Sequence[Sequence[object]] = (),
    limit: int | None = None,
) -> Fingerprint:
    """The terms of an exchange of `arrays`.

    Args:
      kind, number, label, wire_dtype: see `Fingerprint`.
      arrays: of one type.
      parts: of each array: in sums the shapes that it was packed from, else each
        worker's range. See `HostLink`.
      limit: the most bytes that each worker may bring, where sizes differ.
    """
    of_each: Sequence[Sequence[object]] = [[list(array.shape)] for array in arrays]
    if kind in SUMS and parts:
        # As if each tensor travelled by itself: that is what must be alike.
        of_each = [packed or own for own, packed in zip(of_each, parts, strict=True)]
    told = [
        f"{array.dtype.name} {shape}"
        for array, shapes in zip(arrays, of_each, strict=True)
        for shape in shapes
    ]
    if kind not in SUMS and parts:
        told = [f"{t} in {r}" for t, r in zip(told, parts, strict=True)]
    own = arrays[0].itemsize if arrays else 0
    item_bytes = wire_type(wire_dtype).itemsize if wire_dtype else own
    size = item_bytes * sum(array.size for array in arrays) if limit is None else limit
    return Fingerprint(kind, number, size, label, tuple(told), wire_dtype)


def difference(
    rank: int, other: int, found: CollectiveMismatch, note: str | None
) -> str:
    """What both sides had, as far as it is known.

    Args:
      rank: this worker.
      other: the worker whose header differed.
      found: what this worker has, and that header.
      note: the other's last `Fingerprint.note`, where it came.
    """
    mine, header = found.mine, found.their_header
    kind, number, size_bytes, _ = HEADER.unpack(header)
    theirs = Fingerprint.from_note(note) if note is not None else None
    if theirs is not None and theirs.number % NUMBERS != number:
        theirs = None  # of another exchange
    if theirs is None:
        name = KINDS[kind] if kind < len(KINDS) else "an unknown kind"
        told = f"exchange {number}, {name} of {_size_in_words(name, size_bytes)}"
        if mine.header[:-DIGEST_BYTES] == header[:-DIGEST_BYTES]:
            told += ", with another label, types or shapes"
        return f"worker {rank} is at {_words(mine, None)}; worker {other} at {told}"
    return (
        f"worker {rank} is at {_words(mine, theirs)}; worker {other} at "
        f"{_words(theirs, mine)}"
    )


def _words(terms: Fingerprint, other: Fingerprint | None) -> str:
    arrays = _arrays_in_words(terms, other.arrays if other else ())
    wire = f" as {terms.wire_dtype}" if terms.wire_dtype else ""
    return (
        f"exchange {terms.number}, {terms.kind} of "
        f"{_size_in_words(terms.kind, terms.size_bytes)}{wire}{arrays} ({terms.label})"
    )


def _size_in_words(kind: str, size_bytes: int) -> str:
    return (
        f"at most {size_bytes} bytes each"
        if kind == "gather"
        else f"{size_bytes} bytes"
    )


def _arrays_in_words(terms: Fingerprint, others: Sequence[str]) -> str:
    arrays = terms.arrays
    if not arrays:
        return ""
    count = len(arrays) + terms.left_out
    if count <= MOST_ARRAYS_IN_WORDS:
        return f": {', '.join(arrays)}"
    pairs = zip(arrays, others, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and others:
        alike = min(len(arrays), len(others))
        return f": {count} arrays, of which the first {alike} are alike"
    place = first or 0
    return f": {count} arrays, number {place + 1} of them {arrays[place]}"
