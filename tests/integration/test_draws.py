"""What a real run draws and how long it learns from it: a mixture, pools, stop texts and several passes at once."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest
from test_methods import TWO_UPDATES, assert_same_result, experiment, run_killed, run_rl, run_stage, upstream_of

from luffy.data.parquet import read_prompts
from luffy.data.sources import mixed_in
from luffy.data.templates import decode, load_tokenizer
from luffy.pipeline.graph import build_graph
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import read_metrics
from luffy.types import FinishReason, Group, Source

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]
STOP = "}"
"""Every trace ends with it, and so does a right answer."""
MIXED = (
    "data.train={kind: mixture, parts: {"
    "one: {weight: 3, source: {kind: arithmetic, num_prompts: 12, num_operations: [1], operations: {reverse: 1}}}, "
    "two: {weight: 1, source: {kind: arithmetic, num_prompts: 20, num_operations: [2], operations: {reverse: 1}}}}}"
)
PASSES = (MIXED, f"rl.stop=['{STOP}']", "rl.passes=2")


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> dict[str, Path]:
    """Data and a base policy that is right now and then."""
    return upstream_of(experiment("luffy", MIXED), tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def passes(upstream, tmp_path_factory) -> Path:
    """An undisturbed run of PASSES."""
    out = tmp_path_factory.mktemp("passes")
    run_rl(experiment("luffy", *TWO_UPDATES, *PASSES), out, upstream)
    return out


def _assert_same_when_killed(
    undisturbed: Path, overrides: tuple[str, ...], update: int, upstream: Mapping[str, Path], out: Path
) -> None:
    """A run that is killed before optimizer step `update` and resumed equals the `undisturbed` one bit for bit."""
    run_killed(out, "luffy", upstream, *overrides, update=update)
    assert run_rl(experiment("luffy", *TWO_UPDATES, *overrides), out, upstream).resumed_from == 2
    assert_same_result(undisturbed, out)


def _groups(out: Path) -> list[list[Group]]:
    journal = RolloutJournal(out / "journal")
    return [journal.read(step) or [] for step in range(1, 6)]


def test_a_kill_between_two_passes_over_a_mixture_resumes_to_the_same_bits(passes, upstream, tmp_path):
    """Each of five steps makes four optimizer steps; the kill comes between the passes of the third."""
    _assert_same_when_killed(passes, PASSES, 11, upstream, tmp_path / "killed")
    metrics = read_metrics(passes / "metrics.jsonl")
    steps = _groups(passes)
    marks = {prompt.uid: mixed_in(prompt.extra_info) for prompt in read_prompts(upstream["data"] / "train.parquet")}
    part_of = {uid: mark for uid, mark in marks.items() if mark is not None}
    assert len(part_of) == len(marks)
    for row, groups in zip(metrics, steps, strict=True):
        assert row["batch/optimizer_steps"] == 4
        tokens = sum(found.num_learnable for group in groups for found in group.trajectories)
        assert row["batch/response_tokens"] == 2 * tokens
        parts = Counter(part_of[group.uid].part for group in groups)
        assert parts == {"one": 3, "two": 1}, "three quarters of four prompts"
        assert row["batch/source_one_share"] == 0.75
        rollouts = [found for group in groups for found in group.rollouts if part_of[group.uid].part == "two"]
        assert row["reward/source_two_mean"] == fmean(found.reward for found in rollouts)
        assert row["rollout/source_two_length_mean"] == fmean(found.num_learnable for found in rollouts)


def test_rollouts_end_with_the_stop_text(passes, upstream):
    tokenizer = load_tokenizer(upstream["model"] / "model")
    rows = [row for groups in _groups(passes) for group in groups for row in group.trajectories]
    rollouts = [row for row in rows if not row.is_off_policy]
    texts = [decode(tokenizer, row.response_ids) for row in rollouts]
    ended = [text for text, row in zip(texts, rollouts, strict=True) if STOP in text]
    assert ended and all(text.index(STOP) == len(text) - len(STOP) for text in ended)
    stop_token = tokenizer.eos_token_id
    for text, row in zip(texts, rollouts, strict=True):
        assert (row.finish_reason is FinishReason.STOP) == (STOP in text or row.response_ids[-1] == stop_token)
        assert not (STOP in text and stop_token in row.response_ids), "nothing is sampled after it"
    traces = [row for row in rows if Source.OFF_POLICY in row.source]
    assert traces and all(row.response_ids[-1] == stop_token for row in traces)


def test_a_kill_resumes_pools_to_the_same_bits(upstream, tmp_path):
    """The pools that step 4 draws from are those of the checkpoint and of a step that lies in the journal alone."""
    config = "data.train={kind: arithmetic, num_prompts: 32, num_operations: [1, 2], operations: {reverse: 1}}"
    data = build_graph(experiment("luffy", config))[0]
    run_stage(data, experiment("luffy", config), tmp_path / "data", {})
    inputs = {"data": tmp_path / "data", "model": upstream["model"]}
    sampling = "rl.sampling={kind: pools, hard_at_most: 0.0, easy_above: 0.6}"
    undisturbed = tmp_path / "undisturbed"
    run_rl(experiment("luffy", *TWO_UPDATES, config, sampling), undisturbed, inputs)
    _assert_same_when_killed(undisturbed, (config, sampling), 8, inputs, tmp_path / "killed")
    rows = read_metrics(undisturbed / "metrics.jsonl")
    assert rows[0]["batch/pool_new_share"] == 1.0
    assert all(0 < row["batch/pool_new_share"] < 1 for row in rows[1:])
    known = {uid for groups in _groups(undisturbed)[:-1] for uid in (group.uid for group in groups)}
    assert rows[-1]["batch/pool_new_size"] == len(read_prompts(tmp_path / "data/train.parquet")) - len(known)
