"""Everything that luffy shows on a terminal, and the only module that imports `rich`; the state of a running chain."""

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from luffy.errors import LuffyError, StageFailed, first_line
from luffy.pipeline.events import Event
from luffy.pipeline.experiment import StageObserver
from luffy.pipeline.manifest import Manifest
from luffy.pipeline.memory import GpuMemory
from luffy.pipeline.plan import StagePlan
from luffy.report.cells import Table as PageTable
from luffy.report.cells import duration

StageState = Literal[
    "pending", "starting", "waiting", "running", "finished", "reused", "pulled", "failed", "interrupted"
]
_METRICS = {"loss": "loss {:.4f}", "reward": "reward {:.3f}", "tokens_per_s": "{:.0f} tokens/s"}
_STYLES: dict[StageState, str] = {
    "pending": "dim", "starting": "cyan", "waiting": "yellow", "running": "cyan", "finished": "green",
    "reused": "green", "pulled": "green", "failed": "bold red", "interrupted": "yellow",
}  # fmt: skip
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *(code for code in range(0x20) if chr(code) not in "\n\t"),
        *range(0x7F, 0xA0),
        *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    )
}
"""C0 and C1 controls, and the characters that change the direction of writing."""
_BAR_CELLS = 16
_GAP = 2
"""Spaces between columns."""
_FILE_WIDTH = 240
_PLAIN_INTERVAL_S = 10.0


class _VisibleControls:
    """Shows control characters of a text (escape codes, links, reversed writing) instead of carrying them out.

    Text of models and of data reaches terminals, and could move the cursor, write over earlier lines or the clipboard,
    and show a file name or a link as another. The colours of luffy's own styles are no part of the text.
    """

    def __init__(self, content: ConsoleRenderable) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(visible_controls(segment.text), segment.style)


class _ControlsHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [each if isinstance(each, Control) else _VisibleControls(each) for each in renderables]


def visible_controls(text: str) -> str:
    """`text` with control characters, except line feeds and tabs, and bidirectional ones as escapes (`\\x1b`)."""
    return text.translate(_CONTROLS)


def terminal(*, errors: bool = False) -> Console:
    """A console on stdout (or stderr), without automatic colouring of numbers; controls in a text are shown.

    Tables that go to a file or a pipe are not wrapped.
    """
    console = Console(highlight=False, stderr=errors, soft_wrap=errors)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.push_render_hook(_ControlsHook())
    return console


def show_table(table: PageTable, title: str, *, apart: bool = True) -> None:
    """Print a table of a page under `title`, `apart` from what was printed before.

    Where the terminal is too narrow, the details of a cell, such as an interval, are below its text.
    """
    texts, heading = table.texts, f"\n{title}" if apart else title
    widest = (max(map(len, column)) + _GAP for column in zip(table.header, *texts, strict=True))
    if sum(widest) > terminal().width:
        texts = [[cell.lines for cell in row] for row in table.rows]
    show_rows(table.header, texts, heading)


def show_rows(header: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a plain table of texts."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    terminal().print(table)


def say(text: str) -> None:
    """Print a line (or more) on stdout without markup or wrapping."""
    terminal().print(text, markup=False, soft_wrap=True)


def show_error(message: str) -> None:
    """One line (or what the message holds) on stderr."""
    terminal(errors=True).print(Text.assemble(("error: ", "bold red"), message))


@dataclass(slots=True)
class StageLine:
    """One stage of the display."""

    name: str
    state: StageState = "pending"
    note: str = ""
    news: str = ""
    """The last message, until the next progress: what a running stage waits for, say."""
    step: int = 0
    total: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    began: float | None = None
    ended: float | None = None
    told: float = 0.0
    """When a line about it was last printed."""
    _first_step: int = 0
    _first_time: float | None = None
    _last_time: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time left at the pace of this attempt; None while there is no pace."""
        done = self.step - self._first_step
        if self._first_time is None or done <= 0 or not self.total:
            return None
        return (self._last_time - self._first_time) / done * (self.total - self.step)

    def seconds(self, now: float) -> float | None:
        """Time spent on the stage so far; None before it starts."""
        return None if self.began is None else (self.ended or now) - self.began

    def take(self, event: Event) -> None:
        """Update from an event of the stage program."""
        match event.kind:
            case "started":
                self.state, self.note = "running", event.text
            case "waiting":
                self.state, self.note = "waiting", f"waiting for {event.text}"
            case "message":
                self.note = self.news = event.text
            case "progress":
                if self._first_time is None:
                    self._first_step, self._first_time = event.step, event.time
                self.news = ""
                self.step, self.total, self._last_time = event.step, event.total, event.time
                self.metrics |= {name: event.metrics[name] for name in _METRICS if name in event.metrics}


class ChainProgress(StageObserver):
    """The lines of all stages, and where there is a `log` what is new as it comes.

    The log gets a line when a stage starts, ends or has news, and every ten seconds in between.
    """

    def __init__(self, names: Iterable[str], log: Console | None = None) -> None:
        self.lines = {name: StageLine(name) for name in names}
        self._log = log
        self._title = ""

    def titled(self, title: str) -> "ChainProgress":
        """The display for the run `title` of several, whose stages are called `<title>: <stage>`."""
        of_run = copy.copy(self)
        of_run._title = title
        return of_run

    def planned(self, plan: StagePlan) -> None:
        line = self._line(plan)
        line.began = time.time()
        line.state = "starting"
        line.note = f"{plan.headline}: {plan.reason}" if plan.reason else plan.headline
        if plan.action != "reuse":
            self._tell(line, line.note)

    def event(self, plan: StagePlan, event: Event) -> None:
        line = self._line(plan)
        line.take(event)
        if event.kind in ("waiting", "message"):
            self._tell(line, line.note)
        elif event.kind == "progress" and event.time - line.told >= _PLAIN_INTERVAL_S:
            self._tell(line, progress_words(line))

    def finished(self, plan: StagePlan, manifest: Manifest) -> None:
        line = self._line(plan)
        line.ended = time.time()
        states: dict[str, StageState] = {"reuse": "reused", "pull": "pulled"}
        line.state, line.note = states.get(plan.action, "finished"), plan.identity.key
        took = "" if line.state == "reused" else f" in {duration(line.seconds(line.ended) or 0.0)}"
        self._tell(line, " ".join(filter(None, [f"{line.state}{took}", _metric_words(line), f"({line.note})"])))

    def failed(self, plan: StagePlan, error: BaseException) -> None:
        line = self._line(plan)
        line.ended = time.time()
        interrupted = isinstance(error, StageFailed) and error.is_interruption
        line.state = "failed" if isinstance(error, Exception) and not interrupted else "interrupted"
        line.note = plan.identity.key
        self._tell(line, line.state)

    def run_failed(self, title: str, error: LuffyError) -> None:
        """One of several runs has failed, perhaps by a stage that another has made; an interrupt is none."""
        if not (isinstance(error, StageFailed) and error.is_interruption):
            self._print(f"{title}: failed: {first_line(error)}")

    def _line(self, plan: StagePlan) -> StageLine:
        return self.lines[f"{self._title}: {plan.node.name}" if self._title else plan.node.name]

    def _tell(self, line: StageLine, text: str) -> None:
        line.told = time.time()
        self._print(f"{line.name}: {text}")

    def _print(self, text: str) -> None:
        if self._log is not None:
            self._log.print(Text(f"{time.strftime('%H:%M:%S')} {text}"), soft_wrap=True)


@contextmanager
def stage_display(names: list[str], console: Console | None = None) -> Iterator[StageObserver]:
    """Shows a running chain: one live line per stage on a terminal, plain lines elsewhere."""
    console = console or terminal()
    if not console.is_terminal:
        yield ChainProgress(names, console)
        return
    progress = ChainProgress(names)
    with Live(console=console, get_renderable=lambda: _VisibleControls(live_table(progress)), refresh_per_second=4):
        yield progress


def live_table(progress: ChainProgress) -> Table:
    """The current lines of all stages, a row each."""
    table = Table.grid(padding=(0, 2))
    for line in progress.lines.values():
        style = _STYLES[line.state]
        elapsed = line.seconds(time.time())
        left = line.seconds_left if line.state == "running" else None
        bar = Text("")
        if line.total:
            full = round(_BAR_CELLS * line.step / line.total)
            bar = Text("━" * full, style="cyan") + Text("━" * (_BAR_CELLS - full), style="grey30")
            bar += Text(f" {line.step}/{line.total}")
        table.add_row(
            Text(line.name, style=style),
            Text(line.state, style=style),
            bar,
            _metric_words(line),
            Text(duration(elapsed) if elapsed is not None and line.state != "reused" else "", style="dim"),
            f"{duration(left)} left" if left is not None else "",
            Text(line.news if line.state == "running" else line.note, style="dim", overflow="ellipsis", no_wrap=True),
        )
    return table


def plan_table(plans: Sequence[StagePlan], took_s: Mapping[str, float], gpus: Mapping[str, int] | None = None) -> Table:
    """The plan of each stage: action, reason, and the seconds in `took_s`, by node.

    With `gpus` also the number of GPUs that each stage takes, by node.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    counted, timed = ["GPUs"] if gpus is not None else [], ["took"] if took_s else []
    for column in ("stage", "key", *counted, "plan", *timed, "why"):
        table.add_column(column, overflow="fold", no_wrap=column not in ("plan", "why"))
    for plan in plans:
        style = "green" if plan.action in ("reuse", "pull", "adopt") else "cyan"
        name, headline = plan.node.name, Text(plan.headline, style=style)
        taken = [str(gpus[name] or "-")] if gpus is not None else []
        took = [duration(took_s[name]) if name in took_s else ""] if timed else []
        table.add_row(name, plan.identity.key, *taken, headline, *took, Text(plan.reason))
    return table


def memory_table(gpu: GpuMemory) -> Table:
    """The estimated memory of a GPU of one kind by component, and its size."""
    title = f"{gpu.name} (x {gpu.count}), estimate in GiB"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for part in gpu.components:
        table.add_row(Text(part.name), "<0.1" if 0 < part.gib < 0.05 else f"{part.gib:.1f}", Text(part.formula))
    limit = "" if gpu.limit_gib is None else f"of {gpu.limit_gib:.1f}" + ("" if gpu.fits else ": does not fit")
    table.add_row("total", f"{gpu.total_gib:.1f}", limit, style="bold" if gpu.fits else "bold red")
    return table


def shown_of(count: int, limit: int) -> str:
    """How many there are, or how many of them are shown: `7`, `20 of 31`."""
    return str(count) if count <= limit else f"{limit} of {count}"


def progress_words(line: StageLine) -> str:
    """`step 40/100, reward 0.512  5389 tokens/s, 3m20s left`."""
    left = "" if line.seconds_left is None else f"{duration(line.seconds_left)} left"
    return ", ".join(filter(None, (f"step {line.step}/{line.total}", _metric_words(line), left)))


def _metric_words(line: StageLine) -> str:
    return "  ".join(words.format(line.metrics[name]) for name, words in _METRICS.items() if name in line.metrics)
