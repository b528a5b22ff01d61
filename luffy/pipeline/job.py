"""The job of a stage program: `config.yaml` in its directory."""

import json
from pathlib import Path

from pydantic import Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator

from luffy.config import STAGE_KINDS, StageName
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.fields import explain
from luffy.config.removed import without_removed
from luffy.config.settings import StageSettings, settings_class
from luffy.config.stage_kinds import kind_of
from luffy.config.strict import StrictModel
from luffy.config.yaml_source import dump_yaml, read_yaml
from luffy.errors import ConfigError
from luffy.files import write_atomic
from luffy.pipeline.identity import Identity, identifying, keyed
from luffy.pipeline.manifest import MANIFEST_FILE

JOB_FILE = "config.yaml"


class StageJob(StrictModel):
    """The inputs of a stage program."""

    node: str
    """Name in the chain, unique there (`evaluate_sft`)."""
    origin: str = ""
    """Where the kind of the stage is imported from, if it is the user's own (`package.module:NAME`)."""
    stage: StageName
    """The kind of stage."""
    experiment: str = ""
    """Name of the experiment that it is made for."""
    labels: dict[str, str] = Field(default_factory=dict)
    """How trackers show it: experiment, method, seed and run."""
    key: str
    settings: SerializeAsAny[StageSettings]
    inputs: dict[str, str]
    """Input name to the directory of the finished upstream stage (absolute, as of the stage's last start)."""
    upstream: dict[str, str]
    """Input name to the upstream stage's key."""
    code: dict[str, str] = Field(default_factory=dict)
    """As `luffy.pipeline.identity.code_of` has it."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files outside the workspace that the settings name, and the hashes of their contents."""
    extendable: bool = False
    """Whether a longer run may continue this one."""
    extends: str | None = None
    """Directory of a finished, shorter run of the same series to continue."""
    verify: bool = False
    """Compare full hashes before a finished result is reused."""
    afresh: bool = False
    """Delete what is there and begin again."""
    execution: ExecutionConfig
    tracking: TrackingConfig

    @field_validator("origin")
    @classmethod
    def _known_from_now_on(cls, origin: str) -> str:
        if origin:
            kind_of(origin)
        return origin

    @field_validator("settings", mode="before")
    @classmethod
    def _of_the_stage(cls, value: object, info: ValidationInfo) -> object:
        known = STAGE_KINDS.get(info.data.get("stage", ""))
        kind = None if known is None else settings_class(known)
        if kind is None or isinstance(value, kind):
            return value
        return kind.read(value) if isinstance(value, dict) else kind.model_validate(value)

    @property
    def identity(self) -> Identity:
        """The ingredients of `key`."""
        given = self.upstream, self.code, self.files
        return Identity(self.stage, identifying(self.settings), *given, self.extendable, keyed(self.settings))


def inputs_of(job: StageJob, directory: Path) -> dict[str, Path]:
    """Input name to the directory of the upstream stage, for the job that is written in `directory`."""
    return {name: in_workspace_of(directory, recorded) for name, recorded in job.inputs.items()}


def in_workspace_of(directory: Path, recorded: str) -> Path:
    """Where the stage that was at `recorded` is in the workspace of the stage in `directory`.

    The workspace may have been moved since, or copied: then the recorded place is gone, or still has the original.
    """
    stage, key = Path(recorded).parts[-2:]
    here = directory.resolve().parents[1] / stage / key
    return here if here.is_dir() else Path(recorded)


def write_job(path: Path, job: StageJob) -> None:
    """Write `job` as YAML, atomically."""
    write_atomic(path, dump_yaml(job.model_dump(mode="json")))


def read_job(path: Path) -> StageJob:
    """The job in `path`, also of an earlier version; raises ConfigError with one line for each mistake."""
    values, origins = read_yaml(path)
    known = without_removed(values, finished=(path.parent / MANIFEST_FILE).is_file())
    try:
        return StageJob.model_validate_json(json.dumps(known))
    except ValidationError as error:
        raise ConfigError(explain(error, StageJob, origins, otherwise=str(path))) from None
