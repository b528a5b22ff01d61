"""What `grading` and `evaluation.suites` may say, and how a mistake is named."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.grading import AnyGrader, ChoiceGrader, GradingConfig, MathGrader, StrictMathGrader, WeightedGrader
from luffy.errors import ConfigError

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


def load(tmp_path: Path, text: str) -> GradingConfig:
    file = tmp_path / "own.yaml"
    file.write_text(f"extends: {SMOKE}\n{text}\n")
    return load_experiment(file).grading


def test_the_default_is_boxed_mathematics() -> None:
    assert load_experiment(SMOKE).grading == GradingConfig(kind=MathGrader(boxed="required"))


def test_a_kind_is_a_name_or_a_mapping(tmp_path: Path) -> None:
    assert load(tmp_path, "grading: {kind: math_strict}").kind == StrictMathGrader()
    assert load(tmp_path, "grading: {kind: {kind: math, boxed: preferred}}").kind == MathGrader(boxed="preferred")
    either = load(tmp_path, "grading: {kind: {kind: any, of: [math, {kind: choice}]}}").kind
    assert either == AnyGrader(of=(MathGrader(), ChoiceGrader()))


def test_kinds_nest_and_survive_their_own_json(tmp_path: Path) -> None:
    both = "{kind: both, of: [math, math_strict]}"
    parts = f"[{{weight: 1, grader: math}}, {{weight: 0.2, grader: {both}}}]"
    config = load(tmp_path, f"grading: {{kind: {{kind: weighted, parts: {parts}}}}}")
    assert isinstance(config.kind, WeightedGrader)
    assert [part.weight for part in config.kind.parts] == [1.0, 0.2]
    assert GradingConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grading: {kind: maths}", "grading.kind"),
        ("grading: {kind: {kind: math, boxd: preferred}}", "did you mean 'boxed'"),
        ("grading: {kind: {kind: any, of: [math]}}", "grading.kind.of"),
        ("grading: {kind: {kind: custom, function: nothing}}", "grading.kind.function"),
        ("grading: {kind: {kind: judge, url: 'localhost:8000', model: m}}", "grading.kind.url"),
        (
            "grading: {kind: {kind: judge, url: 'http://h/v1', model: m, correct: 'IS RIGHT'}}",
            "grading.kind.correct",
        ),
        (
            "grading: {kind: {kind: judge, url: 'http://h/v1', model: m, prompt: 'Well?'}}",
            r"\{reference\} and \{answer\}",
        ),
        ("grading: {named: {math: choice}}", "math already has a meaning"),
        ("grading: {named: {Mine: choice}}", "grading.named"),
        ("evaluation: {suites: {nowhere: {grader: choice}}}", "no suite is called nowhere"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_names_lead_to_graders() -> None:
    config = GradingConfig(named={"lenient": MathGrader(boxed="preferred")})
    assert config.grader(None) == MathGrader()
    assert config.grader("lenient") == MathGrader(boxed="preferred")
    assert config.grader("choice") == ChoiceGrader()
    with pytest.raises(KeyError):
        config.grader("nobody")
