"""Every link between the pages leads somewhere, its anchor too.

Anchors are those of GitHub; the site has the same, and `make site` looks once more.
"""

import re

import pytest

from tests.support.package_source import REPOSITORY
from tests.support.public_names import NOTES, pages

PAGES = pages()
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.M)
CODE = re.compile(r"^```.*?^```$", re.M | re.S)


def name_of(page):
    return page.relative_to(REPOSITORY).as_posix()


def anchor_of(heading):
    """The fragment that a heading gets: lower case, words joined by hyphens."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.strip().replace(" ", "-")


def broken_links(page):
    text = page.read_text("utf-8")
    broken = []
    for target in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue  # another site; not looked up
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        # MkDocs takes no links to folders.
        if not linked.is_file():
            broken.append(target)
        elif fragment and linked.suffix == ".md":
            headings = HEADING.findall(CODE.sub("", linked.read_text("utf-8")))
            if fragment not in map(anchor_of, headings):
                broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    assert broken_links(page) == []


def test_every_page_but_the_notes_is_in_the_site():
    text = REPOSITORY.joinpath("mkdocs.yml").read_text("utf-8")
    told = re.findall(r"(?:: |- )(\S+\.md)$", text[text.index("nav:") :], re.M)
    on_site = [page for page in PAGES if page.parent != NOTES]
    assert sorted(told) == sorted(map(name_of, on_site))


def test_an_entry_of_the_navigation_has_the_title_of_its_page():
    text = REPOSITORY.joinpath("mkdocs.yml").read_text("utf-8")
    entries = re.findall(r"^ +- (.+): (\S+\.md)$", text[text.index("nav:") :], re.M)
    titles = {
        path: re.search(r"^# (.*)$", (REPOSITORY / path).read_text("utf-8"), re.M)[1]
        for _, path in entries
    }
    assert entries
    assert [each for each in entries if titles[each[1]] != each[0]] == []


def test_broken_links_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `word`, two\n[1](#a-word-two) [2](#none) [3](gone.md) [4](page.md)\n"
        "[5](page.md#none) [6](https://example.org/x) [8](.)\n```text\n[7](gone)\n```\n"
    )
    assert broken_links(page) == ["#none", "gone.md", "page.md#none", "."]


def test_the_readme_has_few_links():
    """A newcomer follows one; docs/contents.md has all pages."""
    text = REPOSITORY.joinpath("README.md").read_text("utf-8")
    assert text.count("](") <= 30
    assert text.index("make train") < text.index("make test") < 600
