"""Chat templates from strangers run in Jinja's sandbox: no attribute leads out of it, and no range is endless."""

from pathlib import Path

import pytest
from jinja2.exceptions import SecurityError

from luffy.data.templates import prompt_texts
from luffy.data.tokenizer import build_tokenizer
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
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_that_leaves_the_sandbox_is_one_line(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer(["0123456789"])
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="the chat template cannot write a conversation") as caught:
        prompt_texts(tokenizer, [[Message("user", "1")]])
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    assert not isinstance(caught.value, SecurityError)


def test_text_of_a_message_is_no_template() -> None:
    tokenizer = build_tokenizer(["0123456789"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prompt_texts(tokenizer, [[Message("user", "{{ 7 * 6 }}{% raw %}")]]) == ["{{ 7 * 6 }}{% raw %}"]
