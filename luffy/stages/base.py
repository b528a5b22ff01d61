"""The weak base policy: trained from scratch on the corpus, or a model folder adapted.

Run: python -m luffy.stages.base --config DIR/config.yaml --out DIR
"""

from luffy.config.objective import NegativeLogLikelihoodLoss, NormaliserConfig, TermConfig
from luffy.config.settings import BaseSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import load_tokenizer
from luffy.errors import DataError
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.supervised_run import run_supervised, trace_examples
from luffy.training.base_model import adapt_model_folder, copy_tokenizer, new_tiny_model
from luffy.training.supervised import SupervisedPlan

LANGUAGE_MODELLING = TermConfig(
    name="nll",
    select="off_policy",
    loss=NegativeLogLikelihoodLoss(kind="nll"),
    normaliser=NormaliserConfig(mode="token", population="own"),
)


def run(settings: BaseSettings, context: StageContext) -> StageResult:
    """Make `model/` by training or by adapting."""
    if settings.model.path is not None:
        adapt_model_folder(settings.model, context.out / "model")
        copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
        context.events.progress(1, 1)
        return StageResult(outputs=("model",), metrics={})
    assert settings.base is not None and settings.model.architecture is not None
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
    return run_supervised(settings, context, model, settings.model.dtype, examples, plan, tokenizer)


if __name__ == "__main__":
    main("base", run)
