"""The prompts that RL draws from, tokenized with their traces."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import History, history_of
from luffy.config.settings import RLSettings
from luffy.data.conversations import encode_demonstrations
from luffy.data.parquet import read_prompts
from luffy.data.pass_rates import RATES_FILE, read_pass_rates
from luffy.data.splits import EMPTY_COMPLEMENT
from luffy.data.templates import render_prompts
from luffy.errors import DataError
from luffy.grading.request import problem_of
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.types import Prompt

_FILES = {"train": "train.parquet", "complement": "rl_complement.parquet"}
"""Files of `RLSettings.prompts`."""
_NONE_LEFT = {
    "train": "data.train: no prompts are left; see card.md for why rows were rejected",
    "complement": EMPTY_COMPLEMENT,
}


def prompts_file(settings: RLSettings, data: Path) -> Path:
    """The file of the stage's prompts in the result of `prepare_data`."""
    return data / _FILES[settings.prompts]


def read_tasks(settings: RLSettings, data: Path, tokenizer: PreTrainedTokenizerBase) -> list[RolloutTask]:
    """All prompts with their traces and, where known, pass rates; DataError where prompts or traces are too few."""
    prompts = read_prompts(prompts_file(settings, data))
    rates = read_pass_rates(data / RATES_FILE)
    tokenized = tokenize_tasks(tokenizer, prompts, history_of(settings.environment))
    tasks = [replace(task, pass_rate=rates.get(task.uid)) for task in tokenized]
    if not tasks:
        raise DataError(_NONE_LEFT[settings.prompts])
    _check_traces(settings, tasks)
    _check_buffer_fills(settings, tasks)
    _check_step_fills(settings, tasks)
    return tasks


def tokenize_tasks(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], history: History = "exact"
) -> list[RolloutTask]:
    """A task for each prompt."""
    prompt_ids = render_prompts(tokenizer, [prompt.messages for prompt in prompts])
    encoded = encode_demonstrations(tokenizer, prompts, history)
    return [
        RolloutTask(
            uid=prompt.uid,
            prompt_ids=tuple(ids),
            ground_truth=prompt.ground_truth,
            demonstrations=tuple(
                Demonstration(trace.reply, turns.token_ids, trace.logprobs, turns.source, turns.context_starts)
                for trace, turns in zip(prompt.traces, of_prompt, strict=True)
            ),
            problem=problem_of(prompt),
            messages=prompt.messages,
        )
        for prompt, ids, of_prompt in zip(prompts, prompt_ids, encoded, strict=True)
    ]


def _check_step_fills(settings: RLSettings, tasks: Sequence[RolloutTask]) -> None:
    if settings.rl.prompts_per_step > len(tasks):
        which = "prompts of the complement" if settings.prompts == "complement" else "training prompts"
        raise DataError(
            f"rl.prompts_per_step is {settings.rl.prompts_per_step} but only {len(tasks)} {which} are left; lower it "
            "or add prompts"
        )


def _check_traces(settings: RLSettings, tasks: Sequence[RolloutTask]) -> None:
    group = settings.objective.group
    uses = {"off_policy": group.off_policy, "hint": group.hint, "anchor": group.anchor}
    for name in (name for name, setting in uses.items() if setting):
        if not any(task.demonstrations for task in tasks):
            raise DataError(
                f"objective.group.{name} uses traces, and no training prompt has one: only rollouts would be learned "
                "from; take data with traces, add the section synthesize, or use a method without traces (on_policy)"
            )


def _check_buffer_fills(settings: RLSettings, tasks: Sequence[RolloutTask]) -> None:
    config = settings.objective.interleaved_sft
    with_traces = sum(bool(task.demonstrations) for task in tasks)
    if config is not None and config.buffer_size > with_traces:
        raise DataError(
            f"objective.interleaved_sft.buffer_size is {config.buffer_size} but only {with_traces} training prompts "
            "have a trace: it could never fill up; lower it"
        )
