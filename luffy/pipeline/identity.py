"""The identity of a stage: everything that its result depends on, and the key over it, computed before anything runs.

A key covers the stage's name, its settings, the *keys* of its upstream stages, its code and the contents of the files
that its settings refer to. The order of a user's mapping counts: the first decoding, for example, makes the headline
table.

So that a result outlives the development of this package, `ledger.json` says what a key takes for granted:

- *Code.* Each kind of stage has a revision, a number that is raised when its results change. The code that can change
  them is declared by its `StageKind`, by rooms: a folder of the package (`training`), the files directly in one
  (`evaluation/*`) or one file (`stages/evaluate.py`); `*` are the modules at the top. Rooms whose hash is the stamped
  one are covered by the revision; an edited room is in the key by its hash until it is stamped. A room's hash is over
  the syntax trees of its modules without docstrings, comments and layout, and over its packaged files (templates). That
  the declarations cover what the stages' programs import is tested, not computed.
- *Settings.* A field at the value that the ledger has for it is left out, so that a new field with a default changes no
  key, and a changed default only the keys of those who relied on it.

`make stamp` (`tests/stamp.py`) brings the ledger up to date with the code.
"""

import ast
import functools
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from luffy.config import StageName
from luffy.config.settings import ReportSettings, RLSettings, SFTSettings, StageSettings
from luffy.config.strict import FOR_IDENTITY, FOR_REPORT, for_key
from luffy.files import write_atomic
from luffy.import_paths import parsed
from luffy.json_text import parse_json

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
IDENTITY_FILE = "identity.json"
KEY_LENGTH = 16
PACKAGE = Path(__file__).resolve().parents[1]
LEDGER = Path(__file__).with_name("ledger.json")
REVISION = "revision"
ASKING = "asking"
"""The kind, besides those of stages, of which responses are that an evaluation takes over from another one."""
FRAME = (
    "cluster/engine_pool.py",
    "config/fields.py",
    "config/foreign_names.py",
    "config/load.py",
    "config/removed.py",
    "config/rules.py",
    "config/stage_kinds.py",
    "config/yaml_source.py",
)
"""Files that never count: they affect a result only through settings and inputs, which the key contains."""
_HASHING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Identity:
    """The ingredients of a key, stored with the result so that a later plan can show what changed."""

    stage: StageName
    settings: dict[str, Json]
    """All that change a result."""
    upstream: dict[str, str]
    """Input name to the key of the stage that provides it."""
    code: dict[str, str]
    """As `code_of` has it."""
    files: dict[str, str]
    """File or folder outside the workspace, as written in the settings, to the hash of its content."""
    extendable: bool = False
    """Whether a longer run may continue a shorter one: `sft` or `rl`, where no step depends on the length."""
    keyed: dict[str, Json] = field(default_factory=dict)
    """The settings as they are in the key."""

    @property
    def key(self) -> str:
        """Sixteen hex digits."""
        return self._key(self.keyed)

    @property
    def series(self) -> str | None:
        """The key shared by runs of every length; None if the stage cannot be extended."""
        if not self.extendable:
            return None
        endless = {name: value for name, value in self._section(self.keyed).items() if name != "steps"}
        return self._key({**self.keyed, self.stage: endless})

    @property
    def length(self) -> int:
        """Steps of an extendable run."""
        steps = self._section(self.settings)["steps"]
        assert isinstance(steps, int)
        return steps

    def _section(self, settings: dict[str, Json]) -> dict[str, Json]:
        section = settings[self.stage]
        assert isinstance(section, dict)
        return section

    def _key(self, settings: dict[str, Json]) -> str:
        given = [
            [[name, mapping[name]] for name in sorted(mapping)] for mapping in (self.upstream, self.code, self.files)
        ]
        ingredients = [self.stage, settings, *given]  # a user's mappings keep their order
        text = json.dumps(ingredients, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def identity_of(
    stage: StageName,
    settings: StageSettings,
    upstream: Mapping[str, str],
    code: Mapping[str, str],
    files: Mapping[str, str],
) -> Identity:
    """The identity of a stage with these settings, upstream keys, code and outside files."""
    extendable = isinstance(settings, SFTSettings | RLSettings) and not settings.depends_on_length
    given = dict(upstream), dict(code), dict(files)
    return Identity(stage, identifying(settings), *given, extendable, keyed(settings))


def identifying(settings: StageSettings) -> dict[str, Json]:
    """The settings without those that change no result.

    A report shows its experiment's whole configuration, so all of it counts.
    """
    context = FOR_REPORT if isinstance(settings, ReportSettings) else FOR_IDENTITY
    return settings.model_dump(mode="json", context=context)


def keyed(settings: StageSettings) -> dict[str, Json]:
    """The settings that enter the key: of those, what is not at the value that the ledger leaves out."""
    if isinstance(settings, ReportSettings):
        return identifying(settings)
    return settings.model_dump(mode="json", context=for_key(read_ledger().left_out))


@dataclass(frozen=True, slots=True)
class KeyLedger:
    """The contents of `ledger.json` that keys depend on."""

    revisions: Mapping[str, int]
    """Kind of stage, or `ASKING`, to its revision."""
    rooms: Mapping[str, str]
    """Room of the code to its hash when it was stamped."""
    left_out: Mapping[str, Mapping[str, Json]]
    """Class of settings to field to the value at which the field is left out."""


@functools.cache
def read_ledger() -> KeyLedger:
    """The ledger as it was when this process first needed it."""
    values = parse_json(LEDGER.read_text(encoding="utf-8"))
    return KeyLedger(values["revisions"], values["rooms"], values["left_out"])


def code_of(kind: str, rooms: Iterable[str]) -> dict[str, str]:
    """The revision of a kind, and the hashes of those of its rooms that were edited since they were stamped.

    A kind without a revision, such as a new one, has the hashes of all its rooms.
    """
    ledger, hashes = read_ledger(), code_identity(rooms)
    if (revision := ledger.revisions.get(kind)) is None:
        return hashes
    edited = {room: found for room, found in hashes.items() if ledger.rooms.get(room) != found}
    return {REVISION: str(revision), **edited}


def code_identity(rooms: Iterable[str], package: Path = PACKAGE) -> dict[str, str]:
    """Each of `rooms` and the hash of its code: 16 hex digits.

    Computed once in a process, so that all stages of a run have the code that it began with; runs side by side wait for
    one another. Raises FileNotFoundError for a room that the package does not have.
    """
    with _HASHING:
        return {room: _hash_of(room, package) for room in rooms}


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
    write_atomic(directory / IDENTITY_FILE, json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n")


def read_identity(directory: Path) -> IdentityRecord | None:
    """The record in `directory`; None if it is missing or unreadable."""
    try:
        fields = parse_json((directory / IDENTITY_FILE).read_text(encoding="utf-8"))
        identity, consumed = Identity(**fields["identity"]), dict(fields["consumed"])
        experiment, extended = fields.get("experiment", ""), fields.get("extended", "")
        return IdentityRecord(fields["key"], fields["node"], identity, consumed, experiment, extended)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # written by another version, or damaged


def read_code_again() -> None:
    """Forget the hashes of the code, which may have been edited since."""
    _hash_of.cache_clear()
    read_ledger.cache_clear()


@functools.cache
def _hash_of(room: str, package: Path) -> str:
    place, known = _known_trees(package)
    lines, before = "", len(known)
    for file in _files_of(room, package):
        content = file.read_bytes()
        hashed = key = _hash(content)
        if file.suffix == ".py":
            if key not in known:
                tree = _WithoutDocstrings().visit(parsed(content))
                known[key] = _hash(_dump(tree).encode())
            hashed = known[key]
        lines += f"{file.relative_to(package).as_posix()}\0{hashed}\n"
    if len(known) > before:
        with suppress(OSError):  # a read-only installation: modules are parsed each time
            place.parent.mkdir(exist_ok=True)
            write_atomic(place, json.dumps(known))
    return _hash(lines.encode())


def _files_of(room: str, package: Path) -> list[Path]:
    place = package / room
    found = [place] if place.is_file() else list(place.parent.iterdir() if place.name == "*" else place.rglob("*"))
    files = sorted(file for file in found if file.is_file() and _counts(file.relative_to(package)))
    if not files:
        raise FileNotFoundError(f"{place}: no such room of the code")
    return files


def _counts(file: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    return not hidden and file.suffix not in (".pyc", ".md") and file.as_posix() not in FRAME


@functools.cache
def _known_trees(package: Path) -> tuple[Path, dict[str, str]]:
    """Hashes of the modules' syntax trees by the hash of their bytes, and the file that keeps them: parsing takes
    seconds."""
    place = package / "__pycache__" / f"trees.{_hash(Path(__file__).read_bytes())}.json"
    with suppress(OSError, ValueError, AttributeError):  # none yet, or not ours
        return place, {str(key): str(value) for key, value in json.loads(place.read_bytes()).items()}
    return place, {}


def _dump(value: object) -> str:
    """A syntax tree as text, the same in every version of Python.

    Later versions have more fields, which are empty here, and 3.12 has empty texts in f-strings.
    """
    if isinstance(value, ast.JoinedStr):
        value = ast.JoinedStr([part for part in value.values if getattr(part, "value", None) != ""])
    if isinstance(value, ast.AST):
        given = [f"{name}={_dump(each)}" for name, each in ast.iter_fields(value) if each is not None and each != []]
        return f"{type(value).__name__}({','.join(given)})"
    return f"[{','.join(map(_dump, value))}]" if isinstance(value, list) else ascii(value)


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every bare string: docstrings of modules, classes, functions and attributes."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
