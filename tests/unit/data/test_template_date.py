"""A chat template that writes today's date would give a resumed run other prompts: it writes a date that was chosen."""

from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.reward_models import reward_folder

from luffy.config.model import check_classifier
from luffy.data.templates import prompt_texts, with_date
from luffy.data.tokenizer import adapt_tokenizer, build_tokenizer
from luffy.errors import DataError
from luffy.types import Message

LLAMA = (
    "{% if not date is defined %}{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date = '26 Jul 2024' %}{% endif %}{% endif %}Today is {{ date }}: {{ messages[-1].content }}"
)
GRANITE = 'It is {{ strftime_now( "%B %d, %Y" ) }}. {{ messages[-1].content }}'


@pytest.fixture
def model(tmp_path) -> Path:
    build_tokenizer(["abc"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(LLAMA, "Today is 05 Nov 2026: abc"), (GRANITE, "It is November 05, 2026. abc")],
)
def test_the_chosen_day_is_written_whenever_the_prompt_is_made(model, template, prompt):
    (model / "chat_template.jinja").write_text(template)
    with refused("model.template_date", "today", error=DataError):
        adapt_tokenizer(str(model), None)
    tokenizer = adapt_tokenizer(str(model), None, template_date="2026-11-05")
    assert prompt_texts(tokenizer, [[Message("user", "abc")]]) == [prompt]
    assert "strftime" not in tokenizer.chat_template


@pytest.mark.parametrize(("day", "named"), [("2026-02-30", "2026-02-30"), ("2026-02-01", "computed format")])
def test_a_day_that_is_none_and_a_format_that_is_computed_are_refused(day, named):
    with refused(named, error=DataError):
        with_date("{{ strftime_now(form) }}", day, "")


def test_a_reward_model_whose_template_is_dated_is_refused(tmp_path):
    folder = reward_folder(tmp_path / "reward")
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y') }}" + template.read_text())
    with refused("grading.path", str(template), error=DataError):
        check_classifier(folder, "grading.path")
