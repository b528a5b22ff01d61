"""A page: sections of notes, figures and tables, as one HTML file that needs no other and as Markdown.

Text from models, data and configuration is escaped in both; equal pages give equal bytes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from luffy.markdown_text import markdown_cell
from luffy.report.cells import Table, TableCell
from luffy.report.figures import image_url

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with its caption; not in Markdown."""

    title: str
    note: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    """(colour, label) of each line; empty if the title is enough."""
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """A number in large print; in Markdown a line of a list."""

    label: str
    value: TableCell
    color: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One speaker's part of a rollout, its reasoning apart from its reply."""

    written_by: str
    """`prompt`, `policy`, `environment` or `demonstration`; "" for the only answer."""
    reasoning: str
    reply: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout."""

    badges: tuple[str, ...]
    """What is known of it, where it comes from first."""
    is_good: bool
    turns: tuple[Turn, ...]
    text: str
    """All of it, for Markdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page; its contents stand in the order of these fields."""

    title: str = ""
    aside: str = ""
    """Beside the title, in small print."""
    anchor: str = ""
    """A name by which the page links to the section."""
    is_folded: bool = False
    """Shown in HTML when the reader opens it."""
    in_columns: bool = False
    """Contents are beside each other where there is room."""
    warnings: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = ()
    notes: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    """Paragraphs in full size."""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    samples: tuple[Sample, ...] = ()
    code: str = ""
    sections: tuple["Section", ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that a page shows."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    kind: str = ""
    """Beside the title in a browser's tab."""


def html(page: Page) -> str:
    """The page as HTML, with links to its sections that have an anchor."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["image_url"] = image_url
    return environment.get_template("page.html.jinja").render(page=page)


def markdown(page: Page) -> str:
    """The page as text: all but the figures, and sections that have nothing else."""
    blocks = [f"# {markdown_cell(page.title)}", markdown_cell(page.subtitle)]
    blocks += [block for section in page.sections for block in _blocks(section, 2)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _blocks(section: Section, level: int) -> Iterator[str]:
    contents = [
        *(f"- {markdown_cell(text)}" for text in section.warnings),
        "\n".join(f"- {markdown_cell(f'{tile.label}: {tile.value.plain}')}" for tile in section.tiles),
        *map(markdown_cell, (*section.notes, *section.text)),
    ]
    for table in section.tables:
        contents += [
            f"{'#' * (level + 1)} {markdown_cell(table.title)}" if table.title else "",
            markdown_cell(table.note),
            markdown_table(table),
        ]
    for sample in section.samples:
        contents += [markdown_cell(" · ".join(sample.badges)), fenced(sample.text)]
    contents.append(fenced(section.code.strip()) if section.code else "")
    contents += [block for each in section.sections for block in _blocks(each, level + 1)]
    if any(contents):
        heading = f"{section.title}: {section.aside}" if section.aside else section.title
        yield f"{'#' * level} {markdown_cell(heading)}" if heading else ""
        yield from contents


def markdown_table(table: Table) -> str:
    """The rows of a table, without its title and note."""
    rows = [table.header, ["---"] * len(table.header), *table.texts]
    return "\n".join("|" + "".join(f" {markdown_cell(text)} |" for text in row) for row in rows)


def fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in `text`."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
