"""The pictures within an HTML page, as SVG text; checks them as a browser would."""

import base64
import html.parser
import xml.etree.ElementTree

SOURCE = "data:image/svg+xml;base64,"


class _Images(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.found.append(dict(attributes))


def pictures_in(page):
    """The SVG of each `img`; each needs a title and a text for who cannot see it."""
    images = _Images()
    images.feed(page)
    pictures = []
    for image in images.found:
        assert image["title"] and len(image["alt"]) > len("Line chart of  over ")
        assert image["src"].startswith(SOURCE)
        text = base64.b64decode(image["src"].removeprefix(SOURCE)).decode()
        for element in xml.etree.ElementTree.fromstring(text).iter():
            assert not element.tag.endswith("script")
            for name, value in element.attrib.items():
                # A picture refers to its own parts only.
                assert not name.endswith("href") or value.startswith("#")
        pictures.append(text)
    return pictures
