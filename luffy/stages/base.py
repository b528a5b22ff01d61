"""The base policy: trained from scratch on a corpus, adapted from a model folder, or served by an endpoint.

Run: python -m luffy.stages.base --config DIR/config.yaml --out DIR
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from luffy.config.objective import NegativeLogLikelihoodLoss, NormaliserConfig, TermConfig
from luffy.config.settings import BaseSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.rollout.text_endpoint import write_endpoint
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.supervised_run import run_supervised, trace_examples
from luffy.tracking.gpu_hours import GpuHours
from luffy.training.base_model import adapt_model_folder, copy_tokenizer, new_tiny_model
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy
from luffy.training.rank_calls import LocalRanks
from luffy.training.supervised import SupervisedPlan, SupervisedRank

logger = logging.getLogger(__name__)
LANGUAGE_MODELLING = TermConfig(
    name="nll",
    select="off_policy",
    loss=NegativeLogLikelihoodLoss(kind="nll"),
    normaliser=NormaliserConfig(mode="token", population="own"),
)


def run(settings: BaseSettings, context: StageContext) -> StageResult:
    """Create `model/` by training or by adapting; for a model served by an endpoint, it holds only a description."""
    if settings.model.endpoint is not None:
        write_endpoint(context.out / "model", settings.model.endpoint)
        context.events.progress(1, 1)
        return StageResult(outputs=("model",), metrics={})
    if settings.model.source is not None:
        turn_ends = adapt_model_folder(settings.model, context.out / "model")
        copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
        _warn_of_other_ends(context.out / "model", turn_ends)
        context.events.progress(1, 1)
        return StageResult(outputs=("model",), metrics={})
    assert settings.base is not None and settings.model.architecture is not None
    hours = GpuHours(context.out)
    tokenizer = load_tokenizer(context.inputs["data"] / "tokenizer")
    examples = trace_examples(tokenizer, read_prompts(context.inputs["data"] / "corpus.parquet"))
    if not examples:
        raise DataError("data.corpus: no row has a trace to learn from")
    plan = SupervisedPlan(
        steps=settings.base.steps,
        batch_size=settings.base.batch_size,
        optimizer=settings.base.optimizer,
        terms=(LANGUAGE_MODELLING,),
        checkpoint_every=context.execution.checkpoint.base_every,
        seed=settings.seed,
    )
    model = new_tiny_model(settings.model.architecture, tokenizer, settings.seed)
    # A base is trained in one process, whatever the ranks of SFT and RL share.
    execution = context.execution.model_copy(update={"sequence_parallel": 1})
    policy = Policy(model, plan.optimizer, execution, settings.model.dtype)
    checkpoints = CheckpointStore(context.out, context.execution.checkpoint.keep)
    rank = SupervisedRank(policy, plan, checkpoints, tokenizer.pad_token_id)
    return run_supervised(settings, context, LocalRanks(rank), examples, plan, hours)


def _warn_of_other_ends(model: Path, turn_ends: Sequence[int]) -> None:
    """Warn when the model's own settings end responses at tokens other than the tokenizer's end of sequence."""
    tokenizer = load_tokenizer(model)
    others = [str(tokenizer.convert_ids_to_tokens(token)) for token in turn_ends if token != tokenizer.eos_token_id]
    if others:
        logger.warning(
            "responses end only at %s, but the model's own settings also end them at %s: if it ends its turns with "
            "that, set evaluation.stop=%s, or its responses will run on",
            tokenizer.eos_token,
            " and ".join(others),
            json.dumps(others),
        )


if __name__ == "__main__":
    main("base", run, defers_stop_requests=True)
