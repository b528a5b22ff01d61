"""Who teaches a row, and which terms learn from it: each preset against the rule of its paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from reference.taught_presets import teacher_overrides
from support.refusals import refused
from synthetic.settings import rl_settings
from synthetic.trajectories import row_of

from luffy.config.training import ModelTeacher, RLTeacher, TaughtRows
from luffy.errors import DataError
from luffy.grading.request import Problem
from luffy.objectives.objective import token_weights
from luffy.objectives.schedules import objective_at
from luffy.rl.rows import RolloutTask
from luffy.rl.teaching import Place, TeacherPrompts, Teaching
from luffy.training.batching import collate
from luffy.types import NO_TEACHER, Group, Source, Start, Trajectory


def _task(uid: str, source: str = "math", rate: float | None = None, **columns: object) -> RolloutTask:
    return RolloutTask(uid, (1,), "4", (), problem=Problem(data_source=source, extra_info=columns), pass_rate=rate)


def _group(uid: str, *rewards: float) -> Group:
    return Group(uid, tuple(row_of(reward, (number + 2, 9)) for number, reward in enumerate(rewards)))


MIXED, FAILED, SOLVED = (1.0, 0.0, 1.0, 0.0), (0.0,) * 4, (1.0,) * 4
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
        (_teachers(a=None), [0, 0]),
        (_teachers(a=MATH, b=None), [0, 0]),
        (_teachers(a=CODE, b=MATH), [1, 1]),
        (_teachers(a=CODE, b=None), [1, 1]),
        (_teachers(a=WRONG, b=RIGHT), [1, 0]),
        (_teachers(a=EASY, b=WRONG), [0, 0]),
        (_teachers(a=TaughtRows(data_source=("math",), outcome="wrong")), [NO_TEACHER, 0]),
    ],
)
def test_the_first_teacher_whose_rows_hold_takes_a_row(teachers: dict[str, RLTeacher], expected: list[int]) -> None:
    """Of an easy prompt of mathematics: the right row and the wrong one."""
    tasks = [_task("easy", rate=0.8), _task("hard", "aime", rate=0.1), _task("code", "repo", domain="code")]
    (group,) = Teaching(teachers, tasks).taught([_group("easy", 1.0, 0.0)])
    assert [row.taught_by for row in group.trajectories] == expected


@pytest.mark.parametrize(
    ("teachers", "named"),
    [
        (
            _teachers(a=TaughtRows(data_source=("maths",)), b=None),
            ("rl.teachers.a.rows matches no", "from maths", "math"),
        ),
        (_teachers(a=TaughtRows(columns={"area": "code"})), ("rl.teachers.a.rows matches no", "area code", "domain")),
        (
            _teachers(a=TaughtRows(pass_rate_at_least=0.5)),
            ("matches no", "rate >= 0.5", "highest pass rate 0.25"),
        ),
        (_teachers(a=TaughtRows(data_source=("math", "repo")), b=CODE), ("rl.teachers.b would never be asked",)),
        (_teachers(a=RIGHT, b=WRONG, c=MATH), ("rl.teachers.c would never be asked", "from math or aime")),
    ],
)
def test_a_teacher_that_no_row_can_come_to_is_refused(teachers: dict[str, RLTeacher], named: tuple[str, ...]) -> None:
    with refused(*named, error=DataError):
        Teaching(teachers, [_task("a", rate=0.25), _task("b", "repo", domain="code")])


def test_lists_of_a_file_are_conditions() -> None:
    rows = "{data_source: [math, aime], start: [answer], columns: {domain: code}}"
    (teacher,) = rl_settings("chain=rl", "method=hdpo", f"rl.teachers.self.rows={rows}").rl.teachers.values()
    expected = TaughtRows(data_source=("math", "aime"), start=("answer",), columns={"domain": "code"})
    assert teacher.rows == expected


def test_rows_with_a_start_may_have_a_teacher_of_their_own() -> None:
    """The first of two takes rows with a hint; a start that no teacher names is as good as none."""
    teachers = _teachers(a=TaughtRows(start=("hint", "prefix"), outcome="correct"), b=MATH)
    starts = [None, Start("hint", 0.5), Start("prefix", 0.5), Start("other")]
    rows = tuple(row_of(reward, start=start) for start in starts for reward in (1.0, 0.0))
    (group,) = Teaching(teachers, [_task("a"), _task("b", "repo")]).taught([Group("a", rows)])
    assert [row.taught_by for row in group.trajectories] == [1, 1, 0, 1, 0, 1, 1, 1]


class _Marking:
    """Adds a score to the rows that it is given, and counts them."""

    def __init__(self) -> None:
        self.places: list[tuple[str, int]] = []

    def taught(self, places: Sequence[Place]) -> list[Trajectory]:
        self.places += [(group.uid, index) for group, index in places]
        return [replace(group.trajectories[index], teacher_logprobs=(-1.0, -1.0)) for group, index in places]


def test_a_served_teacher_is_asked_about_its_own_rows_alone() -> None:
    teaching, served = Teaching(_teachers(a=WRONG, b=None), TASKS), _Marking()
    teaching.helped_by(0, served)  # type: ignore[arg-type]
    taught = teaching.taught([_group("long", *MIXED), _group("short", *SOLVED)])
    assert served.places == [("long", 1), ("long", 3)]
    assert [bool(row.teacher_logprobs) for row in taught[0].trajectories] == [False, True, False, True]
    assert [row.taught_by for row in taught[1].trajectories] == [1] * 4
