"""Damage to files, as disks, networks and people do it: bytes, blocks, JSON fields.

Every function takes a `random.Random` and content, and returns other content.
"""

import copy
import json


def flip_bit(random, content):
    changed = bytearray(content)
    changed[random.randrange(len(content))] ^= 1 << random.randrange(8)
    return bytes(changed)


def change_byte(random, content):
    changed = bytearray(content)
    changed[random.randrange(len(content))] ^= random.randrange(1, 256)
    return bytes(changed)


def truncate(random, content):
    return content[: random.randrange(len(content))]


def insert(random, content):
    place = random.randrange(len(content) + 1)
    new = random.randbytes(random.choice([1, 4, 16, 512]))
    return content[:place] + new + content[place:]


def append(random, content):
    """Something, or the start of itself again."""
    size = random.randrange(1, len(content))
    return content + random.choice([random.randbytes(size), content[:size]])


def delete(random, content):
    place = random.randrange(len(content))
    return content[:place] + content[place + random.choice([1, 4, 16, 512]) :]


def zero_block(random, content):
    size = min(random.choice([8, 64, 512]), len(content))
    place = random.randrange(len(content) - size + 1)
    return content[:place] + bytes(size) + content[place + size :]


def swap_blocks(random, content):
    """Two blocks of one size change places; often blocks at multiples of it."""
    size = random.choice([4, 8, 16, 33, 64, 512])
    size = min(size, len(content) // 2)
    step = random.choice([1, size])
    blocks = (len(content) - size) // step + 1
    first, second = (random.randrange(blocks) * step for _ in range(2))
    changed = bytearray(content)
    changed[first : first + size] = content[second : second + size]
    changed[second : second + size] = content[first : first + size]
    return bytes(changed[: len(content)])


BYTES = (
    flip_bit,
    change_byte,
    truncate,
    insert,
    append,
    delete,
    zero_block,
    swap_blocks,
)

NESTED = object()
VALUES = (
    *(None, True, False, 0, 1, -1, 7, 2.5, 1e400, float("nan")),
    *(2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 10**4000),
    *(
        "",
        "x",
        "..",
        "../other",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "n" * 5000,
        "9" * 5000,
    ),
    *([], {}, [[]], [1, 2], {"a": 1}, NESTED),
)


def places_in(value, path=()):
    """The paths of all fields and items of a JSON value."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        yield (*path, key)
        yield from places_in(item, (*path, key))


def edit_json(random, content):
    """One field is given another value, another name, is dropped, or swapped."""
    value = json.loads(content)
    places = list(places_in(value))
    path = random.choice(places)
    parent = reached(value, path[:-1])
    kind = random.choice(["put", "put", "put", "drop", "rename", "swap", "near"])
    if kind == "drop":
        del parent[path[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[random.choice(VALUES[16:23]) or "y"] = parent.pop(path[-1])
    elif kind == "swap":
        other = random.choice(places)
        source = copy.deepcopy(reached(value, other))
        parent[path[-1]] = source
    elif kind == "near" and isinstance(parent[path[-1]], int):
        parent[path[-1]] += random.choice([-1, 1])
    else:
        parent[path[-1]] = random.choice(VALUES)
    return as_text(value)


def reached(value, path):
    for key in path:
        value = value[key]
    return value


def as_text(value):
    """JSON, with a value a hundred thousand lists deep where `NESTED` stands."""
    text = json.dumps(value, default=lambda _: "NESTED")
    return text.replace('"NESTED"', "[" * 100_000 + "]" * 100_000).encode()
