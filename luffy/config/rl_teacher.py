"""The teacher of on-policy distillation: `rl.teacher`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from luffy.config.model import DType
from luffy.config.strict import StrictModel


class ModelTeacher(StrictModel):
    """Another model, which scores the policy's tokens in the policy's own context. It is frozen."""

    kind: Literal["model"]
    path: str
    """A Hugging Face model folder or hub id, for example an export of an earlier run (`luffy export`). Its tokenizer
    has to be the policy's."""
    dtype: DType | None = None
    """Compute type; None: that of the policy."""


class SelfTeacher(StrictModel):
    """The policy that the stage starts from, with a trace in its prompt (self-distillation). It is frozen.

    Every training prompt needs a trace; where there are several, the first one is shown.
    """

    kind: Literal["self"]
    prompt: str = (
        "{problem}\n\nHere is a reference solution to this problem:\n{trace}\n\n"
        "Now solve the problem in your own words."
    )
    """Replaces the last message of the prompt: `{problem}` is that message, `{trace}` the trace."""

    @model_validator(mode="after")
    def _shows_both(self) -> "SelfTeacher":
        missing = [name for name in ("{problem}", "{trace}") if name not in self.prompt]
        if missing:
            raise ValueError(f"prompt: {missing[0]} is missing; the teacher needs the problem and its trace")
        return self


class ServedTeacher(StrictModel):
    """A model on vLLM servers, which scores the policy's tokens in the policy's own context.

    Its servers are `execution.rl_teacher.urls`, which are not part of a result's identity: different models must have
    different names. Its tokenizer has to be the policy's.
    """

    kind: Literal["served"]
    name: str = Field(min_length=1)
    """Its name in requests to the servers."""


RLTeacher = Annotated[ModelTeacher | SelfTeacher | ServedTeacher, Field(discriminator="kind")]


def complaint_about_teacher(
    teacher: RLTeacher | None, *, is_needed: bool, has_environment: bool, without_traces: bool, temperature: float
) -> str | None:
    """What is wrong with `rl.teacher` in an experiment with RL; None: nothing.

    `is_needed`: the objective has a term with `kind: distillation`. `without_traces`: RL's prompts have none.
    `temperature`: that of the rollouts.
    """
    if teacher is None:
        wanted = "rl.teacher={kind: model, path: FOLDER}, {kind: served, name: MODEL}, or {kind: self}"
        return f"rl.teacher: missing; a distillation term needs it: {wanted}" if is_needed else None
    if not is_needed:
        return "rl.teacher has no effect: objective.terms has none with loss.kind: distillation; add one or remove it"
    if isinstance(teacher, ServedTeacher) and temperature != 1.0:
        return f"rl.teacher.kind: served scores at temperature 1, not at rl.temperature {temperature:g}; set that to 1"
    if isinstance(teacher, SelfTeacher) and has_environment:
        return "rl.teacher.kind: self shows a trace of a single turn; remove environment, or use kind: model"
    if isinstance(teacher, SelfTeacher) and without_traces:
        return "rl.teacher.kind: self needs traces, and data.rl: complement has prompts without any; use data.rl: train"
    return None
