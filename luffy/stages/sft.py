"""Supervised fine-tuning on traces: those of the data, or after the stage `sample` those that the policy made itself.

Run: python -m luffy.stages.sft --config DIR/config.yaml --out DIR
"""

from collections.abc import Callable
from contextlib import ExitStack

from luffy.cluster.local import open_answers, open_ranks
from luffy.config.environment import history_of
from luffy.config.settings import SFTSettings
from luffy.data.splits import read_demonstrations
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.stages.answers.asker import open_graders
from luffy.stages.held_out import measurer, read_problems
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.supervised_run import run_supervised, trace_examples
from luffy.stages.training_span import adopt_shorter_run
from luffy.tracking.metrics import GpuHours
from luffy.training.supervised import SupervisedPlan, SupervisedSpec


def run(settings: SFTSettings, context: StageContext) -> StageResult:
    """Fine-tune the upstream model on traces; DataError without any."""
    if context.extends is not None:
        adopt_shorter_run(context.extends, context.out)
    sft, validation, hours = settings.sft, settings.validation, GpuHours(context.out)
    tokenizer = load_tokenizer(context.inputs["model"] / "model")
    prompts = read_demonstrations(context.inputs["data"], sft.num_traces, settings.seed)
    examples = trace_examples(tokenizer, prompts, history_of(settings.environment))
    if not examples:
        raise DataError(
            "data.train: no row has a trace, and SFT needs demonstrations; card.md of prepare_data says why they were "
            "rejected"
        )
    plan = SupervisedPlan(
        steps=sft.num_steps(len(examples)),
        batch_size=sft.batch_size,
        steps_per_phase=sft.steps_per_phase,
        optimizer=sft.optimizer,
        terms=sft.objective.terms,
        checkpoint_every=context.execution.checkpoint.sft_every,
        saves_last=context.execution.checkpoint.sft_last,
        seed=settings.seed,
    )
    model = context.inputs["model"] / "model"
    spec = SupervisedSpec(
        plan, context.execution, settings.dtype, model, context.out, tokenizer.pad_token_id, settings.lora
    )
    with ExitStack() as stack:
        measure_weights: Callable[[int], dict[str, float]] | None = None
        if validation is not None:  # its problems are checked here, before any rank is opened
            requests, longest = read_problems(settings, context, tokenizer)
        ranks = stack.enter_context(open_ranks(settings.cluster, spec))
        if validation is not None:
            measured = plan.steps // validation.schedule.every + 2
            num_responses = measured * sum(len(each.samples) for each in requests)
            answers_after = stack.enter_context(open_answers(sft.engine, spec, ranks, longest, num_responses))
            graders, judges = stack.enter_context(open_graders(validation.grading, context, validation.protocol))
            metrics = measurer(settings, context, requests, tokenizer, graders, judges)

            def measure_weights(step: int) -> dict[str, float]:
                with answers_after(step) as engine:
                    return metrics(step, engine)

        return run_supervised(settings, context, ranks, examples, plan, hours, measure_weights)


if __name__ == "__main__":
    main("sft", run, defers_stop_requests=True)
