"""Text of models and data on a terminal and in Markdown: shown, never carried out."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from luffy.cli import console
from luffy.cli.console import say, show_error, show_rows, visible_controls
from luffy.markdown_text import code_span, markdown_cell

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
    console.terminal().print(text, markup=False)
    said = "".join(capsys.readouterr())
    assert not [c for c in said if c not in "\n\t" and (not c.isprintable())], ascii(said)


def test_colours_of_luffy_itself_stay_on_a_terminal(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    screen.push_render_hook(console._ControlsHook())
    screen.print(Text("x\x1b[5mx", style="bold"))
    assert "\x1b[1m" in screen.file.getvalue() and "x\\x1b[5mx" in screen.file.getvalue()


def test_lines_and_other_alphabets_are_left_alone():
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


def test_inline_code_is_closed_by_no_backtick_in_it():
    assert code_span("42") == "`42`"
    assert code_span("` ![x](y) ``\n#") == "``` ` ![x](y) `` # ```"
