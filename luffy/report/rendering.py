"""One way to fill the templates in `luffy/report/templates`: escaped HTML with a common style, or Markdown."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from luffy.markdown_text import markdown_cell

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """The filled template; equal values give equal bytes. Text is escaped in HTML unless it passes the `svg` filter."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=select_autoescape(enabled_extensions=("html.jinja",), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["svg"] = Markup  # drawn by `luffy.report.plotter`, which escapes labels
    environment.filters["cell"] = markdown_cell
    environment.filters["fence"] = code_block
    return environment.get_template(template).render(values)


def code_block(text: str) -> str:
    """A Markdown code block whose fence is longer than any run of backticks in `text`."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
