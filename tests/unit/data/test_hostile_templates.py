"""Chat templates from strangers run in Jinja's sandbox: no attribute leads out of it, and no range is endless."""

from pathlib import Path

import pytest
from jinja2.exceptions import SecurityError

from luffy.data.templates import PLAIN_TEMPLATE, prompt_texts
from luffy.data.tokenizer import adapt_tokenizer, build_tokenizer
from luffy.errors import DataError
from luffy.types import Message

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
    "{{ lipsum.__globals__['os'].popen('touch owned').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__globals__.os }}",
    "{% set x = messages.append(1) %}",
    "{% for i in range(10 ** 9) %}a{% endfor %}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ 'a' + 1 }}",
    "{{ 1 // 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_that_leaves_the_sandbox_or_fails_is_one_line(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer(["0123456789"])
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="the chat template cannot write a conversation") as caught:
        prompt_texts(tokenizer, [[Message("user", "1")]])
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    assert not isinstance(caught.value, SecurityError)


def test_several_named_templates_without_a_default_are_one_line() -> None:
    tokenizer = build_tokenizer(["0123456789"])
    tokenizer.chat_template = {"tool_use": PLAIN_TEMPLATE, "rag": PLAIN_TEMPLATE}
    with pytest.raises(DataError, match=r"cannot write a conversation \(.*no default .*give another one"):
        prompt_texts(tokenizer, [[Message("user", "1")]])


def test_a_template_that_leaves_out_the_question_is_refused(tmp_path: Path) -> None:
    """As one for images does, which goes through the parts of a content: the letters of a text have none."""
    build_tokenizer(["0123456789"]).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for part in messages[0].content %}{{ part.text }}{% endfor %}")
    with pytest.raises(DataError, match=r"leaves out the user's message .*; give model\.chat_template"):
        adapt_tokenizer(str(tmp_path), None)
    assert adapt_tokenizer(str(tmp_path), "none").chat_template


def test_text_of_a_message_is_no_template() -> None:
    tokenizer = build_tokenizer(["0123456789"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prompt_texts(tokenizer, [[Message("user", "{{ 7 * 6 }}{% raw %}")]]) == ["{{ 7 * 6 }}{% raw %}"]
