"""Supervised fine-tuning on traces: those of the data, or after the stage `sample` those that the policy made itself.

Run: python -m luffy.stages.sft --config DIR/config.yaml --out DIR
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from luffy.cluster.sft_ranks import open_ranks
from luffy.config.environment import history_of
from luffy.config.settings import SFTSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.seeds import derive_seed
from luffy.stages.continuation import adopt_shorter_run
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.supervised_run import run_supervised, trace_examples
from luffy.stages.unmeasured import HeldOutMeasure
from luffy.tracking.metrics import GpuHours
from luffy.training.rank_calls import Ranks, ShardRanks
from luffy.training.supervised import SupervisedPlan, SupervisedRank, SupervisedSpec
from luffy.types import Prompt


def choose_prompts(prompts: list[Prompt], num_traces: int | None, seed: int) -> list[Prompt]:
    """The prompts to train on: all with a trace, or a subset that depends on seed and uid alone."""
    with_traces = [prompt for prompt in prompts if prompt.traces]
    if num_traces is None:
        return with_traces
    if num_traces > len(with_traces):
        raise DataError(f"sft.num_traces is {num_traces} but only {len(with_traces)} training prompts have a trace")
    return sorted(with_traces, key=lambda prompt: derive_seed(seed, "sft", prompt.uid))[:num_traces]


def _traces_file(folder: Path) -> Path:
    """The traces in the result of `sample`, else those of `prepare_data`."""
    sampled = folder / "sampled.parquet"
    return sampled if sampled.exists() else folder / "sft.parquet"


def run(settings: SFTSettings, context: StageContext) -> StageResult:
    """Fine-tune the upstream model on traces; DataError without any."""
    if context.extends is not None:
        adopt_shorter_run(context.extends, context.out)
    sft, hours = settings.sft, GpuHours(context.out)
    tokenizer = load_tokenizer(context.inputs["model"] / "model")
    prompts = choose_prompts(read_prompts(_traces_file(context.inputs["data"])), sft.num_traces, settings.seed)
    examples = trace_examples(tokenizer, prompts, history_of(settings.environment))
    if not examples:
        raise DataError("data.train: no row has a trace; SFT needs demonstrations")
    plan = SupervisedPlan(
        steps=sft.num_steps(len(examples)),
        batch_size=sft.batch_size,
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
        measuring = _measuring(settings, context, plan.steps, stack)
        ranks = stack.enter_context(open_ranks(settings.cluster, spec))
        shards = ShardRanks(ranks, context.execution.sequence_parallel)
        return run_supervised(
            settings, context, shards, examples, plan, hours, measuring(ranks), settings.sft.max_tokens
        )


def _measuring(
    settings: SFTSettings, context: StageContext, steps: int, stack: ExitStack
) -> Callable[[Ranks[SupervisedRank]], HeldOutMeasure | None]:
    """A function from opened ranks to their validation; its problems are checked here, before any rank is opened."""
    if settings.validation is None:
        return lambda ranks: None
    from luffy.stages.held_out import open_for_sft

    return open_for_sft(settings, context, steps, stack)


if __name__ == "__main__":
    main("sft", run, defers_stop_requests=True)
