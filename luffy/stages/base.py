"""The base policy: trained from scratch on a corpus, adapted from a model folder, or served by an endpoint.

Run: python -m luffy.stages.base --config DIR/config.yaml --out DIR
"""

import json
import shutil

from luffy.cluster.local import open_ranks
from luffy.config.settings import BaseSettings
from luffy.config.terms import NegativeLogLikelihoodLoss, NormaliserConfig, TermConfig
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer, stop_texts, stop_token_ids, turn_end
from luffy.errors import DataError
from luffy.rollout.text_endpoint import write_endpoint
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.supervised_run import run_supervised, trace_examples
from luffy.tracking.metrics import GpuHours
from luffy.training.model_folder import adapt_model_folder, copy_tokenizer, new_tiny_model
from luffy.training.supervised import SupervisedPlan, SupervisedSpec

LANGUAGE_MODELLING = TermConfig(
    name="nll",
    select="off_policy",
    loss=NegativeLogLikelihoodLoss(kind="nll"),
    normaliser=NormaliserConfig(mode="token", population="own"),
)
_INITIAL = "initial"
"""The model before training, for its ranks to load."""


def run(settings: BaseSettings, context: StageContext) -> StageResult:
    """Create `model/` by training or by adapting; for a model served by an endpoint, it holds only a description."""
    if settings.model.endpoint is not None:
        write_endpoint(context.out / "model", settings.model.endpoint)
        context.events.progress(1, 1)
        return StageResult(outputs=("model",), metrics={})
    if settings.model.source is not None:
        tokenizer = load_tokenizer(context.inputs["data"] / "tokenizer")
        adapt_model_folder(settings.model, context.out / "model", stop_token_ids(tokenizer))
        copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
        ends, last = stop_texts(tokenizer), turn_end(tokenizer)
        if len(ends) > 1:
            context.events.message(f"responses end at {' or '.join(ends)}; traces with {ends[0]}")
        if last is not None and last not in stop_token_ids(tokenizer):
            written = str(tokenizer.convert_ids_to_tokens(last))
            context.events.message(
                f"responses end at {' or '.join(ends)}, and the chat template ends turns with {written}: if the model "
                f"was trained on that, set rl.stop and evaluation.stop to {json.dumps([written])}, or its responses "
                "will run on"
            )
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
    initial = context.out / _INITIAL
    new_tiny_model(settings.model.architecture, tokenizer, settings.seed).save_pretrained(initial)
    spec = SupervisedSpec(plan, context.execution, settings.model.dtype, initial, context.out, tokenizer.pad_token_id)
    with open_ranks("local", spec) as ranks:
        shutil.rmtree(initial)
        return run_supervised(settings, context, ranks, examples, plan, hours)


if __name__ == "__main__":
    main("base", run, defers_stop_requests=True)
