"""Makes a program that differs smaller, in few tries: each takes seconds.

A program is the default one with changes. Halves of the changes are taken back, then
quarters, and so on (delta debugging, Zeller and Hildebrandt 2002); then what is left
is looked at part by part. Hypothesis' own shrinking needs hundreds of tries for this.
"""

import dataclasses

from tests.generator.program import Data, Layout, Optimizer, Output, Program

_PARTS = {"optimizer": Optimizer, "data": Data, "layout": Layout}


def changes_of(program):
    """Path of a field -> its value, where it is not the default."""
    found = {}
    for field in dataclasses.fields(program):
        value = getattr(program, field.name)
        if field.name in _PARTS:
            for inner in dataclasses.fields(value):
                if getattr(value, inner.name) != inner.default:
                    found[field.name, inner.name] = getattr(value, inner.name)
        elif value != field.default:
            found[field.name, None] = value
    return found


def with_changes(changes):
    """The program with these changes; the inverse of `changes_of`."""
    parts = {name: {} for name in _PARTS}
    plain = {}
    for (name, inner), value in changes.items():
        if inner is None:
            plain[name] = value
        else:
            parts[name][inner] = value
    made = {name: kind(**parts[name]) for name, kind in _PARTS.items()}
    return Program(**plain, **made)


def reduce(program, differs):
    """The smallest program found for which `differs` is true.

    Args:
      program: one for which it is true.
      differs: asked of smaller programs.
    """
    program = with_changes(_fewer(changes_of(program), differs))
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller_parts(program):
            if differs(candidate):
                program, is_smaller = candidate, True
                break
    return program


def _fewer(changes, differs):
    count = 2
    while changes and count <= 2 * len(changes):
        keys = list(changes)
        size = max(1, len(keys) // count)
        for first in range(0, len(keys), size):
            left = {key: changes[key] for key in keys if key not in keys[first:][:size]}
            if differs(with_changes(left)):
                changes, count = left, max(2, count - 1)
                break
        else:
            if size == 1:
                break
            count *= 2
    return changes


def _smaller_parts(program):
    """Programs with one thing less in a list, or one field of an output less."""
    for name in ("branches", "outputs", "trunk", "calls", "callbacks"):
        for shorter in _shorter(getattr(program, name)):
            if shorter or name in ("trunk", "callbacks"):
                yield dataclasses.replace(program, **{name: shorter})
    for place, output in enumerate(program.outputs):
        for smaller in _plainer(output, Output()):
            yield _with_part(program, "outputs", place, smaller)
    for place, branch in enumerate(program.branches):
        for layers in _shorter(branch.layers):
            changed = dataclasses.replace(branch, layers=layers)
            yield _with_part(program, "branches", place, changed)
    for options in _shorter(program.optimizer.options):
        optimizer = dataclasses.replace(program.optimizer, options=options)
        yield dataclasses.replace(program, optimizer=optimizer)
    for batches in _shorter(program.data.batches):
        if batches:
            data = dataclasses.replace(program.data, batches=batches)
            yield dataclasses.replace(program, data=data)


def _shorter(values):
    for place in range(len(values)):
        yield values[:place] + values[place + 1 :]


def _plainer(value, plain):
    for field in dataclasses.fields(value):
        default = getattr(plain, field.name)
        if getattr(value, field.name) != default:
            yield dataclasses.replace(value, **{field.name: default})


def _with_part(program, name, place, part):
    parts = list(getattr(program, name))
    parts[place] = part
    return dataclasses.replace(program, **{name: tuple(parts)})
