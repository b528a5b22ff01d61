"""The report of a chain: results, training curves and settings on one page.

Run: python -m luffy.stages.report --config DIR/config.yaml --out DIR

Writes report.html, a self-contained page, and summary.md, the accuracies alone.
"""

from luffy.config.settings import ReportSettings
from luffy.files import write_atomic
from luffy.report.chain_page import chain_page, chain_summary, read_chain
from luffy.report.evaluation_page import SUMMARY_FILE
from luffy.report.page import html
from luffy.stages.program import StageContext, StageResult, main

HTML_FILE = "report.html"


def run(settings: ReportSettings, context: StageContext) -> StageResult:
    """Read the finished stages and write the report."""
    chain = read_chain(settings.experiment, context.inputs)
    write_atomic(context.out / HTML_FILE, html(chain_page(chain)))
    write_atomic(context.out / SUMMARY_FILE, chain_summary(chain))
    return StageResult((HTML_FILE, SUMMARY_FILE), metrics={})


if __name__ == "__main__":
    main("report", run)
