"""Who teaches a row and which terms learn from it, each preset against the rule of its paper; what teachers are shown,
and scores from small HTTP servers that answer as vLLM does, or as mistaken ones do."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from reference.taught_presets import teacher_overrides
from support.refusals import refused
from synthetic.endpoint import TEXT, Endpoint, Reply, refusal
from synthetic.settings import rl_settings
from synthetic.trajectories import row_of
from synthetic.vllm_server import SCORING_PATHS, scoring

from luffy.config.execution import ServerConfig
from luffy.config.group import GroupConfig
from luffy.config.training import ModelTeacher, RLTeacher, SelfTeacher, TaughtRows
from luffy.data.templates import render_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import ClusterError, ConfigError, DataError, LostError
from luffy.grading.request import Problem
from luffy.objectives.objective import token_weights
from luffy.objectives.schedules import objective_at
from luffy.rl.group_starts import Texts, open_starts
from luffy.rl.rows import RolloutTask
from luffy.rl.teaching import Place, ScoreRequest, ServedScorer, TeacherPrompts, Teaching
from luffy.training.batching import collate
from luffy.types import NO_TEACHER, Group, Message, Prompt, Source, Start, Trace, Trajectory


def _task(uid: str, source: str = "math", rate: float | None = None, **columns: object) -> RolloutTask:
    return RolloutTask(uid, (1,), "4", (), problem=Problem(data_source=source, extra_info=columns), pass_rate=rate)


def _group(uid: str, *rewards: float) -> Group:
    """Rows that are right where they are given a reward; their own rewards are all alike, since outcomes decide."""
    rows = (row_of(reward, (number + 2, 9)) for number, reward in enumerate(rewards))
    return Group(uid, tuple(replace(row, reward=0.5) for row in rows))


MIXED, FAILED = (1.0, 0.0, 1.0, 0.0), (0.0,) * 4
ANSWERED = [
    row_of(reward, (9, 9), Source.HINTED, start=Start("answer", shown="Answer: 4.")) for reward in (1.0, 0.0, 1.0)
]
GROUPS = [
    _group("short", *MIXED), _group("long", *MIXED),
    replace(_group("short", *FAILED), beside=tuple(ANSWERED)), _group("long", 1.0, 0.0, 0.0, 0.0),
]  # fmt: skip
TASKS = [_task("short", rate=1 / 3, num_operations=1), _task("long", rate=2 / 3, num_operations=3)]


class _Peers(TeacherPrompts):
    """Shows a row the number of its peer, without a tokenizer."""

    def __init__(self, config: object) -> None:
        self._config, self._limit, self._prompts = config, None, {task.uid: task for task in TASKS}

    def _peers(self, group: Group) -> Mapping[int, tuple[int, ...]]:
        right = [index for index, row in enumerate(group.trajectories) if row.is_correct][:2]
        return {index: (50 + index,) for index in right}

    def _as_sampled(self, row: Trajectory, prompt: object) -> tuple[int, ...]:
        return (60,) if row.is_hinted else ()


Rule = Callable[[Group, int], set[str]]


def _srpo(group: Group, index: int) -> set[str]:
    """Wrong rows with a right peer: SDPO; all others: GRPO."""
    rows = group.trajectories
    return {"distillation"} if not rows[index].is_correct and any(row.is_correct for row in rows) else {"on_policy"}


def _rlrt(group: Group, index: int) -> set[str]:
    """Right rows, beside another right one: the advantage is reshaped; all others: GRPO."""
    others = [row.is_correct for place, row in enumerate(group.trajectories) if place != index]
    return {"right", "evidence"} if group.trajectories[index].is_correct and any(others) else {"on_policy"}


def _vold(group: Group, index: int) -> set[str]:
    """GRPO on every row, and (1 - r) KL."""
    return {"on_policy"} if group.trajectories[index].is_correct else {"on_policy", "kl"}


def _tgopd(group: Group, index: int) -> set[str]:
    """The teacher where it was right in two of three probes; else GRPO."""
    return {"distillation"} if group.uid == "long" else {"on_policy"}


def _hdpo(group: Group, index: int) -> set[str]:
    """GRPO on rollouts, the policy with the answer on right rows that it wrote where they all fail."""
    return {"distillation"} if group.learned[index].is_hinted else {"on_policy"}


RULES: dict[str, Rule] = {
    "srpo": _srpo, "rlrt": _rlrt, "vold": _vold, "mopd": lambda *_: {"on_policy", "distillation"}, "tgopd": _tgopd,
    "hdpo": _hdpo,
}  # fmt: skip


@pytest.mark.parametrize("preset", RULES)
def test_each_row_has_the_losses_of_the_paper(preset: str) -> None:
    settings = rl_settings("chain=rl", f"method={preset}", *teacher_overrides(preset))
    teachers, terms = settings.rl.teachers, settings.objective.terms
    teaching = Teaching(teachers, TASKS)
    for index, teacher in enumerate(teachers.values()):
        if teacher.kind == "self":
            teaching.helped_by(index, _Peers(teacher))
    groups = GROUPS if preset == "hdpo" else [replace(group, beside=()) for group in GROUPS]
    taught = teaching.taught(groups)
    rows = [row for group in taught for row in group.learned]
    batch = collate(rows, torch.ones(len(rows)), pad_id=0)
    weight_KBT = token_weights(objective_at(terms, 1, 4, 8, teachers), batch, lambda tensor: tensor)
    found = [
        {term.name for term, weight_BT in zip(terms, weight_KBT, strict=True) if weight_BT[b].any()}
        for b in range(len(rows))
    ]
    assert found == [RULES[preset](group, index) for group in groups for index in range(len(group.learned))]
    shown = [bool(row.teacher_prompt_ids) for row in rows]
    assert shown == [preset in ("srpo", "rlrt", "hdpo") and row.taught_by != NO_TEACHER for row in rows]
    if preset == "mopd":
        assert [row.taught_by for row in rows] == [int(group.uid == "long") for group in groups for _ in range(4)]
    metrics = teaching.metrics(taught)
    assert metrics["batch/taught_share"] == sum(row.taught_by >= 0 for row in rows) / len(rows)
    assert ("batch/taught_share_long" in metrics) == (preset == "mopd")


def _teachers(**rows: TaughtRows | None) -> dict[str, RLTeacher]:
    return {name: ModelTeacher(kind="model", path="x", rows=of_it) for name, of_it in rows.items()}


MATH = TaughtRows(data_source=("math", "aime"))
CODE = TaughtRows(columns={"domain": "code"})
EASY = TaughtRows(pass_rate_at_least=0.66)
RIGHT, WRONG = TaughtRows(outcome="correct"), TaughtRows(outcome="wrong")


@pytest.mark.parametrize(
    ("teachers", "expected"),
    [
        ({"a": None}, [0, 0]),
        ({"a": MATH, "b": None}, [0, 0]),
        ({"a": CODE, "b": MATH}, [1, 1]),
        ({"a": CODE, "b": None}, [1, 1]),
        ({"a": WRONG, "b": RIGHT}, [1, 0]),
        ({"a": EASY, "b": WRONG}, [0, 0]),
        ({"a": TaughtRows(data_source=("math",), outcome="wrong")}, [NO_TEACHER, 0]),
    ],
)
def test_the_first_teacher_whose_rows_hold_takes_a_row(teachers: dict[str, TaughtRows | None], expected: list[int]):
    """Of an easy prompt of mathematics: the right row and the wrong one."""
    tasks = [_task("easy", rate=0.66), _task("hard", "aime", rate=0.1), _task("code", "repo", domain="code")]
    (group,) = Teaching(_teachers(**teachers), tasks).taught([_group("easy", 1.0, 0.0)])
    assert [row.taught_by for row in group.trajectories] == expected


@pytest.mark.parametrize(
    ("teachers", "named"),
    [
        ({"a": TaughtRows(data_source=("maths",)), "b": None}, "a.rows matches no|from maths|math"),
        ({"a": TaughtRows(columns={"area": "code"})}, "a.rows matches no|area code|domain"),
        ({"a": TaughtRows(pass_rate_at_least=0.5)}, "a.rows matches no|rate >= 0.5|highest pass rate 0.25"),
        ({"a": TaughtRows(data_source=("math", "repo")), "b": CODE}, "b would never be asked"),
        ({"a": RIGHT, "b": WRONG, "c": MATH}, "c would never be asked|from math or aime"),
    ],
)
def test_a_teacher_that_no_row_can_come_to_is_refused(teachers: dict[str, TaughtRows | None], named: str) -> None:
    with refused(*f"rl.teachers.{named}".split("|"), error=DataError):
        Teaching(_teachers(**teachers), [_task("a", rate=0.25), _task("b", "repo", domain="code")])


def test_lists_of_a_file_are_conditions() -> None:
    rows = "{data_source: [math, aime], start: [answer], columns: {domain: code}}"
    (teacher,) = rl_settings("chain=rl", "method=hdpo", f"rl.teachers.self.rows={rows}").rl.teachers.values()
    assert teacher.rows == TaughtRows(data_source=("math", "aime"), start=("answer",), columns={"domain": "code"})


def test_rows_with_a_start_may_have_a_teacher_of_their_own() -> None:
    """The first of two takes rows with a hint; a start that no teacher names is as good as none."""
    teachers = _teachers(a=TaughtRows(start=("hint", "prefix"), outcome="correct"), b=MATH)
    starts = [None, Start("hint", 0.5), Start("prefix", 0.5), Start("other")]
    rows = tuple(row_of(reward, start=start) for start in starts for reward in (1.0, 0.0))
    (group,) = Teaching(teachers, [_task("a"), _task("b", "repo")]).taught([Group("a", rows)])
    assert [row.taught_by for row in group.trajectories] == [1, 1, 0, 1, 0, 1, 1, 1]


class NumberScorer(ServedScorer):
    """Gives every token its own number as its score, without a server, and notes which rows it is given."""

    def __init__(self) -> None:
        self.places: list[tuple[str, int]] = []

    def taught(self, places: Sequence[Place]) -> list[Trajectory]:
        self.places += [(group.uid, index) for group, index in places]
        return super().taught(places)

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return [tuple(map(float, request.token_ids[request.first :])) for request in requests]


def test_a_served_teacher_is_asked_about_its_own_rows_alone_and_scores_what_is_learned_of_them() -> None:
    """Nothing of what an environment wrote."""
    teaching, served = Teaching(_teachers(a=WRONG, b=None), TASKS), NumberScorer()
    teaching.helped_by(0, served)
    sources = (Source.ON_POLICY, Source.ENVIRONMENT, Source.ON_POLICY)
    rows = (row_of(1.0), row_of(0.0, (3, 4, 5), sources), row_of(0.0, (6,)))
    taught = teaching.taught([Group("long", rows), _group("short", *[1.0] * 4)])
    assert served.places == [("long", 1), ("long", 2)]
    assert [row.teacher_logprobs for row in taught[0].trajectories] == [(), (3.0, 5.0), (6.0,)]
    assert [row.taught_by for row in taught[1].trajectories] == [1] * 4


# ---- what the policy is shown as its own teacher ----

TOKENIZER = build_tokenizer(["Add. 2+2 3+3 1 2 3 4 first second"])


def _prompt(uid: str, *traces: str) -> Prompt:
    messages = (Message("system", "Add."), Message("user", f"{uid} {{trace}}"))
    return Prompt(uid, "test", messages, "4", tuple(Trace(text, "somebody") for text in traces))


def _rendered(text: str) -> tuple[int, ...]:
    (ids,) = render_prompts(TOKENIZER, [(Message("system", "Add."), Message("user", text))])
    return tuple(ids)


def test_the_teacher_sees_the_first_trace_in_the_last_message_and_the_policy_keeps_its_prompt() -> None:
    config = SelfTeacher(kind="self", prompt="{problem} {trace}")
    prompts = TeacherPrompts(TOKENIZER, [_prompt("2+2", "first", "second")], config, str, None, "self")
    group = Group("2+2", (row_of(0.0, (2, 3)),) * 2)
    shown = prompts.taught([(group, 0), (group, 1)])
    expected = _rendered("2+2 {trace} first")
    assert [(row.teacher_prompt_ids, row.prompt_ids) for row in shown] == [(expected, (1,))] * 2
    assert prompts.longest == len(expected)
    with pytest.raises(DataError, match=r"^rl.teachers.self.kind: self .* 1 of 2 training prompts have none"):
        TeacherPrompts(TOKENIZER, [_prompt("2+2", "4"), _prompt("3+3")], config, str, None, "self")


def test_the_teacher_of_a_row_sees_the_first_other_right_one_of_its_group() -> None:
    """The first right row itself sees the second; a wrong row sees the first; without another, or too long: none."""
    config = SelfTeacher(kind="self", shows="peer", prompt="{trace} {problem}")
    rows = [row_of(reward, (number, 9)) for number, reward in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0))]
    rows += [row_of(0.0, (1,)), row_of(1.0, (2,) * 9)]
    rows = [replace(row, taught_by=0) for row in rows]
    groups = [Group("2+2", tuple(rows[:4])), Group("3+3", tuple(rows[4:]))]
    first, second, other = map(_rendered, ("2 2+2 {trace}", "3 2+2 {trace}", "2 3+3 {trace}"))
    for limit, of_first in ((None, [first, second, first, first]), (len(first) + 1, [()] * 4)):
        prompts = [_prompt("2+2"), _prompt("3+3")]
        places = [(group, index) for group in groups for index in range(len(group.trajectories))]
        taught = TeacherPrompts(TOKENIZER, prompts, config, lambda ids: str(ids[0]), limit, "self").taught(places)
        assert [row.teacher_prompt_ids for row in taught] == [*of_first, other, ()]
        assert [row.taught_by == NO_TEACHER for row in taught] == [not row.teacher_prompt_ids for row in taught]


def test_the_teacher_of_a_row_with_a_start_sees_what_the_row_was_sampled_with() -> None:
    """Rows that are learned under the prompt that they were sampled with have no teacher."""
    ask = {"kind": "critique", "about": "all", "wrong": "{reference}", "template": "{feedback} {prompt}"}
    failed = {"accuracy_at_most": 0.0}
    hint = {"show": {"kind": "hint", "template": "{prompt} {hint}"}, "dose": 0.5, "learn": "shown"}
    starts = {"answer": {"show": ask, "when": failed, "keep": "beside"}, "hint": hint}
    group = GroupConfig.model_validate({"size": 4, "starts": starts})
    texts = Texts(lambda messages: tuple(render_prompts(TOKENIZER, [messages])[0]), str, str)
    opened = open_starts(group.starts, texts, 0, 1, group.size)
    config = SelfTeacher(kind="self", shows="start")
    prompts = TeacherPrompts(TOKENIZER, [_prompt("2+2")], config, str, None, "self", opened)
    hinted = row_of(1.0, start=Start("hint", 0.5, "first"), prompt_ids=_rendered("2+2 {trace} first"), taught_by=0)
    told = row_of(1.0, (2,), Source.HINTED, start=Start("answer", shown="4"), taught_by=0)
    found = prompts.taught([(Group("2+2", (row_of(0.0, taught_by=0), hinted), beside=(told,)), i) for i in range(3)])
    assert [row.teacher_prompt_ids for row in found] == [(), (), _rendered("4 2+2 {trace}")]
    assert [row.taught_by for row in found] == [NO_TEACHER, NO_TEACHER, 0]
    assert prompts.longest == 0


# ---- scores from servers ----

REQUESTS = [ScoreRequest((5, 6, 7), 1), ScoreRequest((5, 9), 1), ScoreRequest((8, 1, 2, 3), 3)]
SCORES = [(-0.6, -0.7), (-0.9,), (-0.3,)]


def scorer(*servers: Endpoint, longest: int = 8, model: str = "big", text_ids: tuple[int, ...] = (97,)) -> ServedScorer:
    config, setting = ServerConfig(urls=tuple(server.url for server in servers)), "execution.rl_teachers.big"
    return ServedScorer.connect(config, model, longest=longest, known={"a": text_ids}, setting=setting)


@pytest.mark.parametrize(("num_servers", "num_tokens"), [(1, [9]), (2, [4, 5])])
def test_servers_share_the_sequences_by_their_tokens_and_score_those_after_the_first_in_order(
    serve, num_servers, num_tokens
):
    servers = [serve(scoring, SCORING_PATHS) for _ in range(num_servers)]
    with closing(scorer(*servers)) as opened:
        assert opened.score(REQUESTS) == SCORES
    asked = [[body for path, body in each.asked if path == TEXT] for each in servers]
    assert sorted(sum(len(body["prompt"]) for body in of_one) for of_one in asked) == num_tokens
    assert {(body["model"], body["max_tokens"], body["prompt_logprobs"]) for body in asked[0]} == {("big", 1, 0)}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"text": "4"}, "no log-probability for every token of the prompt"),
        ({"prompt_logprobs": [None]}, "needs vLLM servers"),
        ({"prompt_logprobs": [None, {"9": {"logprob": float("nan")}}]}, "the log-probability of a token is nan"),
        ({"prompt_logprobs": [None, {"9": {"logprob": -float("inf")}}]}, "the log-probability of a token is -inf"),
    ],
)
def test_a_server_without_scores_ends_the_step_in_one_line(serve, choice, words):
    said = Reply(body={"choices": [choice]})
    served = serve(lambda path, body: said if path == TEXT else scoring(path, body), SCORING_PATHS)
    with closing(scorer(served)) as opened, pytest.raises(ClusterError, match=words) as found:
        opened.score([ScoreRequest((5, 9), 1)])
    assert "\n" not in str(found.value) and not isinstance(found.value, LostError)


@pytest.mark.parametrize(
    ("answer", "settings", "named"),
    [
        (scoring, {"model": "huge"}, ("serves small, big", "huge")),
        (scoring, {"longest": 9}, ("--max-model-len 10 (it has 9)",)),
        (scoring, {"model": "small"}, ("is not a vLLM server",)),
        (scoring, {"text_ids": (1, 2)}, ("the tokenizer of big is not the policy's",)),
        (lambda *_: refusal(503, "loading"), {}, ("rl_teachers.big.urls: ", "/v1/models: status 503: loading")),
        (lambda *_: refusal(401, "no"), {}, ("refuses the API key", "rl_teachers.big.api_key_variable", "is not set")),
    ],
)
def test_servers_that_cannot_score_the_policys_tokens_are_refused(serve, answer, settings, named):
    with refused(*named, error=ConfigError):
        scorer(serve(answer, SCORING_PATHS), **settings)
