"""The one rule for what must not be shown: problems whose authors ask that their text not be spread.

Pages, logs, artifacts, terminals and exports ask `is_confidential` (or `may_show_prompt`) before they show the text of
a problem, its reference answer, or a response to it.
"""

from luffy.types import Prompt

CONFIDENTIAL = "confidential"
"""Key of `extra_info`: true in the rows of a source that is configured as confidential."""
_BENCHMARKS = ("gpqa",)
"""Confidential whoever prepared them: a suite or data source whose name holds one of these."""


def is_confidential(name: str, *, marked: bool) -> bool:
    """Whether problems of the suite or data source `name` are confidential: marked as such, or of a known benchmark."""
    return marked or any(benchmark in name.lower() for benchmark in _BENCHMARKS)


def may_show_prompt(prompt: Prompt) -> bool:
    """Whether text of the problem may be shown."""
    return not is_confidential(prompt.data_source, marked=bool(prompt.extra_info.get(CONFIDENTIAL)))
