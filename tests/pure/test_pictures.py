"""The pictures of figures show what the tables of benchmarks/figures.md say."""

import runpy

import pytest

from tests.support.package_source import REPOSITORY

FOLDER = REPOSITORY / "docs" / "pictures"
DRAW = runpy.run_path(str(FOLDER / "draw.py"))
PAGE = DRAW["TABLES"].read_text("utf-8")


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_a_picture_is_of_the_table(name):
    drawn = DRAW["PICTURES"][name](PAGE)
    assert FOLDER.joinpath(name).read_text("utf-8") == drawn, (
        "draw again: python docs/pictures/draw.py"
    )


def test_a_figure_of_the_table_stands_in_the_picture():
    assert ">1,208<" in DRAW["PICTURES"]["memory.svg"](PAGE)
    changed = PAGE.replace("| 1,208 (1.000) | 1,460", "| 1,117 (1.000) | 1,460")
    assert ">1,117<" in DRAW["PICTURES"]["memory.svg"](changed)


def test_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.svg")}
    assert {name: size for name, size in sizes.items() if size > 60_000} == {}
