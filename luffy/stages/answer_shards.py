"""The finished batches of a stage that answers training prompts, as files.

    shards = AnswerShards(out / "shards")
    shards.append(rates, answers)            # after every batch
    known = dict(shards.finished())          # after a restart

A shard is `000003.json` (pass rates) and, where answers are kept, `000003.parquet` (prompts with every correct and
complete answer as a trace). The latter is written first, and counts only beside the former.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.pass_rates import PassRate
from luffy.files import link_or_copy, write_atomic
from luffy.pipeline.identity import Identity, IdentityRecord, read_identity
from luffy.pipeline.workspace import is_discarded
from luffy.types import Prompt


@dataclass(frozen=True, slots=True)
class AnswerShards:
    """The shards in one folder."""

    folder: Path

    def finished(self) -> Iterator[tuple[str, PassRate]]:
        """The pass rates by uid."""
        for path in self._paths():
            for fields in json.loads(path.read_text(encoding="utf-8")):
                yield fields["uid"], PassRate(**fields)

    def solved(self) -> Iterator[Prompt]:
        """Prompts with their answers, in the order in which they were answered; only where answers were kept."""
        for path in self._paths():
            yield from iterate_prompts(_answers_file(path))

    def append(self, rates: Sequence[PassRate], solved: Sequence[Prompt] | None) -> None:
        """Write a batch to disk, so that a kill cannot lose it; `solved` is None where no answers are kept."""
        number = max((int(path.stem) + 1 for path in self._paths()), default=0)
        path = self.folder / f"{number:06d}.json"
        if solved is not None:
            write_prompts(_answers_file(path), solved)
        write_atomic(path, json.dumps([asdict(rate) for rate in rates]))

    def adopt_from(self, others: Sequence["AnswerShards"], *, with_answers: bool) -> Path | None:
        """Reuse the shards of whichever of `others` has most; returns its folder, None where none has any.

        `with_answers`: answers are kept, and a shard without its file of answers does not count. A stage that is
        deleted meanwhile gives the shards that it still had.
        """
        found = max(([*other._paths()] for other in others), key=len, default=[])
        num_adopted = 0
        # In order, so that a kill in between leaves a prefix of the sequence.
        for path in found:
            try:
                if with_answers:
                    answers = _answers_file(path)
                    link_or_copy(str(answers), str(self.folder / answers.name))
                write_atomic(self.folder / path.name, path.read_text(encoding="utf-8"))
            except OSError:
                if path.exists() and (not with_answers or _answers_file(path).exists()):
                    raise  # of this stage's own disk
                break
            num_adopted += 1
        return found[0].parent if num_adopted else None

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("??????.json"))


def stages_sampled_alike(directory: Path, section: str, free: Sequence[str]) -> list[Path]:
    """Directories of other stages whose responses would be those of the stage in `directory`.

    They differ at most in the fields `free` of their settings' `section`. Empty for a stage without a record.
    """
    own = _sampling(read_identity(directory), section, free)
    if own is None:
        return []
    others = [path for path in sorted(directory.parent.iterdir()) if path != directory and not is_discarded(path)]
    return [path for path in others if _sampling(read_identity(path), section, free) == own]


def _answers_file(shard: Path) -> Path:
    return shard.with_suffix(".parquet")


def _sampling(
    record: IdentityRecord | None, section: str, free: Sequence[str]
) -> tuple[Identity, Mapping[str, str]] | None:
    """Everything that the responses depend on; None without a readable record."""
    values = record.identity.settings.get(section) if record is not None else None
    if record is None or not isinstance(values, dict):
        return None
    sampling = {name: value for name, value in values.items() if name not in free}
    settings = {**record.identity.settings, section: sampling}
    return dataclasses.replace(record.identity, settings=settings), record.consumed
