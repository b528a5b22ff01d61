"""The registry of stage kinds: the one description that chains, plans, runs, Prefect and the pages read.

A new stage takes its program in `luffy/stages/` and its entry here, with its settings, at its place in a chain.
An entry declares the *role* of each input, not the stage that makes it: `policy` is the newest policy of the chain,
whichever stage made it. So the same entries wire every chain (`luffy.config.chain`).
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from luffy.config.strict import StrictModel
from luffy.import_paths import NotImported, imported

if TYPE_CHECKING:
    from luffy.config.experiment import ExperimentConfig

Role = Literal["data", "traces", "prompts", "policy", "evaluation"]
"""What a stage provides: suites and tokenizer; training data with traces; RL's prompts; a model; graded responses."""
ViewName = Literal["rollout_samples", "training_curves"]
"""What a stage logs as it learns, for pages."""
_may_import: ContextVar[bool] = ContextVar("may_import", default=False)
_GROUND = ("*", "config/*")
_GRADED = ("environments", "grading", "hosted", "sandbox")
_TRAINED = ("data", "objectives", "tracking", "training")
_ANSWERED = (*_GRADED, "data", "evaluation/*", "rollout", "statistics", "stages/answers")
_SAMPLED = (*_ANSWERED, "stages/policy_answers.py", "tracking", "training")
_VALIDATED = (*_ANSWERED, "stages/held_out.py")
"""What counts beside a training stage's own rooms where it validates the policy as it learns."""
ASKING_ROOMS = (
    "*",
    "data/prompt_templates.py",
    "data/templates.py",
    "rollout",
    "stages/answers/clients.py",
    "stages/answers/paid.py",
    "stages/answers/store.py",
)
"""Rooms that the responses of an evaluation depend on, however they are graded."""
PLAYING_ROOMS = (*_GRADED, "data")
"""In an environment also these."""


@dataclass(frozen=True, slots=True)
class StageKind:
    """One kind of stage."""

    name: str
    title: str
    inputs: Mapping[str, Role] = field(default_factory=dict)
    """Input name to the role of the input."""
    provides: tuple[Role, ...] = ()
    for_each: Role | None = None
    """The chain has one such stage for each result of this role, named after it (`evaluate_sft`)."""
    requires: tuple[Role, ...] = ()
    """Further roles that earlier stages must provide."""
    reads_all: bool = False
    """Whether it reads every earlier stage, under that stage's name unless `inputs` names it."""
    sections: tuple[str, ...] = ()
    """Sections of an experiment that it cannot do without."""
    reads: tuple[str, ...] = ()
    """Those that it reads, if they are there; a stage of a chain may have its own of these."""
    is_in_chains: bool = True
    """False: it runs on its own."""
    rooms: tuple[str, ...] = ()
    """Code that can change its result (`luffy.pipeline.identity`), besides `_GROUND` and its own module. A kind of a
    user's own module has that module in its key, and of this package what it declares alone."""
    views: tuple[ViewName, ...] = ()
    text: str = ""
    """Output that says in Markdown what the result is; empty without one."""
    pages: tuple[str, ...] = ()
    """Outputs for people to open, which a run links into its own directory."""
    settings: type[StrictModel] | None = None
    """The type of its settings; None: it is in `luffy.config.settings`, as its fields are sections of experiments."""
    configure: Callable[[Any], StrictModel] | None = None
    """Derives `settings` from an ExperimentConfig; None: its fields are what the experiment has by those names, and
    `options` those of the stage."""
    gpus: Callable[[Any], int] | None = None
    """GPUs of this machine that it can use, from an ExperimentConfig; None: `luffy.config.settings` has it, or none."""

    origin: str = ""
    """Where a kind of the user's own was imported from, `package.module:NAME`."""

    @property
    def program(self) -> str:
        return self.origin.partition(":")[0] or f"luffy.stages.{self.name}"

    def inputs_in(self, config: "ExperimentConfig") -> Mapping[str, Role]:
        """Its inputs in an experiment as it sees it; a validation reads `data` itself: `difficulty` and `sample` pass
        on training prompts alone. Where teachers answer, they read no policy."""
        is_probe = self.name == "difficulty" and config.probed_teacher is not None
        is_taught = is_probe or (self.name == "sample" and bool(config.teachers))
        found = {name: role for name, role in self.inputs.items() if role != "policy" or not is_taught}
        return {**found, "held_out": "data"} if _validates(getattr(config, self.name, None)) else found

    def provides_in(self, config: "ExperimentConfig") -> tuple[Role, ...]:
        """What it provides there: with teachers, `sample` writes all training data."""
        is_taught = self.name == "sample" and bool(config.teachers)
        return (*self.provides, "prompts") if is_taught else self.provides

    def rooms_of(self, settings: object) -> tuple[str, ...]:
        """All rooms whose code can change its result with these settings."""
        if self.origin:
            return tuple(sorted(self.rooms))
        measured = _VALIDATED if _validates(settings) else ()
        return tuple(sorted({*_GROUND, f"stages/{self.name}.py", *self.rooms, *measured}))


def _validates(section: object) -> bool:
    return getattr(section, "validation", None) is not None


_KINDS = (
    StageKind(
        "prepare_data",
        "Verified prompts with traces, evaluation suites, and the tokenizer",
        reads=("data", "model", "grading", "environment"),
        provides=("data", "traces", "prompts"),
        rooms=(*_GRADED, "data", "rollout"),
        text="card.md",
    ),
    StageKind(
        "base",
        "The starting policy",
        reads=("model", "base"),
        inputs={"data": "data"},
        provides=("policy",),
        rooms=(*_TRAINED, "cluster", "rollout", "stages/supervised_run.py", "stages/training_span.py"),
        views=("training_curves",),
    ),
    StageKind(
        "difficulty",
        "Training prompts that the policy solves neither too rarely nor too often",
        reads=("model", "difficulty", "rl", "grading", "environment"),
        inputs={"data": "prompts", "model": "policy"},
        provides=("prompts",),
        sections=("difficulty",),
        rooms=_SAMPLED,
        text="card.md",
    ),
    StageKind(
        "sample",
        "Answers to the training prompts, the policy's own or those of teachers, and the correct ones as traces",
        reads=("model", "sample", "data", "grading", "environment"),
        inputs={"data": "data", "model": "policy"},
        provides=("traces",),
        sections=("sample", "data.train"),
        rooms=_SAMPLED,
        text="card.md",
    ),
    StageKind(
        "sft",
        "The policy after supervised fine-tuning on traces",
        reads=("model", "sft", "environment", "evaluation", "grading"),
        inputs={"data": "traces", "model": "policy"},
        provides=("policy",),
        sections=("sft", "data.train"),
        rooms=(*_TRAINED, "cluster", "stages/supervised_run.py", "stages/training_span.py"),
        views=("training_curves",),
    ),
    StageKind(
        "rl",
        "The policy after mixed-policy reinforcement learning",
        reads=("model", "rl", "objective", "data", "environment", "evaluation", "grading"),
        inputs={"data": "prompts", "model": "policy"},
        provides=("policy",),
        sections=("rl", "objective", "data.train"),
        rooms=(*_GRADED, *_TRAINED, "cluster", "rl", "rollout", "stages/rl_components.py", "stages/training_span.py"),
        views=("training_curves", "rollout_samples"),
    ),
    StageKind(
        "evaluate",
        "Accuracy of one checkpoint on all suites, with all decodings",
        reads=("model", "evaluation", "grading", "environment"),
        inputs={"data": "data", "model": "policy"},
        provides=("evaluation",),
        for_each="policy",
        sections=("evaluation",),
        rooms=(*_ANSWERED, "tracking"),
        text="summary.md",
    ),
    StageKind(
        "report",
        "The report: accuracies, learning curves, samples and the configuration",
        inputs={"data": "data"},
        requires=("evaluation",),
        reads_all=True,
        rooms=(*_GRADED, "config/many_runs", "data", "evaluation", "report", "statistics", "tracking"),
        text="summary.md",
        pages=("report.html",),
    ),
    StageKind(
        "sweep",
        "Accuracy of checkpoints within an RL run, evaluated in turn by the same engines",
        inputs={"data": "data", "model": "policy"},
        provides=("evaluation",),
        is_in_chains=False,
        rooms=(*_ANSWERED, "objectives", "stages/evaluate.py", "tracking", "training"),
        text="summary.md",
        pages=("curve.html",),
    ),
)
_KNOWN = {kind.name: kind for kind in _KINDS}
STAGE_KINDS: Mapping[str, StageKind] = MappingProxyType(_KNOWN)
"""All kinds by name; `kind_of` adds those of the user's own modules."""
CHAIN_KINDS = tuple(kind.name for kind in _KINDS if kind.is_in_chains)
"""The kinds of stages that a chain may have."""


def kind_of(name: str) -> StageKind:
    """The kind of that name, or the one that `package.module:NAME` is, which is then known by its own name, too.

    Raises ValueError where there is none, or where it cannot be a stage.
    """
    if ":" in name:
        if not (_may_import.get() or any(kind.origin == name for kind in STAGE_KINDS.values())):
            raise ValueError(f"{name} is imported only where its experiment is run or planned")
        if isinstance(found := _imported_kind(name), str):
            raise ValueError(found)
        return found
    if name not in STAGE_KINDS:
        quoted = [repr(known) for known in STAGE_KINDS]
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(quoted[:-1])} or {quoted[-1]}"})
    return STAGE_KINDS[name]


@contextmanager
def importing_kinds() -> Iterator[None]:
    """Within the block kinds are imported that have not been yet. A run's record, which may be another person's, never
    has code run when it is read."""
    token = _may_import.set(True)
    try:
        yield
    finally:
        _may_import.reset(token)


@functools.cache
def _imported_kind(path: str) -> StageKind | str:
    """The kind that `path` names, or a complaint. Once in a process: a second import would not load torch."""
    had_torch = "torch" in sys.modules
    try:
        found = imported(path)
    except NotImported as error:
        return str(error)
    if not isinstance(found, StageKind):
        return f"{path} is no StageKind of luffy.config.stage_kinds, but a {type(found).__name__}"
    if "torch" in sys.modules and not had_torch:
        module = path.partition(":")[0]
        return f"{module} imports torch at its top, for which each command would wait; import it in the stage"
    if found.name in STAGE_KINDS or re.fullmatch(r"[a-z][a-z0-9_]*", found.name) is None:
        return f"{path}: its name {found.name!r} must be one that no other kind has, of small letters, digits and _"
    if found.settings is None:
        return f"{path}: has no settings; give it a class of luffy.config.strict.StrictModel"
    _KNOWN[found.name] = replace(found, origin=path)
    return _KNOWN[found.name]


StageName = Annotated[str, AfterValidator(lambda name: kind_of(name) and name)]
"""The name of a kind, or `package.module:NAME` of the user's own."""
