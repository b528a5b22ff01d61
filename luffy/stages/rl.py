"""Mixed-policy reinforcement learning: rollouts and demonstrations in one group, one objective over both.

Run: python -m luffy.stages.rl --config DIR/config.yaml --out DIR
"""

from contextlib import ExitStack

from luffy.config.settings import RLSettings
from luffy.pipeline.reuse import complete_checkpoints
from luffy.rl.loop import LogpGapCheck, suspicious_gap
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.rl_components import open_components
from luffy.stages.training_span import adopt_shorter_run
from luffy.stop_request import StoppedOnRequest, stop_is_requested
from luffy.tracking.advice import advice_on_rl
from luffy.tracking.metrics import METRICS_FILE, GpuHours, read_metrics
from luffy.tracking.tracker import SAMPLES_FILE, Tracker
from luffy.training.model_folder import copy_tokenizer

_HEADLINE = ("reward/mean", "actor/loss")


def run(settings: RLSettings, context: StageContext) -> StageResult:
    """Train the upstream model; every step's groups are journalled before the update that uses them."""
    rl = settings.rl
    if context.extends is not None:
        adopt_shorter_run(context.extends, context.out, ("journal",))
    hours = GpuHours(context.out)
    start = max(complete_checkpoints(context.out), default=0)
    _warn_of_uncorrected_staleness(settings, context)
    logp_gap = LogpGapCheck(context.execution.max_logp_gap, suspicious_gap(settings.dtype, rl.staleness_bound))
    with ExitStack() as stack:
        parts = open_components(settings, context, stack)
        if start:
            parts.steps.restore(start)
        tracker = stack.enter_context(
            Tracker(context.out, context.key, context.labels, context.tracking, settings, resumed_from=start)
        )
        tracker.started()
        if not start and (measured := parts.held_out.measure(0)):
            tracker.log(0, measured)
        for step in range(start + 1, rl.steps + 1):
            if parts.held_out.is_over:
                context.events.message(f"rl.validation.patience ended training after step {step - 1} of {rl.steps}")
                break
            outcome = parts.steps.run(step)
            measured = parts.held_out.measure(step)
            tracker.log(step, outcome.metrics | measured | hours.metrics(parts.trainer.num_gpus))
            logp_gap.check(outcome.metrics)
            if step % context.tracking.samples_every == 0 or step == 1:
                tracker.samples(step, parts.read(outcome.groups, context.tracking.num_samples))
            is_last = step == rl.steps or parts.held_out.is_over
            is_due = is_last or step % context.execution.checkpoint.rl_every == 0
            is_stopped = stop_is_requested()
            if is_due or is_stopped:
                parts.steps.save(step, is_extra=not is_due)
            _announce(context, step, rl.steps, outcome.metrics)
            if is_stopped and not is_last:
                raise StoppedOnRequest(f"step {step} of {rl.steps} is saved")
        parts.held_out.export(context.out / "model")
    copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
    metrics = read_metrics(context.out / METRICS_FILE)
    for advice in advice_on_rl(settings.objective, metrics):
        context.events.message(advice)
    headline = {name: metrics[-1][name] for name in _HEADLINE if name in metrics[-1]}
    return StageResult(("model", METRICS_FILE, SAMPLES_FILE), headline, resumed_from=start)


def _warn_of_uncorrected_staleness(settings: RLSettings, context: StageContext) -> None:
    uncorrected = [term for term in settings.objective.terms if term.takes_sampler_for_trainer]
    if settings.rl.staleness_bound and uncorrected:
        names = ", ".join(term.name for term in uncorrected)
        correction = "rl.correction or " if all(term.lacks_correction for term in uncorrected) else ""
        context.events.message(
            f"tokens may be sampled by weights of {settings.rl.staleness_bound} RL steps before (rl.max_staleness, "
            f"rl.partial_rollout_tokens), but {names} would learn as if the current weights had sampled them; set "
            f"{correction}a loss that uses the sampler's probabilities (aipo)"
        )


def _announce(context: StageContext, step: int, total: int, metrics: dict[str, float]) -> None:
    shown = {"loss": "actor/loss", "reward": "reward/mean", "tokens_per_s": "perf/tokens_per_s"}
    # A step whose groups were all dropped has no loss.
    context.events.progress(step, total, **{key: metrics[name] for key, name in shown.items() if name in metrics})


if __name__ == "__main__":
    main("rl", run, defers_stop_requests=True)
