"""The identity of a stage: everything that its result depends on, and the key over it, computed before anything runs.

A key covers the stage's name, its settings, the *keys* of its upstream stages, the fingerprint of its code and the
contents of the files that its settings refer to. The order of a mapping's entries counts: the first decoding, for
example, makes the headline table.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from luffy.config import StageName
from luffy.config.settings import ReportSettings, RLSettings, SFTSettings, StageSettings
from luffy.config.strict import FOR_IDENTITY
from luffy.files import write_atomic
from luffy.json_text import parse_json

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
IDENTITY_FILE = "identity.json"
KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """The ingredients of a key, stored with the result so that a later plan can show what changed."""

    stage: StageName
    settings: dict[str, Json]
    upstream: dict[str, str]
    """Input name to the key of the stage that provides it."""
    code: dict[str, str]
    """Module (or packaged file) to the hash of its code."""
    files: dict[str, str]
    """File or folder outside the workspace, as written in the settings, to the hash of its content."""
    extendable: bool = False
    """Whether a longer run may continue a shorter one: `sft` or `rl`, where no step depends on the length."""

    @property
    def key(self) -> str:
        """Sixteen hex digits."""
        return _digest(self._ingredients(self.settings))

    @property
    def series(self) -> str | None:
        """The key shared by runs of every length; None if the stage cannot be extended."""
        if not self.extendable:
            return None
        endless = {name: value for name, value in self._section.items() if name != "steps"}
        return _digest(self._ingredients({**self.settings, self.stage: endless}))

    @property
    def length(self) -> int:
        """Steps of an extendable run."""
        steps = self._section["steps"]
        assert isinstance(steps, int)
        return steps

    @property
    def _section(self) -> dict[str, Json]:
        section = self.settings[self.stage]
        assert isinstance(section, dict)
        return section

    def _ingredients(self, settings: dict[str, Json]) -> Json:
        return [
            self.stage,
            settings,
            _pairs(self.upstream),
            _pairs(self.code),
            _pairs(self.files),
        ]


def identity_of(
    stage: StageName,
    settings: StageSettings,
    upstream: Mapping[str, str],
    code: Mapping[str, str],
    files: Mapping[str, str],
) -> Identity:
    """The identity of a stage with these settings, upstream keys, code and outside files."""
    extendable = isinstance(settings, SFTSettings | RLSettings) and not settings.depends_on_length
    return Identity(stage, identifying(settings), dict(upstream), dict(code), dict(files), extendable)


def identifying(settings: StageSettings) -> dict[str, Json]:
    """The settings that enter the key, without those that change no result.

    A report shows its experiment's whole configuration, so all of it counts.
    """
    return settings.model_dump(mode="json", context=None if isinstance(settings, ReportSettings) else FOR_IDENTITY)


def canonical_json(value: Json) -> str:
    """The canonical text of `value`; mappings keep their order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class IdentityRecord:
    """The contents of `identity.json`: the last attempt in a stage's directory."""

    key: str
    node: str
    identity: Identity
    consumed: dict[str, str]
    """Input name to the digest of the result that the attempt read."""
    experiment: str = ""
    """Name of the experiment that made the attempt; empty if unknown."""
    extended: str = ""
    """Key of the finished shorter run that the attempt continued; empty without one."""


def write_identity(directory: Path, record: IdentityRecord) -> None:
    """Put `identity.json` into a stage's directory."""
    fields = {**asdict(record), "series": record.identity.series}
    write_atomic(directory / IDENTITY_FILE, json.dumps(fields, indent=1, ensure_ascii=False) + "\n")


def read_identity(directory: Path) -> IdentityRecord | None:
    """The record in `directory`; None if it is missing or unreadable."""
    try:
        fields = parse_json((directory / IDENTITY_FILE).read_text(encoding="utf-8"))
        identity, consumed = Identity(**fields["identity"]), dict(fields["consumed"])
        experiment, extended = fields.get("experiment", ""), fields.get("extended", "")
        return IdentityRecord(fields["key"], fields["node"], identity, consumed, experiment, extended)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # written by another version, or damaged


def _pairs(mapping: Mapping[str, str]) -> list[Json]:
    return [[name, mapping[name]] for name in sorted(mapping)]


def _digest(ingredients: Json) -> str:
    return hashlib.sha256(canonical_json(ingredients).encode()).hexdigest()[:KEY_LENGTH]
