"""Reuse of responses that an earlier evaluation sampled from the same model in the same way; they are graded again.

Every evaluation writes `responses.json`: for each suite and decoding a hash of everything its responses depend on (the
model's files, engine, generation code, sampling, prompts, seeds). A finished evaluation in the same workspace with an
equal hash has exactly the responses that would be sampled. Graders, confidence level and other suites are not part of
the hash.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from luffy.config.settings import EvaluateSettings
from luffy.config.stage_kinds import ASKING_ROOMS, PLAYING_ROOMS
from luffy.config.strict import FOR_IDENTITY, StrictModel
from luffy.errors import DataError
from luffy.evaluation.evaluator import Progress, grade_sampled
from luffy.evaluation.requests import EvaluationRequest, Render, Suite
from luffy.evaluation.results import Cell
from luffy.evaluation.sample_files import read_samples_of, write_sample_records
from luffy.files import write_atomic
from luffy.grading.pool import GraderPool
from luffy.pipeline.identity import code_identity
from luffy.pipeline.manifest import consumed_digest, read_manifest
from luffy.pipeline.workspace import is_discarded

logger = logging.getLogger(__name__)
RESPONSES_FILE = "responses.json"


class _Line(StrictModel):
    suite: str
    decoding: str
    digest: str


_LINES = TypeAdapter(tuple[_Line, ...])


class EvaluationRequests:
    """The evaluation requests for one model, and the digests of their responses.

    `stage` is the directory of the stage that made the model; `variant` distinguishes several models of one stage.
    There are no digests for a stage without a manifest, since its model is unknown.
    """

    def __init__(
        self,
        cells: Sequence[tuple[Suite, str]],
        settings: EvaluateSettings,
        render: Render,
        stage: Path,
        variant: str = "",
    ) -> None:
        self._cells = {(suite.name, decoding): suite for suite, decoding in cells}
        self._settings = settings
        self._render = render
        manifest = read_manifest(stage)
        self.digests: dict[Cell, str] = {}
        if manifest is not None:
            rooms = ASKING_ROOMS if settings.environment is None else (*ASKING_ROOMS, *PLAYING_ROOMS)
            code = [f"{room} {digest}" for room, digest in code_identity(rooms).items()]
            if settings.environment is not None:
                code.append(settings.environment.model_dump_json(context=FOR_IDENTITY))
            model = consumed_digest("model", manifest) + variant
            sampled_by = [model, settings.dtype, settings.evaluation.engine, *code]
            self.digests = {cell: self.request(cell).digest(sampled_by) for cell in self._cells}

    def request(self, cell: Cell) -> EvaluationRequest:
        settings = self._settings
        return EvaluationRequest(self._cells[cell], cell[1], settings.evaluation, self._render, settings.seed)


def write_digests(folder: Path, digests: Mapping[Cell, str]) -> None:
    """Write `responses.json` into the folder of an evaluation."""
    lines = [{"suite": suite, "decoding": how, "digest": digest} for (suite, how), digest in digests.items()]
    write_atomic(folder / RESPONSES_FILE, json.dumps(lines, indent=1) + "\n")


def find_sampled(stage: Path, wanted: Mapping[Cell, str]) -> dict[Path, list[Cell]]:
    """Finished evaluations beside the stage's directory that have wanted digests, with the cells of each."""
    found: dict[Path, list[Cell]] = {}
    left = dict(wanted)
    for directory in sorted(stage.parent.iterdir()):
        if directory == stage or is_discarded(directory) or not left:
            continue
        for folder in (directory, *sorted(directory.glob("step_*"))):
            there = _read_digests(folder)
            cells = [cell for cell, digest in left.items() if there.get(cell) == digest]
            if cells and _is_trustworthy(directory):
                found[folder] = cells
                left = {cell: digest for cell, digest in left.items() if cell not in cells}
    return found


def adopt(
    folder: Path, parts: Mapping[Cell, Path], requests: EvaluationRequests, grader: GraderPool, progress: Progress
) -> Iterator[Cell]:
    """Write the `parts` whose responses are in the samples of `folder`, graded again; yields each cell written.

    Damaged samples leave the remaining parts unwritten; their responses are then generated.
    """
    try:
        for cell, records in groupby(read_samples_of(folder), key=lambda record: (record.suite, record.decoding)):
            if cell in parts:
                graded = grade_sampled(requests.request(cell), records, grader, progress)
                write_sample_records(parts[cell], graded)
                yield cell
    except DataError as error:
        logger.warning("responses are not adopted from %s: %s", folder, error)


def _read_digests(folder: Path) -> dict[Cell, str]:
    try:
        lines = _LINES.validate_json((folder / RESPONSES_FILE).read_bytes())
    except (OSError, ValidationError):
        return {}  # not finished, or written by another version
    return {(line.suite, line.decoding): line.digest for line in lines}


def _is_trustworthy(directory: Path) -> bool:
    """Whether the evaluation is finished, and unmodified since."""
    manifest = read_manifest(directory)
    return manifest is not None and manifest.is_intact(directory)
