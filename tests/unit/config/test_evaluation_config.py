"""What `evaluation` may say, what it comes to for a suite, and how a mistake is named."""

import json
from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.evaluation import TEMPLATES, EvaluationConfig
from luffy.config.grading import ChoiceGrader
from luffy.data.prompt_templates import PROMPT_TEMPLATES
from luffy.errors import ConfigError

ROOT = Path(__file__).parents[3]


def evaluation(text: str, tmp_path: Path) -> EvaluationConfig:
    (tmp_path / "it.yaml").write_text(f"extends: {ROOT}/exp_configs/smoke.yaml\nevaluation: {text}")
    config = load_experiment(tmp_path / "it.yaml", []).evaluation
    assert config is not None
    return config


def test_a_suite_says_what_it_does_otherwise(tmp_path: Path) -> None:
    config = evaluation(
        "{template: qwen_math, stop: [Q], "
        "decodings: {greedy: {temperature: 0.0}, hot: {temperature: 0.6, top_p: 0.95}}, "
        "suites: {longer: {num_samples: 32, grader: choice}, retention: {template: none, stop: []}}}",
        tmp_path,
    )
    longer, retention, other = (config.protocol(name, "hot") for name in ("longer", "retention", "other_mix"))
    assert (longer.num_samples, longer.grader, longer.template, longer.stop) == (
        32,
        ChoiceGrader(),
        "qwen_math",
        ("Q",),
    )
    assert (retention.num_samples, retention.template, retention.stop) == (1, "none", ())
    assert (other.temperature, other.top_p, other.grader, other.template) == (0.6, 0.95, None, "qwen_math")
    assert config.own_graders == (ChoiceGrader(),)
    assert (config.template_of("retention"), config.template_of("longer")) == ("none", "qwen_math")
    assert EvaluationConfig.model_validate_json(config.model_dump_json()) == config


def test_greedy_decoding_has_one_response_whatever_the_suite_says(tmp_path: Path) -> None:
    config = evaluation("{suites: {longer: {num_samples: 32}}}", tmp_path)
    assert config.protocol("longer", "greedy").num_samples == 1
    assert config.protocol("longer", "sampled").num_samples == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{decodings: {hot: {temperature: 1.0, num_samples: 0}}}", r"decodings\.hot\.num_samples: .* greater than 0"),
        ("{suites: {longer: {num_samples: 0}}}", r"suites\.longer\.num_samples: .*greater than 0, found 0"),
        ("{suites: {longr: {num_samples: 2}}}", "no suite is called longr; did you mean 'longer'"),
        ("{suites: {longer: {}}}", "is empty"),
        ("{suites: {longer: {stop: ['']}}}", "stop"),
        ("{template: qwen_mth}", "evaluation.template"),
        ("{decodings: {greedy: {temperature: 0.0, top_p: 0.9}}}", "top_p 0.9 has no effect on greedy"),
        ("{decodings: {greedy: {temperature: 0.0, num_samples: 4}}}", "same response each time"),
        ("{decodings: {hot: {temperature: 1.0, top_p: 0.0}}}", "top_p"),
        ("{graders: {longer: choice}}", "graders: unknown key"),
    ],
)
def test_mistakes_are_named_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        evaluation(text, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_number_of_samples_that_nothing_draws_is_refused() -> None:
    settings = {"decodings": {"greedy": {"temperature": 0.0}}, "suites": {"aime24": {"num_samples": 32}}}
    with pytest.raises(ValueError, match=r"suites\.aime24\.num_samples has no effect: every decoding is greedy"):
        EvaluationConfig.model_validate(settings | {"max_response_tokens": 8})


QUESTION = "Question: {question}\nLet us think.\nAnswer:"


def test_a_template_of_the_users_own_is_its_text_wherever_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(f"{QUESTION}\n")
    in_file = evaluation(f"{{template: {tmp_path}/mine.txt}}", tmp_path)
    written = evaluation(f"{{template: {json.dumps(QUESTION)}}}", tmp_path)
    by_suite = evaluation(f"{{suites: {{longer: {{template: {tmp_path}/mine.txt}}}}}}", tmp_path)
    assert in_file == written
    assert in_file.template == by_suite.template_of("longer") == QUESTION
    assert by_suite.template_of("retention") == "own"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("missing.txt", r"it\.yaml:2: evaluation\.template: .*missing\.txt: no such file; relative paths start at"),
        ("none.txt", r"none\.txt: must have \{question\} once, where the question goes; it has it 0 times"),
        ("bytes.txt", r"bytes\.txt: cannot be read \(it is not UTF-8 text\)"),
        ("qwen_maths", r"evaluation\.template: must be one of own, qwen_math, .*found 'qwen_maths'"),
        ("'{question} {question}'", r"a text with \{question\} once"),
    ],
)
def test_an_unusable_template_is_one_line(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "none.txt").write_text("Answer: {problem}")
    (tmp_path / "bytes.txt").write_bytes(b"\xff{question}")
    with pytest.raises(ConfigError, match=message) as raised:
        evaluation(f"{{template: {tmp_path / template if template.endswith('.txt') else template}}}", tmp_path)
    assert "\n" not in str(raised.value)


def test_shipped_templates_are_those_with_a_text() -> None:
    assert set(TEMPLATES) == {"own", *PROMPT_TEMPLATES}
