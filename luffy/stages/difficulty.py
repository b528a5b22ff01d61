"""Selects the training prompts for RL by the pass rate of a policy, or of a teacher: neither too hard nor too easy.

Run: python -m luffy.stages.difficulty --config DIR/config.yaml --out DIR

Samples `difficulty.num_samples` responses to every prompt of prepare_data's train.parquet, as an evaluation does, and
grades them as RL does (`luffy.stages.policy_answers`); with an environment a response is an episode. Writes
pass_rates.parquet (one row per prompt), train.parquet (the prompts within the bounds, with traces), tokenizer/,
card.json and card.md. RL reads this directory in place of prepare_data's. sft.parquet, rl_complement.parquet and
validation.parquet are not filtered: SFT can use a trace whether or not the policy solves the prompt, and held-out data
must not depend on a policy.
"""

from luffy.config.settings import DifficultySettings
from luffy.data.answer_cards import RATES_FILE, Fit, card_json, difficulty_card, fit_of, write_pass_rates
from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.splits import TRAIN
from luffy.errors import DataError
from luffy.files import write_atomic
from luffy.pipeline.manifest import read_manifest
from luffy.report.cards import card_markdown, difficulty_section
from luffy.stages.policy_answers import answer_prompts
from luffy.stages.program import StageContext, StageResult, main
from luffy.training.model_folder import copy_tokenizer


def run(settings: DifficultySettings, context: StageContext) -> StageResult:
    """Measure the pass rate of every training prompt and keep those within the bounds; DataError if there are none."""
    config, out = settings.difficulty, context.out
    with answer_prompts(settings, context) as answered:
        rates = answered.rates
    fits = [fit_of(rate, config) for rate in rates]
    if Fit.KEPT not in fits:
        values = [rate.value for rate in rates]
        raise DataError(
            f"difficulty: no prompt is left of {len(rates)}: {fits.count(Fit.TOO_HARD)} pass rates are below "
            f"difficulty.min_pass_rate {config.min_pass_rate:g}, {fits.count(Fit.TOO_EASY)} above "
            f"difficulty.max_pass_rate {config.max_pass_rate:g} (they range from {min(values):g} to {max(values):g}); "
            "widen the range"
        )
    manifest = None if settings.teacher is not None else read_manifest(context.inputs["model"])
    measured = "policy" if settings.teacher is None else settings.teacher.path
    card = difficulty_card(
        manifest.node if manifest else measured,
        config,
        rates,
        fits,
        [prompt.data_source for prompt in answered.prompts],
    )
    write_pass_rates(out / RATES_FILE, rates, fits)
    kept = {rate.uid for rate, fit in zip(rates, fits, strict=True) if fit is Fit.KEPT}
    whole = iterate_prompts(context.inputs["data"] / TRAIN)
    write_prompts(out / TRAIN, (prompt for prompt in whole if prompt.uid in kept))
    copy_tokenizer(context.inputs["data"] / "tokenizer", out / "tokenizer")
    write_atomic(out / "card.json", card_json(card))
    write_atomic(out / "card.md", card_markdown(difficulty_section(card)))
    outputs = (RATES_FILE, TRAIN, "tokenizer", "card.json", "card.md")
    metrics = {f"prompts/{name}": float(count) for name, count in card.fits.items()}
    metrics |= {"pass_rate": card.rates.mean_pass_rate, "truncated_share": card.rates.truncated_share}
    return StageResult(outputs, metrics, resumed_from=answered.resumed_from)


if __name__ == "__main__":
    main("difficulty", run, defers_stop_requests=True)
