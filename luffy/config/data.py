"""What `prepare_data` reads, and what it filters out."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt

from luffy.config.strict import (
    FILE_IDENTITY,
    NOT_IDENTITY,
    ImportPath,
    Name,
    PositiveShare,
    RunName,
    Share,
    StrictModel,
)

Operation = Literal["add", "subtract", "reverse", "multiply"]
StepStyle = Literal["labelled", "equations", "checked"]
"""How a trace writes its steps: ` a:+8 =55`, as the base's text does; `47+8=55`; or each labelled step twice."""


class ArithmeticSource(StrictModel):
    """Generated chains of operations on two-digit numbers modulo 100 (`luffy.data.sources.arithmetic`)."""

    reader: ClassVar[str] = "luffy.data.sources.arithmetic:arithmetic_prompts"
    kind: Literal["arithmetic"]
    num_prompts: PositiveInt
    num_operations: tuple[PositiveInt, ...] = Field(min_length=1)
    """Chain lengths, sampled with equal shares."""
    operations: dict[Operation, PositiveFloat] = Field(
        default={"add": 1.0, "subtract": 1.0, "reverse": 1.0}, min_length=1
    )
    """Relative frequency of each operation."""
    reverse_symbol: Literal["r", "r2"] = "r"
    """How the operation reverse is written. `r2` takes as many tokens as `+8`, so that an operation stands at the same
    place in every chain: a small policy then copies the right one."""
    stepwise_share: dict[int, Share] | Share = 1.0
    """Share of prompts whose trace reasons in steps; the others answer directly. One number, or one for each length."""
    by_calculator: tuple[Operation, ...] = ()
    """Operations that the teacher does not do itself: a stepwise trace calls the tool `calculator` for each, in the
    format `hermes`, and continues in a separate turn."""
    unique: bool = True
    """Sample every prompt at most once (a corpus for the base policy may repeat, a benchmark may not)."""

    traced_share: Share = 1.0
    """Share of prompts that have a trace. A smaller share's prompts are among those of a larger one."""
    wrong_share: Share = 0.0
    """Share of the prompts with a trace whose traces have one wrong step, from which the rest follows, and so a wrong
    answer. Grading rejects such traces unless `data.require_verified_traces` is false."""
    styles: tuple[StepStyle, ...] = Field(default=("labelled",), min_length=1)
    """A stepwise trace in each of these styles for every prompt."""

    def _complaints(self) -> Iterator[str]:
        if len(set(self.styles)) < len(self.styles):
            yield "styles: give each style once"
        if self.by_calculator and (self.wrong_share or self.styles != ("labelled",)):
            yield "by_calculator: a teacher with a calculator makes no mistakes and writes labelled steps"
        if isinstance(self.stepwise_share, dict):
            missing = sorted(set(self.num_operations) - set(self.stepwise_share))
            if missing:
                yield f"stepwise_share has no entry for chains of {missing} operations; add them"


class GuessNumberSource(StrictModel):
    """Games of `environment.kind: guess_number`, with a player's turns as traces (`luffy.data.sources.games`)."""

    reader: ClassVar[str] = "luffy.data.sources.games:guessing_games"
    kind: Literal["guess_number"]
    num_prompts: PositiveInt
    low: int = 1
    high: int = 63
    """The number to find is between `low` and `high`, both included."""
    player: Literal["bisecting", "random"] = "bisecting"
    """Who plays the traces: one that halves the interval, or one that ignores the answers (text for a base policy)."""
    max_turns: PositiveInt = 8
    """A trace ends here, found or not."""

    def _complaints(self) -> Iterator[str]:
        if self.high <= self.low:
            yield f"high {self.high} must be above low {self.low}"


Scalar = str | int | float | bool


class AnswerField(StrictModel):
    """Where to find the reference answer."""

    column: str
    """Name of the column; `a.b` reaches into a mapping."""
    after: str | None = None
    """Only what follows the last occurrence of this text (GSM8K: `####`)."""
    boxed: bool = False
    r"""Only the content of the last `\boxed{}` (MATH: the answer inside its solution)."""
    element: int | Literal["all"] | None = None
    """Only this element (from 0) of a list, also one written as text; `all`: joined by commas (OlympiadBench)."""
    or_boxed_in: str | None = None
    r"""A row without a value gets the content of the last `\boxed{}` in this column."""

    def _complaints(self) -> Iterator[str]:
        if self.after is not None and self.boxed:
            yield "give one of after and boxed"


class TraceField(StrictModel):
    """A column with a demonstration, or with a list of them."""

    column: str
    author: str = "unknown"
    """Who wrote them."""
    keep_column: str | None = None
    """A column of true or false, one for each trace: only true ones are read (OpenR1: `is_reasoning_complete`)."""
    logprobs_column: str | None = None
    """The author's log-probabilities of the trace's tokens and stop token."""
    thinking: bool = False
    """Every trace begins inside its reasoning, though some leave the opening `<think>` to the chat template."""
    rewrite: Literal["gsm8k"] | None = None
    r"""`gsm8k`: drop the `<<2*3=6>>` marks, and put the answer after `####` into a `\boxed{}`."""


class ChoicesField(StrictModel):
    """Where to find the options of a multiple-choice question; each becomes a line `A. ...` below the problem. Give one
    of `column`, `columns`, and `correct` with `incorrect`. The dataset's order is kept; where it has a separate column
    for the correct option, a hash of question and option orders them: the same in every run."""

    column: str | None = None
    """A list of texts."""
    columns: tuple[str, ...] = ()
    """One column for each option, in order."""
    correct: str | None = None
    """Column with the correct option (GPQA); `answer` is not given then."""
    incorrect: tuple[str, ...] = ()
    """One column for each wrong option."""
    labels: str | None = None
    """A list parallel to `column`: the labels that `answer` uses (ARC: `A` or `1`); None: A, B, C and so on."""
    answer_is: Literal["label", "index", "text"] = "label"
    """What `answer` holds: the label, the index (from 0) or the text of the correct option."""
    fillers: tuple[str, ...] = ()
    """Texts that stand for a missing option (MMLU-Pro: `N/A`)."""

    def _complaints(self) -> Iterator[str]:
        if sum((self.column is not None, bool(self.columns), self.correct is not None)) != 1:
            yield "give one of column, columns, and correct with incorrect"
        if (self.correct is None) != (not self.incorrect):
            yield "correct and incorrect go together"
        if self.labels is not None and self.column is None:
            yield "labels has no effect without column; remove it"
        if self.labels is not None and self.answer_is != "label":
            yield f"labels has no effect with answer_is: {self.answer_is}; remove it"
        if self.correct is not None and self.answer_is != "label":
            yield "answer_is has no effect with correct; remove it"


class FieldsConfig(StrictModel):
    """How the columns of a file become a prompt, where they are of no layout that is recognised."""

    data_source: str
    """Names the benchmark or corpus; part of the uid."""
    problem: str
    """Column with the problem: text, or a list of messages."""
    id: str | None = None
    """Column that becomes part of the uid, for benchmarks that repeat a question under several numbers (MMLU-Pro)."""
    answer: AnswerField | None = None
    """None: `choices.correct` holds it."""
    choices: ChoicesField | None = None
    """The options of a multiple-choice question; the reference answer becomes a letter."""
    grader: Name | None = None
    """Grades these rows: `math`, `math_strict`, `choice`, `exact`, `code`, one of `grading.named`, or `rule`, which is
    the experiment's; None: `choice` where there are `choices`, else `rule`."""
    traces: tuple[TraceField, ...] = ()
    ability: str = "math"
    extra: tuple[str, ...] = ()
    """Columns kept in `extra_info`."""

    def _complaints(self) -> Iterator[str]:
        has_correct = self.choices is not None and self.choices.correct is not None
        if has_correct and self.answer is not None:
            yield "answer has no effect beside choices.correct; remove it"
        if not has_correct and self.answer is None:
            yield "answer: missing; name the column of the reference answer (or choices.correct)"


class _StoredRows(StrictModel):
    kind: str
    path: str
    author: str = "unknown"
    """Who wrote the traces, where neither row nor `fields` say."""
    max_rows: PositiveInt | None = None
    """Read only the first rows; None: all."""
    only: dict[str, Scalar | tuple[Scalar, ...]] = Field(default={})
    """Read only rows with this value, or one of these, in a column (`data_source: amc`); they count for `max_rows`."""
    confidential: bool = False
    """No text of its rows is shown in messages, samples of rejected rows or the card, and `extra_info.confidential` of
    its rows says so (GPQA's authors ask that its examples not be spread)."""
    fields: FieldsConfig | None = None
    """Which columns to read; None: those of LUFFY and verl (`luffy.data.schema`), or of another layout that is
    recognised (TRL, open-r1, prime-rl, OpenRLHF, NuminaMath, GSM8K, DeepScaleR), as the log says."""


class FileSource(_StoredRows):
    """Local parquet, JSONL or CSV (`luffy.data.sources.stored_rows`)."""

    reader: ClassVar[str] = "luffy.data.sources.stored_rows:FilePrompts"
    kind: Literal["file"]
    path: Annotated[str, FILE_IDENTITY]
    """A `.parquet`, `.jsonl` or `.csv` file, or a pattern with `*`, read by name. Relative to the folder of the file
    that says so if it is there, else to the working directory. In a `.csv` file nested columns are JSON text."""


class HubSource(_StoredRows):
    """A dataset of the hub, or a local folder that `datasets` can load (`luffy.data.sources.stored_rows`)."""

    reader: ClassVar[str] = "luffy.data.sources.stored_rows:HubPrompts"
    kind: Literal["hub"]
    path: str
    """The dataset's id (`openai/gsm8k`) or a folder."""
    name: str | None = None
    """The dataset's configuration, where it has several."""
    split: str = "train"
    revision: str = "main"
    """Branch, tag or commit; only a commit always means the same rows."""


class ReasoningGymSource(StrictModel):
    """Generated tasks of the package reasoning-gym (`pip install 'luffy-rl[reasoning-gym]'`); they carry no trace."""

    reader: ClassVar[str] = "luffy.data.sources.games:ReasoningGymPrompts"
    kind: Literal["reasoning_gym"]
    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of its datasets (`chain_sum`, `gcd`); prompts are taken from them in turn."""
    num_prompts: PositiveInt
    options: dict[str, dict[str, int | float | bool | str]] = Field(default={})
    """Parameters by task."""
    grader: Name | None = None
    """Grades these rows, e.g. one of `grading.named` of `kind: reasoning_gym`, by which the package itself scores them.
    None: the experiment's grader compares them with the reference answer."""

    def _complaints(self) -> Iterator[str]:
        unknown = sorted(set(self.options) - set(self.tasks))
        if unknown:
            yield f"options for {', '.join(unknown)}, which tasks does not name"


class VerifiersPackage(StrictModel):
    """An environment of the package verifiers (0.1.9 to 0.3.1, or 0.4.0), which a separate Python interpreter has."""

    environment: str = Field(min_length=1)
    """Its id, as `vf-eval` takes it: `vf-wordle` is the module `vf_wordle`."""
    arguments: dict[str, JsonValue] = Field(default={})
    """Given to its `load_environment`. With 0.4.0: the configuration of the environment (`taskset`, its agent by name,
    ...), `select` for its tasks, and `eval: {taskset, select}` for those of the split `eval`."""
    version: int = Field(default=0, ge=0)
    """Its code is not part of a stage's identity: increase this when it changes."""
    python: Annotated[str, NOT_IDENTITY]
    """The interpreter that has both, e.g. `/opt/verifiers/bin/python`; as `call_timeout_s` no part of the identity."""
    call_timeout_s: Annotated[PositiveFloat, NOT_IDENTITY] = 120.0
    """Limit of one answer or one score of the environment; starting it may take ten times as long."""


class VerifiersSource(VerifiersPackage):
    """Tasks of an environment of the package verifiers (`luffy.data.sources.games`); they carry no trace."""

    reader: ClassVar[str] = "luffy.data.sources.games:VerifiersTasks"
    kind: Literal["verifiers"]
    split: Literal["train", "eval"] = "train"
    num_prompts: PositiveInt | None = None
    """Read only the first tasks; None: all."""
    grader: Name = "environment"
    """Grades these rows: `environment` takes the environment's own reward, and 1 or more is correct. For another bound
    give the name of a grader in `grading.named` with `kind: measure`."""
    equal_prompts: bool = False
    """Whether tasks with equal prompts may differ in a state that only the environment knows (as games do): then equal
    prompts are not repeats, and training data is not searched for those of a suite."""


class CustomSource(StrictModel):
    """A source of your own (`luffy.data.sources`)."""

    reader: ClassVar[str] = "luffy.data.sources:custom_source"
    kind: Literal["custom"]
    factory: ImportPath
    """`package.module:function`, called with `purpose`, `seed` and `options`; returns a `TraceSource`."""
    options: dict[str, int | float | bool | str | None] = Field(default={})


_Generated = ArithmeticSource | GuessNumberSource
_Read = FileSource | HubSource | ReasoningGymSource | VerifiersSource | CustomSource
SourceConfig = Annotated[_Generated | _Read, Field(discriminator="kind")]


class MixturePart(StrictModel):
    """A source of a mixture."""

    source: SourceConfig
    weight: PositiveFloat = 1.0
    """Its share of every RL step, relative to the other parts."""


class MixtureSource(StrictModel):
    """Several sources, of which every RL step takes exact shares (`luffy.data.sources`), whatever their sizes: a small
    one begins again earlier. SFT reads every trace once an epoch, regardless of the weights."""

    kind: Literal["mixture"]
    parts: dict[Name, MixturePart] = Field(min_length=2)

    def _complaints(self) -> Iterator[str]:
        for name, part in self.parts.items():
            if isinstance(part.source, VerifiersSource) and part.source.equal_prompts:
                yield f"parts.{name}.source.equal_prompts: in a mixture equal prompts count as repeats; remove it"


TrainingSource = Annotated[SourceConfig | MixtureSource, Field(discriminator="kind")]


class DecontaminationConfig(StrictModel):
    """Rows and traces that hold a benchmark's problem are rejected (`luffy.data.overlap`)."""

    benchmarks: dict[RunName, SourceConfig] = Field(default={})
    """Further benchmarks; `data.suites` are always checked."""


class FiltersConfig(StrictModel):
    """Filters for `data.train`, in addition to the length limits; every rejection is counted."""

    repeats: Literal["merge", "reject"] = "merge"
    """A later row with the problem and the answer of an earlier one: `merge` gives its traces to that one, `reject`
    drops them. A row that brings no new trace, or has another answer, is rejected."""
    near_duplicates: PositiveShare | None = None
    """A problem repeats an earlier one from this estimated Jaccard similarity of word triples; None: only if equal."""


class SFTViewConfig(StrictModel):
    """What `sft.parquet` takes from the training prompts with traces."""

    unique_train_examples: PositiveInt | Literal["all"] = "all"
    """Number of prompts, chosen by seed; the others go to the RL complement."""
    correct_only: bool = True
    """Leave out traces whose answer is not graded correct."""


class DataConfig(StrictModel):
    """Sources of the experiment, and the limits for their rows."""

    train: TrainingSource | None = None
    """Prompts with traces, for SFT and RL; None where nothing is trained on them."""
    corpus: SourceConfig | None = None
    """Text for training an embedded base policy; needed without `model.path`."""
    suites: dict[RunName, SourceConfig] = Field(min_length=1)
    """Evaluation suites by name, which also names their files."""
    max_prompt_tokens: PositiveInt
    """A longer prompt is rejected and counted; suites keep prompts of any length."""
    max_trace_tokens: PositiveInt
    """A trace longer than this, stop token included, is rejected and counted."""
    require_verified_traces: bool = True
    """Reject traces whose answer is not graded correct."""
    remove_system: bool = False
    """Drop the system messages that prompts bring along (LUFFY's `--remove_system`), before `system_prompt` is added:
    for a model whose chat template has one of its own."""
    system_prompt: str | None = None
    """Added to every prompt that has no system message; None: nothing is added."""
    filters: FiltersConfig = FiltersConfig()
    decontamination: DecontaminationConfig = DecontaminationConfig()
    sft: SFTViewConfig = SFTViewConfig()
    rl: Annotated[Literal["train", "complement"], NOT_IDENTITY] = "train"  # all splits are written, whichever RL reads
    """RL's prompts. `train`: all training prompts, those of SFT among them. `complement`: those whose traces SFT does
    not get, without any trace: the prompts beyond `sft.unique_train_examples`, and those that have no usable trace."""
    validation_prompts: NonNegativeInt = 0
    """Training prompts held out in `validation.parquet`, chosen by seed."""

    @property
    def training_sources(self) -> dict[str, SourceConfig]:
        """`train` by its key, or the sources of its parts."""
        if isinstance(self.train, MixtureSource):
            return {f"train.parts.{name}.source": part.source for name, part in self.train.parts.items()}
        return {} if self.train is None else {"train": self.train}
