"""The supervised training run of `base` and `sft`: resume, train, export."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luffy.config.model import DType
from luffy.config.settings import BaseSettings, SFTSettings
from luffy.data.templates import encode_traces, render_prompts
from luffy.stages.program import StageContext, StageResult
from luffy.tracking.metrics import METRICS_FILE, read_metrics
from luffy.tracking.tracker import Tracker
from luffy.training.base_model import copy_tokenizer
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy, check_fits
from luffy.training.supervised import SupervisedPlan, demonstration, train_supervised
from luffy.types import Prompt, Trajectory


def trace_examples(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """One training example per trace."""
    prompt_ids = render_prompts(tokenizer, [prompt.messages for prompt in prompts])
    trace_ids = iter(encode_traces(tokenizer, [trace.text for prompt in prompts for trace in prompt.traces]))
    return [
        demonstration(ids, next(trace_ids))
        for prompt, ids in zip(prompts, prompt_ids, strict=True)
        for _ in prompt.traces
    ]


def run_supervised(
    settings: BaseSettings | SFTSettings,
    context: StageContext,
    model: PreTrainedModel,
    dtype: DType,
    examples: Sequence[Trajectory],
    plan: SupervisedPlan,
    tokenizer: PreTrainedTokenizerBase,
) -> StageResult:
    """Train `model` on `examples` from the newest checkpoint to the end of the plan and write `model/`."""
    check_fits(model, max(row.num_tokens for row in examples), "the longest example")
    policy = Policy(model, plan.optimizer, context.execution, dtype)
    checkpoints = CheckpointStore(context.out, context.execution.checkpoint.keep)
    start = checkpoints.newest() or 0
    if start:
        checkpoints.load({"policy": policy.engine}, start)
    with Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=start) as tracker:

        def on_step(step: int, metrics: dict[str, float]) -> None:
            tracker.log(step, metrics)
            context.events.progress(
                step, plan.steps, loss=metrics["actor/loss"], tokens_per_s=metrics["perf/tokens_per_s"]
            )

        train_supervised(policy, examples, plan, checkpoints, tokenizer.pad_token_id, start, on_step)
        policy.export(context.out / "model")
    copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
    last = read_metrics(context.out / METRICS_FILE)[-1]
    return StageResult(("model", METRICS_FILE), {"actor/loss": last["actor/loss"]}, resumed_from=start)
