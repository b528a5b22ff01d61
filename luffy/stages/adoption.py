"""Responses that an earlier evaluation has drawn of the same model in the same way: taken from there and graded anew.

Every evaluation keeps `responses.json`: for each suite and decoding the hash of all that its responses depend on (the
model's files, how it draws, the code that asks, sampling, prompts, seeds). Where a finished evaluation of
the same workspace names the hash that is wanted, its responses are those that would be drawn. Graders, the level of
intervals and other suites are no part of it.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from luffy.config.settings import EvaluateSettings
from luffy.config.strict import StrictModel
from luffy.errors import DataError
from luffy.evaluation.evaluator import Progress, grade_drawn
from luffy.evaluation.requests import Ask, Inquiry, Suite
from luffy.evaluation.sample_files import read_samples_of, write_sample_records
from luffy.evaluation.sample_records import SampleRecord
from luffy.files import write_atomic
from luffy.grading import GraderPool
from luffy.pipeline.fingerprint import module_fingerprint
from luffy.pipeline.manifest import consumed_digest, read_manifest

logger = logging.getLogger(__name__)
RESPONSES_FILE = "responses.json"
_ASKING = ("luffy.evaluation.requests", "luffy.evaluation.model_clients", "luffy.stages.responses")
"""What they reach is the code that responses depend on."""

Cell = tuple[str, str]
"""Suite and decoding."""


class _Line(StrictModel):
    suite: str
    decoding: str
    digest: str


_LINES = TypeAdapter(tuple[_Line, ...])


class Inquiries:
    """What is asked of one model, and the hashes that stand for the responses.

    `stage` is the directory of the stage that made the model, and `variant` tells apart the models of one stage. Of a
    stage without a manifest nothing is known that could be compared: there are no hashes.
    """

    def __init__(
        self,
        cells: Sequence[tuple[Suite, str]],
        settings: EvaluateSettings,
        ask: Ask,
        stage: Path,
        variant: str = "",
    ) -> None:
        self._cells = {(suite.name, decoding): suite for suite, decoding in cells}
        self._settings = settings
        self._ask = ask
        manifest = read_manifest(stage)
        self.digests: dict[Cell, str] = {}
        if manifest is not None:
            code = (f"{module} {digest}" for module, digest in module_fingerprint(_ASKING).items())
            model = consumed_digest("model", manifest) + variant
            drawn_by = [model, settings.dtype, settings.evaluation.engine, *code]
            self.digests = {cell: self.inquiry(cell).digest(drawn_by) for cell in self._cells}

    def inquiry(self, cell: Cell) -> Inquiry:
        settings = self._settings
        return Inquiry(self._cells[cell], cell[1], settings.evaluation, self._ask, settings.seed)


def write_digests(folder: Path, digests: Mapping[Cell, str]) -> None:
    """Put `responses.json` into the folder of an evaluation."""
    lines = [{"suite": suite, "decoding": how, "digest": digest} for (suite, how), digest in digests.items()]
    write_atomic(folder / RESPONSES_FILE, json.dumps(lines, indent=1) + "\n")


def find_drawn(stage: Path, wanted: Mapping[Cell, str]) -> dict[Path, list[Cell]]:
    """Folders of other finished evaluations beside the stage's directory, and which of `wanted` are found in each."""
    found: dict[Path, list[Cell]] = {}
    left = dict(wanted)
    for directory in sorted(stage.parent.iterdir()):
        if directory == stage or not left:
            continue
        for folder in (directory, *sorted(directory.glob("step_*"))):
            there = _read_digests(folder)
            cells = [cell for cell, digest in left.items() if there.get(cell) == digest]
            if cells and _counts(directory):
                found[folder] = cells
                left = {cell: digest for cell, digest in left.items() if cell not in cells}
    return found


def adopt(
    folder: Path, parts: Mapping[Cell, Path], inquiries: Inquiries, grader: GraderPool, progress: Progress
) -> Iterator[Cell]:
    """Write those of `parts` whose responses are in the samples of `folder`, graded anew; yields each that is written.

    Samples that are not what they should be leave the rest of the parts unwritten: they are drawn.
    """
    try:
        for cell, records in groupby(read_samples_of(folder), key=_cell_of):
            if cell in parts:
                drawn = grade_drawn(inquiries.inquiry(cell), records, grader, progress)
                write_sample_records(parts[cell], drawn)
                yield cell
    except DataError as error:
        logger.warning("responses are not taken from %s: %s", folder, error)


def _cell_of(record: SampleRecord) -> Cell:
    return record.suite, record.decoding


def _read_digests(folder: Path) -> dict[Cell, str]:
    try:
        lines = _LINES.validate_json((folder / RESPONSES_FILE).read_bytes())
    except (OSError, ValidationError):
        return {}  # not finished, or of another version
    return {(line.suite, line.decoding): line.digest for line in lines}


def _counts(directory: Path) -> bool:
    """Whether the evaluation there is finished, unchanged since, and made by the code that its hashes name."""
    manifest = read_manifest(directory)
    return manifest is not None and not manifest.code_changed and manifest.is_intact(directory)
