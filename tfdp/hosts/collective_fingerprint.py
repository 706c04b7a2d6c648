"""Collective fingerprints: a header of 24 bytes that detects a desync.

Kind, number and size are sent in full, so that an error can name the other worker's.
Label, types, shapes, ranges and wire type are compared by digest: float32 [2] and
int32 [2] have the same size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Sequence

from tfdp.checks import is_whole
from tfdp.hosts.ring import Arrays, wire_type

SOCKET_KINDS = ("sum", "scatter", "shards", "gather", "all to all")
KINDS = (*SOCKET_KINDS, "mpi sum", "mpi scatter", "mpi shards", "mpi all to all")
SUMS = ("sum", "mpi sum")
# Index of the kind, number modulo 2^32, bytes, digest.
DIGEST_BYTES = 11
HEADER = struct.Struct(f"<BIQ{DIGEST_BYTES}s")
NUMBERS = 2**32
# A note is for an error message: it describes the first arrays only.
MOST_ARRAYS_IN_NOTE = 500
MOST_ARRAYS_IN_WORDS = 3
MOST_NUMBER = 1 << 63
# Keras numbers layer names by what a process created before ("dense_1"): a model that
# only one worker creates shifts the names of all later ones.
NUMBER_OF_NAME = re.compile(r"_\d+(?![0-9A-Za-z])")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """One worker's part in an exchange, to compare with that of other workers."""

    kind: str
    number: int  # of the exchange in its channel, from 1
    size_bytes: int  # that travel; in a gather the limit for each worker
    label: str
    arrays: tuple[str, ...] = ()  # type, shape and ranges of each
    wire_dtype: str | None = None  # the type on the network; None for the own type
    left_out: int = 0  # how many arrays a received note omits

    @property
    def header(self) -> bytes:
        label = NUMBER_OF_NAME.sub("", self.label)
        text = "\0".join((label, str(self.wire_dtype), *self.arrays))
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        number = self.number % NUMBERS
        return HEADER.pack(KINDS.index(self.kind), number, self.size_bytes, digest)

    @property
    def note(self) -> str:
        fields = dataclasses.asdict(self)
        fields["arrays"] = self.arrays[:MOST_ARRAYS_IN_NOTE]
        fields["left_out"] = len(self.arrays[MOST_ARRAYS_IN_NOTE:])
        return json.dumps(fields)

    @classmethod
    def from_note(cls, note: str) -> Fingerprint | None:
        """Parses another worker's note; None if it is invalid."""
        try:
            fields = json.loads(note)
            terms = cls(**{**fields, "arrays": tuple(map(str, fields["arrays"]))})
            numbers = terms.number, terms.size_bytes, terms.left_out
            are_numbers = all(is_whole(each, 0, MOST_NUMBER) for each in numbers)
            are_texts = isinstance(terms.label, str) and terms.kind in KINDS
            return terms if are_numbers and are_texts else None
        except (ValueError, TypeError, KeyError):
            return None


class CollectiveMismatch(Exception):
    """The previous worker sent another header."""

    def __init__(self, mine: Fingerprint, their_header: bytes):
        super().__init__("out of step")
        self.mine, self.their_header = mine, their_header


def fingerprint_of(
    kind: str,
    number: int,
    arrays: Arrays,
    label: str,
    wire_dtype: str | None = None,
    parts: Sequence[Sequence[object]] = (),
    limit: int | None = None,
) -> Fingerprint:
    """The fingerprint of an exchange of `arrays`, all of one type.

    `parts` are, by array, the shapes packed into it in sums, else each worker's range;
    `limit` is the limit in bytes for each worker, where sizes may differ.
    """
    of_each: Sequence[Sequence[object]] = [[list(array.shape)] for array in arrays]
    if kind in SUMS and parts:
        # As if each tensor travelled by itself: packing does not matter.
        of_each = [packed or own for own, packed in zip(of_each, parts, strict=True)]
    described = [
        f"{array.dtype.name} {shape}"
        for array, shapes in zip(arrays, of_each, strict=True)
        for shape in shapes
    ]
    if kind not in SUMS and parts:
        described = [f"{t} in {r}" for t, r in zip(described, parts, strict=True)]
    own = arrays[0].itemsize if arrays else 0
    item_bytes = wire_type(wire_dtype).itemsize if wire_dtype else own
    size = item_bytes * sum(array.size for array in arrays) if limit is None else limit
    return Fingerprint(kind, number, size, label, tuple(described), wire_dtype)


def difference(
    rank: int, other: int, found: CollectiveMismatch, note: str | None
) -> str:
    """Describes both sides of a mismatch; `note` is the other's, if it has arrived."""
    mine, header = found.mine, found.their_header
    kind, number, size_bytes, _ = HEADER.unpack(header)
    theirs = Fingerprint.from_note(note) if note is not None else None
    if theirs is not None and theirs.number % NUMBERS != number:
        theirs = None  # of another exchange
    if theirs is None:
        name = KINDS[kind] if kind < len(KINDS) else "an unknown kind"
        found_there = f"exchange {number}, {name} of {_size_in_words(name, size_bytes)}"
        if mine.header[:-DIGEST_BYTES] == header[:-DIGEST_BYTES]:
            found_there += ", with another label, types or shapes"
    else:
        found_there = _words(theirs, mine)
    return (
        f"worker {rank} is at {_words(mine, theirs)}; worker {other} at {found_there}"
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
        equal = min(len(arrays), len(others))
        return f": {count} arrays, the first {equal} are identical"
    place = first or 0
    return f": {count} arrays, number {place + 1} of them {arrays[place]}"
