"""Plans and live lines on a terminal; what models and data say is shown there, never carried out."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from luffy.cli import console as module
from luffy.cli.console import (
    ChainProgress,
    StageLine,
    live_table,
    plan_table,
    say,
    show_error,
    show_rows,
    stage_display,
    visible_controls,
)
from luffy.config import load_experiment
from luffy.errors import EXIT_INTERRUPTED, DataError, StageFailed
from luffy.markdown_text import markdown_cell
from luffy.pipeline.events import Event
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace


@pytest.fixture
def plans(tmp_path):
    return open_experiment(load_experiment("smoke"), Workspace(tmp_path), code=lambda kind, rooms: {}).plan()


def lines_of(renderable):
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("took_s", "gpus", "rl"),
    [
        ({}, None, "run first run"),
        ({"rl": 90.0}, None, "run 1m30s first run"),
        ({"rl": 90.0}, 8, "8 run 1m30s first run"),
    ],
)
def test_a_plan_says_what_and_why_on_how_many_gpus_and_how_long_it_took(plans, took_s, gpus, rl):
    counts = gpus and {plan.node.name: gpus * (plan.node.name == "rl") for plan in plans}
    _, *lines = lines_of(plan_table(plans, took_s, counts))
    assert len(lines) == len(plans)
    assert lines[0] == f"prepare_data {plans[0].identity.key} {'- ' if gpus else ''}run first run"
    assert lines[3] == f"rl {plans[3].identity.key} {rl}"


def progress(step, time, **metrics):
    return Event("progress", time, 1, step=step, total=100, metrics=metrics)


def test_live_table_has_one_line_a_stage_with_its_numbers_and_what_it_waits_for(plans):
    chain = ChainProgress([plan.node.name for plan in plans])
    chain.planned(plans[3])
    for event, shown in (
        (Event("waiting", 0.0, 1, text="pid 17 on host"), "waiting for pid 17 on host"),
        (Event("started", 0.0, 1), "running"),
        (progress(1, 0.0, loss=0.5, reward=0.25, tokens_per_s=1234.0), "1/100"),
        (progress(2, 1.0, loss=0.5), "rl, running, 2/100, loss 0.5000, reward 0.250, 1234 tokens/s, 1m38s left"),
        (Event("message", 2.0, 1, text="asking again in 300 s"), "asking again in 300 s"),
    ):
        chain.event(plans[3], event)
        lines = lines_of(live_table(chain))
        assert len(lines) == len(plans) and not [part for part in shown.split(", ") if part not in lines[3]]
    assert "pid 17" not in lines[3]


def test_without_a_terminal_a_stage_gives_few_plain_lines(plans):
    console = Console(file=io.StringIO(), width=80)
    with stage_display(["prepare_data"], console) as display:
        display.planned(plans[0])
        for step in range(1, 50):
            display.event(plans[0], progress(step, 4e9 + step))
        display.event(plans[0], Event("waiting", 0.0, 1, text="pid 17 on host"))
        display.failed(plans[0], KeyboardInterrupt())
        display.run_failed("sft 1", StageFailed("interrupted", exit_code=EXIT_INTERRUPTED))
        display.run_failed("sft 2", DataError("sft.num_traces is 9999\nmore"))
    lines = [line.split(" ", 1)[1] for line in console.file.getvalue().splitlines()]
    assert lines[0] == "prepare_data: run: first run"
    assert lines[-3:] == [
        "prepare_data: waiting for pid 17 on host",
        "prepare_data: interrupted",
        "sft 2: failed: sft.num_traces is 9999",
    ]
    assert "\x1b" not in console.file.getvalue()


def test_time_left_follows_the_pace_of_this_attempt_and_a_message_is_news_until_the_next_progress():
    line = StageLine("rl")
    line.take(progress(41, 10.0, loss=2.0, reward=0.5, entropy=9.0))
    assert line.seconds_left is None
    line.take(Event("message", 10.5, 1, text="http://host: slow down; asking again in 300 s"))
    assert line.news == line.note != ""
    line.take(progress(51, 30.0, loss=1.0))
    assert line.seconds_left == pytest.approx(2.0 * 49)
    assert (line.metrics, line.news) == ({"loss": 1.0, "reward": 0.5}, "")


HOSTILE = {
    "clear": "\x1b[2J\x1b[H",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "c1": "\x9b31m\x9d0;title\x9c",
    "bidi": "user\u202egnp.exe\u2066x\u2069",
    "overwrite": "all is well\rall is lost\x08\x08",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_controls_in_a_text_are_not_carried_out(text, capsys):
    say(text)
    show_error(text)
    show_rows(["answer"], [[text]], title=text)
    module.terminal().print(text, markup=False)
    said = "".join(capsys.readouterr())
    assert not [c for c in said if c not in "\n\t" and (not c.isprintable())], ascii(said)


def test_colours_of_luffy_itself_stay_on_a_terminal_as_do_lines_and_other_alphabets():
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    screen.push_render_hook(module._ControlsHook())
    screen.print(Text("x\x1b[5mx", style="bold"))
    assert "\x1b[1m" in screen.file.getvalue() and "x\\x1b[5mx" in screen.file.getvalue()
    assert visible_controls("a\tb\n數學 λ 😀 é") == "a\tb\n數學 λ 😀 é"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![x](http://evil.example/?a)", r"![x]\(http\://evil.example/?a)"),
        ("<img src=x onerror=alert(1)>", r"\<img src=x onerror=alert(1)>"),
        ("a | b\n# c", r"a \| b # c"),
        (r"\[x](javascript:1)", r"\\[x]\(javascript:1)"),
        ("see www.evil.example", r"see www\.evil.example"),
        ("[x][y] [y]: z", r"[x]\[y] [y]\: z"),
        ("46.7 [24.9, 71.3]", "46.7 [24.9, 71.3]"),
        ("in_distribution, 3 * 4", "in_distribution, 3 * 4"),
    ],
)
def test_text_in_a_cell_begins_no_link_image_or_html(text, shown):
    assert markdown_cell(text) == shown
