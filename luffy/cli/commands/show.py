"""`python -m luffy show RUN`: one run, from its configuration and the raw data to metrics, plots and samples."""

import argparse
from pathlib import Path

from luffy.cli import run_view
from luffy.cli.console import say, text_table, wide_terminal
from luffy.cli.plots import terminal_plots, write_pictures
from luffy.cli.results import by_suite
from luffy.cli.sample_view import RewardRange, read_range, samples_of
from luffy.cli.settings_view import settings_of
from luffy.errors import EXIT_OK, ConfigError
from luffy.pipeline.records import RunRecord, find_run, read_run
from luffy.pipeline.workspace import find_workspace

HELP = "one run: configuration, stages, lineage, metrics, plots, samples"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's name or directory, or an experiment's name for its newest run")
    parser.add_argument("--all", action="store_true", help="also the fields at their defaults, and every metric")
    parser.add_argument("--plots", action="store_true", help="the curves of training")
    parser.add_argument("--svg", metavar="FOLDER", help="write them as SVG files, with all panels of the report")
    parser.add_argument("--samples", type=int, metavar="N", help="N samples with their grades")
    parser.add_argument("--stage", help="whose samples; default: rl, else the last evaluation")
    parser.add_argument("--reward", metavar="LOW..HIGH", help="only samples with this reward: 1, 0..0.5, 0.5..")
    parser.add_argument("--reward-min", type=float, metavar="X", help="only samples with at least this reward")
    parser.add_argument("--reward-max", type=float, metavar="X", help="only samples with at most this reward")


def run(options: argparse.Namespace) -> int:
    wanted = _reward(options)
    record = find_run(find_workspace(options.workspace), options.run)
    if options.samples is not None:
        return _show_samples(record, options.stage, wanted, options.samples)
    _show_head(record)
    _show_settings(record, everything=options.all)
    _show_stages(record)
    _show_results(record, everything=options.all)
    if options.plots:
        for picture in terminal_plots(record):
            say(f"\n{picture}")
    if options.svg:
        for file in write_pictures(record, Path(options.svg)):
            say(f"written to {file}")
    return EXIT_OK


def _show_head(record: RunRecord) -> None:
    where = f" by pid {record.pid} on {record.host}" if record.pid is not None else ""
    say(f"{record.name}: {record.condition}{where}, started {record.started or '?'}, updated {record.updated or '?'}")
    say(f"directory {record.directory}")
    for page in sorted(record.directory.glob("*.html")):
        say(f"page {page}")
    if record.arms:
        rows = [[arm, folder.name, read_run(folder).condition] for arm, folder in record.arms.items()]
        wide_terminal().print(text_table(["arm", "run", "state"], rows, title="\nArms"))


def _show_settings(record: RunRecord, *, everything: bool) -> None:
    config = record.configuration
    if config is None:
        say("\nits configuration is of another version, and its defaults are not known")
        return
    settings = settings_of(config)
    own = [setting for setting in settings if not setting.is_default]
    same = [setting for setting in settings if setting.is_default]
    rows = [[setting.path, setting.value, "" if setting.default is None else setting.default] for setting in own]
    wide_terminal().print(text_table(["field", "value", "default"], rows, title="\nConfiguration"))
    if everything:
        rows = [[setting.path, setting.value] for setting in same]
        wide_terminal().print(text_table(["field", "value"], rows, title="\nAt their defaults"))
    else:
        say(f"{len(same)} more fields are at their defaults (--all shows them)")


def _show_stages(record: RunRecord) -> None:
    console = wide_terminal()
    console.print(text_table(run_view.STAGE_HEADER, run_view.stage_rows(record), title="\nStages"))
    console.print(text_table(run_view.LINEAGE_HEADER, run_view.lineage_rows(record), title="\nLineage"))


def _show_results(record: RunRecord, *, everything: bool) -> None:
    console = wide_terminal()
    header, rows = run_view.last_metrics(record, everything=everything)
    if rows:
        console.print(text_table(header, rows, title="\nNewest metrics"))
    accuracies = run_view.accuracies(record)
    if accuracies:
        header, rows = by_suite(accuracies)
        console.print(text_table(header, rows, title="\nAccuracy in % with its interval"))


def _show_samples(record: RunRecord, stage: str | None, wanted: RewardRange, count: int) -> int:
    found = samples_of(record, stage, wanted, count)
    for sample in found:
        say(f"{sample.heading}\n  prompt:\n{_indented(sample.prompt)}\n  response:\n{_indented(sample.response)}\n")
    if len(found) < count:
        say(f"{len(found)} samples, there are no more with a reward in [{wanted.low:g}, {wanted.high:g}]")
    return EXIT_OK


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _reward(options: argparse.Namespace) -> RewardRange:
    low, high = options.reward_min, options.reward_max
    if options.samples is None and any(value is not None for value in (options.reward, low, high, options.stage)):
        raise ConfigError("--stage and --reward choose among samples: give --samples N, too")
    if options.samples is not None and options.samples < 1:
        raise ConfigError(f"--samples {options.samples}: must be at least 1")
    if options.reward is not None:
        if low is not None or high is not None:
            raise ConfigError("--reward and --reward-min or --reward-max: give one of them")
        return read_range(options.reward)
    return RewardRange(float("-inf") if low is None else low, float("inf") if high is None else high)
