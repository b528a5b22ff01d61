"""Mixtures of sources: what their prompts know, and what a run takes of them."""

from collections import Counter
from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.data import MixtureSource
from luffy.config.experiment import ExperimentConfig
from luffy.config.settings import PrepareDataSettings
from luffy.data.sources import mixed_in
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph
from luffy.pipeline.outside import outside_files
from tests.synthetic.loaded_source import load_source

SMOKE = Path(__file__).resolve().parents[3] / "exp_configs/smoke.yaml"
STORIES = "{kind: word_problems, num_prompts: 5, num_events: [2]}"
SUMS = "{kind: arithmetic, num_prompts: 7, num_operations: [2]}"
PARTS = f"{{sums: {{weight: 3, source: {SUMS}}}, stories: {{source: {STORIES}}}}}"


def _load(parts: str = PARTS, *overrides: str) -> ExperimentConfig:
    return load_experiment(
        SMOKE, ["chain=rl", "method=luffy", f"data.train={{kind: mixture, parts: {parts}}}", *overrides]
    )


def test_every_prompt_keeps_its_data_source_and_knows_its_part() -> None:
    source = _load().data.train
    assert isinstance(source, MixtureSource)
    loaded = load_source(source, "train", seed=1)
    assert (loaded.kind, len(loaded.prompts)) == ("mixture", 12)
    marks = [mixed_in(prompt.extra_info) for prompt in loaded.prompts]
    assert Counter(mark.part for mark in marks if mark) == {"sums": 7, "stories": 5}
    assert {tuple(mark.weights.items()) for mark in marks if mark} == {(("sums", 3.0), ("stories", 1.0))}
    assert len({prompt.data_source for prompt in loaded.prompts}) == 2
    alone = load_source(source.parts["stories"].source, "train", seed=1)
    assert [prompt.data_source for prompt in alone.prompts] == [prompt.data_source for prompt in loaded.prompts[7:]]
    assert mixed_in(alone.prompts[0].extra_info) is None
    assert mixed_in({"mixture": {"name": "a user's own key"}}) is None


def test_a_part_may_be_a_recipe() -> None:
    parts = PARTS.replace(STORIES, "{kind: recipe, name: gsm8k}")
    source = _load(parts).data.train
    assert source.parts["stories"].source.kind == "hub"
    assert source.parts["stories"].weight == 1.0


def test_a_changed_part_is_a_changed_input() -> None:
    digests = {
        str(load_source(_load(parts).data.train, "train", seed=1).inputs)  # type: ignore[arg-type]
        for parts in (PARTS, PARTS.replace("num_prompts: 5", "num_prompts: 6"))
    }
    assert len(digests) == 2


def test_files_of_a_part_are_among_the_files_of_the_stage(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    graph = build_graph(_load(PARTS.replace(STORIES, f"{{kind: file, path: {file}}}")))
    (settings,) = (node.settings for node in graph if isinstance(node.settings, PrepareDataSettings))
    assert any(name.startswith(f"{file.name} (") for name in outside_files(settings))


@pytest.mark.parametrize(
    ("parts", "override", "says"),
    [
        (PARTS, "rl.sampling={kind: pools}", "use one of them"),
        (f"{{sums: {{source: {SUMS}}}}}", "seed=1", "data.train.parts"),
        (PARTS.replace("weight: 3", "weight: 0"), "seed=1", "data.train.parts.sums.weight"),
        (PARTS.replace("word_problems", "word_problem"), "seed=1", "did you mean 'word_problems'?"),
        (
            PARTS.replace(STORIES, "{kind: verifiers, environment: games, python: x, equal_prompts: true}"),
            "seed=1",
            "in a mixture equal prompts count as repeats",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(parts: str, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(parts, override)
    assert says in str(caught.value)
