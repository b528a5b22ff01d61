"""The supervised training run of `base` and `sft`: resume, train, export."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import History
from luffy.config.settings import BaseSettings, SFTSettings
from luffy.data.conversations import encode_demonstrations
from luffy.data.templates import render_prompts
from luffy.pipeline.reuse import complete_checkpoints
from luffy.stages.program import StageContext, StageResult
from luffy.stages.training_span import HeldOut
from luffy.tracking.metrics import METRICS_FILE, GpuHours, read_metrics
from luffy.tracking.tracker import Tracker
from luffy.training.model_folder import copy_tokenizer
from luffy.training.ranks import Ranks
from luffy.training.supervised import SupervisedPlan, SupervisedRank, SupervisedTrainer, demonstration
from luffy.types import Prompt, Trajectory


def trace_examples(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], history: History = "exact"
) -> list[Trajectory]:
    """One training example per trace; tokens of an environment are context only."""
    prompt_ids = render_prompts(tokenizer, [prompt.messages for prompt in prompts])
    encoded = encode_demonstrations(tokenizer, prompts, history)
    return [
        demonstration(ids, turns.token_ids, turns.source, turns.context_starts)
        for ids, of_prompt in zip(prompt_ids, encoded, strict=True)
        for turns in of_prompt
    ]


def run_supervised(
    settings: BaseSettings | SFTSettings,
    context: StageContext,
    ranks: Ranks[SupervisedRank],
    examples: Sequence[Trajectory],
    plan: SupervisedPlan,
    hours: GpuHours,
    measure_weights: Callable[[int], dict[str, float]] | None = None,
) -> StageResult:
    """Train on `examples` from the newest checkpoint to the end of the plan and write `model/`.

    `measure_weights` as in `HeldOut`.
    """
    trainer = SupervisedTrainer(plan, ranks)
    validation = settings.validation if isinstance(settings, SFTSettings) else None
    schedule = None if validation is None else validation.schedule
    held_out = HeldOut(trainer.export, context.out, plan.steps, schedule, measure_weights)
    start = max(complete_checkpoints(context.out), default=0)
    with Tracker(context.out, context.key, context.labels, context.tracking, settings, resumed_from=start) as tracker:

        def on_step(step: int, metrics: dict[str, float]) -> bool:
            measured = held_out.measure(step)
            tracker.log(step, metrics | measured | hours.metrics(trainer.num_gpus))
            context.events.progress(
                step, plan.steps, loss=metrics["actor/loss"], tokens_per_s=metrics["perf/tokens_per_s"]
            )
            return has_ended(step)

        def has_ended(step: int) -> bool:
            if held_out.is_over and step < plan.steps:
                context.events.message(f"sft.validation.patience ended training after step {step} of {plan.steps}")
            return held_out.is_over

        tracker.started()
        if not start and (measured := held_out.measure(0)):
            tracker.log(0, measured)
        if start and has_ended(start):
            trainer.restore(start)  # killed after its last step
        else:
            trainer.train(examples, start, on_step)
        held_out.export(context.out / "model")
    copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
    last = read_metrics(context.out / METRICS_FILE)[-1]
    return StageResult(("model", METRICS_FILE), {"actor/loss": last["actor/loss"]}, resumed_from=start)
