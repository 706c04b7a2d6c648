"""Makes Markdown of what docstrings have besides: doctests become blocks of code.

An extension of griffe, which reads the sources for the site; see mkdocs.yml.
"""

import re

import griffe

#: Lines from a first `>>>` to the next empty line, indented alike.
DOCTEST = re.compile(r"(?:^|(?<=\n))( *)>>> .*(?:\n *\S.*)*")


def fenced(text: str) -> str:
    """The text, its doctests as blocks of code.

    >>> fenced("Adds.\\n\\n>>" + "> 1 + 1\\n2").split("\\n")
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.M | re.S)
    # What stands within a block already is left alone.
    parts[::2] = [
        DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", part).replace("\n\n\n", "\n\n")
        for part in parts[::2]
    ]
    return "".join(parts)


class Docstrings(griffe.Extension):
    """Fences the doctests of every object that has a docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for each object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
