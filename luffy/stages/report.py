"""The report of a chain: results, training curves and settings on one page.

Run: python -m luffy.stages.report --config DIR/config.yaml --out DIR

Writes report.html, a self-contained page, and report.md.
"""

from luffy.config.settings import ReportSettings
from luffy.files import write_atomic
from luffy.report.chain_page import chain_page, read_chain
from luffy.report.page import html, markdown
from luffy.stages.program import StageContext, StageResult, main

HTML_FILE = "report.html"
MARKDOWN_FILE = "report.md"


def run(settings: ReportSettings, context: StageContext) -> StageResult:
    """Read the finished stages and write the report."""
    chain = read_chain(settings.experiment, context.inputs)
    page = chain_page(chain)
    write_atomic(context.out / HTML_FILE, html(page))
    write_atomic(context.out / MARKDOWN_FILE, markdown(page))
    return StageResult((HTML_FILE, MARKDOWN_FILE), metrics={})


if __name__ == "__main__":
    main("report", run)
