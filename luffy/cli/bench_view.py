"""What `luffy bench` prints."""

from collections.abc import Sequence

from luffy.cli.console import duration, hours_words, say, terminal, text_table, time_words
from luffy.config import ExperimentConfig
from luffy.costs.forecast import StageForecast
from luffy.costs.layouts import TrialLayout
from luffy.costs.readings import Reading
from luffy.pipeline.machine.gpus import detected_gpus
from luffy.pipeline.machine.memory import GpuMemory
from luffy.pipeline.machine.resources import find_resources

_NO_ESTIMATE = "there is no estimate without GPUs under cluster: ray"


def show_reading(reading: Reading, config: ExperimentConfig) -> None:
    """The speeds of one stage."""
    if reading.same_as:
        say(f"{reading.node}: as {reading.same_as}")
        return
    say(f"{reading.node} ({reading.measured})")
    if reading.response_words:
        say(f"  responses           {reading.response_words}")
    for title, value in (
        ("generated tokens/s", reading.generated_tokens_per_s),
        ("trained tokens/s", reading.trained_tokens_per_s),
    ):
        if value is not None:
            say(f"  {title:<18}  {value:,.0f}")
    if reading.parts is not None and reading.step_s is not None:
        say(f"  a step              {reading.step_s:.2f} s: {_parts(reading)}")
    if reading.mfu is not None:
        say(f"  MFU of training     {reading.mfu:.1%} of {reading.peak}")
    if reading.memory_gib:
        say(f"  peak memory         {_memory(reading)}; {_estimate(reading, config)}")
    if (validation_s := reading.times.validation_s) is not None:
        say(f"  a validation        {validation_s:.1f} s")
    say(f"  start and end       {reading.times.fixed_s:.1f} s{_save(reading)}")


def show_forecast(forecasts: Sequence[StageForecast]) -> None:
    """The predicted time of each stage and their sum."""
    gpus = any(each.gpus for each in forecasts)
    rows = [[each.node, time_words(each), *([hours_words(each)] if gpus else []), each.source] for each in forecasts]
    known = [each for each in forecasts if each.seconds is not None]
    total = duration(sum(each.seconds or 0.0 for each in known))
    hours = [f"{sum(each.gpu_hours or 0.0 for each in known):.2f}"] if gpus else []
    missing = [each.node for each in forecasts if each.seconds is None]
    rows.append(["sum", total, *hours, f"without {', '.join(missing)}" if missing else ""])
    terminal().print(text_table(["stage", "time", *(["GPU-hours"] if gpus else []), "from"], rows))


def show_layout(layout: TrialLayout, outcome: Reading | str) -> None:
    """One layout that was tried."""
    if isinstance(outcome, str):
        say(f"  {layout.words}: {outcome}")
        return
    rates = [("generated", outcome.generated_tokens_per_s), ("trained", outcome.trained_tokens_per_s)]
    words = ", ".join(f"{value:,.0f} {title} tokens/s" for title, value in rates if value is not None)
    say(f"  {layout.words}: a step {outcome.step_s:.2f} s, {words}")


def _parts(reading: Reading) -> str:
    words = ", ".join(f"{part} {seconds:.2f}" for part, seconds in (reading.parts or {}).items())
    return f"{words} (generation of later steps goes on meanwhile)" if reading.overlaps else words


def _memory(reading: Reading) -> str:
    return ", ".join(f"{name} {gib:.2f} GiB" for name, gib in (reading.memory_gib or {}).items())


def _estimate(reading: Reading, config: ExperimentConfig) -> str:
    of_stage = "in SFT" if reading.node.startswith("sft") else ""
    estimates = find_resources(config).gpus if detected_gpus() and config.cluster == "ray" else ()
    found = [gpu for gpu in estimates if (of_stage in gpu.name if of_stage else "in SFT" not in gpu.name)]
    return f"estimated: {', '.join(map(_gpu_words, found))}" if found else _NO_ESTIMATE


def _gpu_words(gpu: GpuMemory) -> str:
    return f"{gpu.name} {gpu.total_gib:.1f} GiB"


def _save(reading: Reading) -> str:
    return f", a checkpoint {reading.times.save_s:.1f} s" if reading.times.save_s else ""
