"""What `prepare_data` reads and what it lets through."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from luffy.config.strict import StrictModel

Operation = Literal["add", "subtract", "reverse"]
ResponseStyle = Literal["stepwise", "direct"]


class ArithmeticSource(StrictModel):
    """Generated chains of operations on two-digit numbers modulo 100 (`luffy.data.sources.arithmetic`)."""

    kind: Literal["arithmetic"]
    num_prompts: PositiveInt
    num_operations: tuple[PositiveInt, ...] = Field(min_length=1)
    """Chain lengths, drawn with equal shares."""
    operations: dict[Operation, PositiveFloat] = Field(
        default={"add": 1.0, "subtract": 1.0, "reverse": 1.0}, min_length=1
    )
    """Relative frequency of each operation."""
    stepwise_share: dict[int, Annotated[float, Field(ge=0.0, le=1.0)]] | Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of prompts whose trace reasons in steps; the others answer directly. One number, or one a chain length."""
    unique: bool = True
    """Refuse a prompt drawn before (a corpus for the base may repeat, a benchmark may not)."""

    @model_validator(mode="after")
    def _share_for_each_length(self) -> "ArithmeticSource":
        if isinstance(self.stepwise_share, dict):
            missing = sorted(set(self.num_operations) - set(self.stepwise_share))
            if missing:
                raise ValueError(f"stepwise_share has no entry for chains of {missing} operations; add them")
        return self


class FileSource(StrictModel):
    """A local parquet or JSONL file with the columns of LUFFY/verl (`luffy.data.schema`)."""

    kind: Literal["file"]
    path: str
    """Path of a `.parquet` or `.jsonl` file; relative paths start at the working directory."""
    author: str = "unknown"
    """Who wrote the traces in `target`, where the row does not say."""
    max_rows: PositiveInt | None = None
    """Read only the first rows; None: all."""


SourceConfig = Annotated[ArithmeticSource | FileSource, Field(discriminator="kind")]


class DataConfig(StrictModel):
    """Sources of the experiment, and the limits a row must keep."""

    train: SourceConfig
    """Prompts with traces, for SFT and RL."""
    corpus: SourceConfig | None = None
    """Text from which an embedded base policy is made; needed where `model.path` is not given."""
    suites: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")], SourceConfig] = Field(min_length=1)
    """Evaluation suites by name, which also names their files."""
    max_prompt_tokens: PositiveInt
    """A longer prompt is rejected and counted."""
    max_trace_tokens: PositiveInt
    """A trace longer than this, stop token included, is rejected and counted."""
    require_verified_traces: bool = True
    """Reject traces whose answer is not graded correct."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message; None: none."""
