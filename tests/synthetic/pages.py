"""What has to hold for every page: it stands alone, in one file, and its tags nest."""

import base64
import re
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "img", "hr", "input"}
_IMAGE = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """The tags, the texts outside of style sheets, and the ids of a page; AssertionError where its tags do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.figures: dict[str, list[str]] = {}
        """SVG files that the page holds as images, by their alternative text."""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.references += [found[name] or "" for name in ("href", "src", "xlink:href") if name in found]
        if tag == "img" and (found["src"] or "").startswith(_IMAGE):
            svg = base64.b64decode(self.references.pop().removeprefix(_IMAGE)).decode()
            self.figures.setdefault(found["alt"] or "", []).append(svg)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += [data.strip()] if data.strip() else []


def stands_alone(html: str) -> Page:
    """Read a page that needs nothing else and runs nothing; its ids differ, and every link has its target."""
    page, drawn = Page(html), re.findall(r"url\(([^)]*)\)", html)
    assert not {"script", "link", "iframe"} & {*page.tags} and "@import" not in html
    assert page.tags.count("img") == sum(map(len, page.figures.values()))
    assert all(reference.startswith("#") for reference in [*page.references, *drawn])
    assert len(page.ids) == len({*page.ids})
    assert {reference[1:] for reference in [*page.references, *drawn]} <= {*page.ids}
    return page
