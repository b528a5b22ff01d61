"""Builds graded groups from prompts: rollouts, off-policy rows (traces or their prefixes), replayed rows."""

from collections import Counter
from collections.abc import Callable, Sequence

from luffy.config.objective import GroupConfig
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.live_episode import EpisodeStart, refuse_failures
from luffy.grading import Grade, Grader, GradeRequest
from luffy.rl.anchors import Anchors, AnchorSearch
from luffy.rl.busy_time import BusyTime
from luffy.rl.group_measures import GradedRows, with_group_measures
from luffy.rl.hints import HintedPrompts, with_hinted_rows
from luffy.rl.prefixes import PrefixedRow, prefix_length
from luffy.rl.rows import Row, replayed_row
from luffy.rl.tasks import Demonstration, RolloutTask
from luffy.rollout.engine import Completion, RolloutEngine, SamplingParams
from luffy.rollout.stop_texts import StopTexts
from luffy.seeds import derive_seed
from luffy.types import Group, Source, Trajectory


class GroupCollector:
    """Generates and grades the groups of a step. A group has rollouts, then off-policy rows, then the replayed row.

    Off-policy rows are whole traces or, with `group.prefix`, prefixes of traces that the policy continues. A whole
    trace is used once per group, so a prompt with too few traces gets more rollouts instead; prefixes may all come
    from one trace. All rows except replayed ones are graded; a prefix and its continuation are graded as one text.

    With `stops` a response ends with the token that completes a stop text; `decode` returns its text up to there.

    With `group.anchor`, prompts whose rollouts fail are rolled out again from the start of a trace, with more or less
    of it until the policy succeeds now and then.

    With `hints`, prompts whose rollouts fail are rolled out once more, with the first steps of a trace in the prompt.

    With a `player` a response is an episode: an environment answers the policy's turns, and the last turn is graded.
    """

    def __init__(
        self,
        grader: Grader,
        decode: Callable[[Sequence[int]], str],
        params: SamplingParams,
        group: GroupConfig,
        seed: int,
        total_steps: int,
        player: EpisodePlayer | None = None,
        stops: StopTexts | None = None,
        hints: HintedPrompts | None = None,
    ) -> None:
        assert (hints is None) == (group.hint is None), "hints come with their section"
        assert player is None or stops is None, "the turns of an episode end with the stop token"

        self._grader = grader
        self._decode = decode
        self._params = params
        self._group = group
        self._seed = seed
        self._total_steps = total_steps
        self._player = player
        self._stops = stops
        self._hints = hints
        self._anchors = None if group.anchor is None else Anchors(group.anchor, decode, seed)
        self._grading = BusyTime()

    def collect(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], step: int, earlier: Sequence[str] = ()
    ) -> list[Group]:
        """One group per task, in order.

        `step` counts from 1. `earlier` holds the prompt uids of the step's earlier rounds: a prompt that repeats within
        a step is sampled with new seeds.
        """
        visits = _visits(tasks, earlier)
        plans = [self._plan(task, visit, step) for task, visit in zip(tasks, visits, strict=True)]
        rows = self._graded(tasks, self._generated(engine, tasks, plans))
        groups = [Group(task.uid, (*found, *_replayed(task))) for task, found in zip(tasks, rows, strict=True)]
        groups = self._with_traces_where_failing(engine, tasks, groups, step)
        groups = self._with_branches_where_failing(engine, tasks, groups, visits, step)
        return self._with_hints_where_failing(engine, tasks, groups, visits, step)

    def grading_s(self) -> float:
        """Seconds since the last call in which responses were graded."""
        return self._grading.since_last()[1]

    def _plan(self, task: RolloutTask, visit: int, step: int) -> list[Row]:
        """The rows of a group before generation: rollouts, then off-policy rows."""
        traces = self._traces(task, step) if self._group.off_policy_when_accuracy_at_most is None else []
        num_rollouts = self._group.size - len(traces) - len(_replayed(task))
        seeds = [
            derive_seed(self._seed, "rollout", step, task.uid, visit * self._group.size + sample)
            for sample in range(num_rollouts + len(traces))
        ]
        return [Row(task.prompt_ids, seed) for seed in seeds[:num_rollouts]] + [
            Row(task.prompt_ids, seed, trace, self._num_given(task, trace, index, len(traces), visit, step))
            for index, (seed, trace) in enumerate(zip(seeds[num_rollouts:], traces, strict=True))
        ]

    def _traces(self, task: RolloutTask, step: int) -> list[Demonstration]:
        """The trace of each off-policy row; a task with more traces than rows rotates them over the steps."""
        available, prefix = task.demonstrations, self._group.prefix
        if not available:
            return []
        start = derive_seed(self._seed, "demonstration", step, task.uid) % len(available)
        count = self._group.off_policy if prefix else min(self._group.off_policy, len(available))
        stride = 0 if prefix and prefix.shared else 1
        return [available[(start + i * stride) % len(available)] for i in range(count)]

    def _num_given(self, task: RolloutTask, trace: Demonstration, index: int, count: int, visit: int, step: int) -> int:
        if self._group.prefix is None:
            return len(trace.token_ids)
        row = PrefixedRow(task.uid, index, count, visit)
        wanted = prefix_length(self._group.prefix, len(trace.token_ids), row, step, self._total_steps, self._seed)
        if self._stops is not None:  # the policy has something left to write
            wanted = self._stops.before_first(trace.token_ids[:wanted])
        while wanted and trace.source and trace.source[wanted - 1] is Source.ENVIRONMENT:
            wanted -= 1  # the live environment answers the turn, so that its state is real
        return wanted

    def _generated(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], plans: Sequence[Sequence[Row]]
    ) -> list[list[Row]]:
        """The planned rows with what the policy sampled."""
        planned = [(task, row) for task, plan in zip(tasks, plans, strict=True) for row in plan if self._is_played(row)]
        finished = iter(self._continued(engine, planned))
        return [[next(finished) if self._is_played(row) else row for row in plan] for plan in plans]

    def _is_played(self, row: Row) -> bool:
        """Whether something is to be sampled, or measured of a demonstration."""
        return not row.is_whole_trace or (self._player is not None and self._player.scorer.needs_demonstrations)

    def _continued(self, engine: RolloutEngine, planned: Sequence[tuple[RolloutTask, Row]]) -> list[Row]:
        """Each row, continued by the policy: in a single call of the engine, or turn by turn with an environment."""
        if self._player is None:
            completions = engine.generate([row.request() for _, row in planned], self._params)
            rows = [row for _, row in planned]
            return [row.continued(self._cut(row, found)) for row, found in zip(rows, completions, strict=True)]
        episodes = self._player.play([_start(task, row) for task, row in planned], engine, self._params)
        return [row.played(episode) for (_, row), episode in zip(planned, episodes, strict=True)]

    def _cut(self, row: Row, completion: Completion) -> Completion:
        return completion if self._stops is None else self._stops.cut(completion, row.given_ids)

    def _graded(self, tasks: Sequence[RolloutTask], rows: Sequence[Sequence[Row]]) -> list[list[Trajectory]]:
        wanted = [
            GradeRequest(
                row.reply(self._decode),
                task.ground_truth,
                task.problem,
                measures=row.measures,
                has_failed=row.has_failed,
            )
            for task, found in zip(tasks, rows, strict=True)
            for row in found
        ]
        with self._grading.measured():
            grades = iter(self._grader.grade(wanted))
        graded: list[GradedRows] = [[(row, next(grades)) for row in found] for found in rows]
        if self._player is not None and self._player.scorer.measures_groups:
            graded = with_group_measures(self._player.scorer, tasks, graded)
            refuse_failures([row.finish_reason for found in graded for row, _ in found], self._player.limits)
        return [[self._trajectory(row, grade) for row, grade in found] for found in graded]

    def _trajectory(self, row: Row, grade: Grade) -> Trajectory:
        if self._player is None or row.has_failed:
            return row.trajectory(grade)
        return row.trajectory(grade, self._player.scorer.reward(grade.reward, row.measures))

    def _with_traces_where_failing(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], groups: Sequence[Group], step: int
    ) -> list[Group]:
        """The groups, with wrong rollouts replaced by traces where accuracy is at most the configured bound."""
        bound = self._group.off_policy_when_accuracy_at_most
        if bound is None:
            return list(groups)
        chosen = [
            self._traces(task, step) if group.accuracy <= bound else []
            for task, group in zip(tasks, groups, strict=True)
        ]
        plans = [[_whole(task, trace) for trace in found] for task, found in zip(tasks, chosen, strict=True)]
        traces = self._graded(tasks, self._generated(engine, tasks, plans))
        return [_in_place_of_wrong(*pair) for pair in zip(groups, traces, strict=True)]

    def _with_branches_where_failing(
        self,
        engine: RolloutEngine,
        tasks: Sequence[RolloutTask],
        groups: Sequence[Group],
        visits: Sequence[int],
        step: int,
    ) -> list[Group]:
        """The groups, with branches off a trace in place of rollouts where accuracy is at most the configured bound."""
        anchors = self._anchors
        if anchors is None:
            return list(groups)
        searches = [
            anchors.search(task, step) if group.accuracy <= anchors.config.accuracy_at_most else None
            for task, group in zip(tasks, groups, strict=True)
        ]
        while any(search is not None and search.num_pieces is not None for search in searches):
            plans = [
                self._branches(search, task, visit, step)
                for search, task, visit in zip(searches, tasks, visits, strict=True)
            ]
            rows = self._graded(tasks, self._generated(engine, tasks, plans))
            for search, found in zip(searches, rows, strict=True):
                if search is not None and found:
                    search.observe(found)
        return [
            group if search is None else search.group(group) for search, group in zip(searches, groups, strict=True)
        ]

    def _branches(self, search: AnchorSearch | None, task: RolloutTask, visit: int, step: int) -> list[Row]:
        """A group of rows for the next try of a search; empty where there is none."""
        if search is None or search.num_pieces is None:
            return []
        given, size = search.num_given, self._group.size
        if self._stops is not None:  # the policy has something left to write
            given = self._stops.before_first(search.trace.token_ids[:given])
        seeds = (
            derive_seed(self._seed, "branch", step, task.uid, search.num_pieces, visit * size + index)
            for index in range(size)
        )
        return [Row(task.prompt_ids, seed, search.trace, given) for seed in seeds]

    def _with_hints_where_failing(
        self,
        engine: RolloutEngine,
        tasks: Sequence[RolloutTask],
        groups: Sequence[Group],
        visits: Sequence[int],
        step: int,
    ) -> list[Group]:
        """The groups, with hinted rows in place of wrong rollouts where accuracy is at most the configured bound."""
        hints = self._hints
        if hints is None or not hints.are_due(step):
            return list(groups)
        failing = [group.accuracy <= hints.config.accuracy_at_most for group in groups]
        plans = [
            self._hinted_rows(hints, task, visit, step) if fails else []
            for task, visit, fails in zip(tasks, visits, failing, strict=True)
        ]
        if not any(plans):
            return list(groups)
        rows = self._graded(tasks, self._generated(engine, tasks, plans))
        return [
            with_hinted_rows(group, found, hints.config) if found else group
            for group, found in zip(groups, rows, strict=True)
        ]

    def _hinted_rows(self, hints: HintedPrompts, task: RolloutTask, visit: int, step: int) -> list[Row]:
        prompts = hints.of(task, step)
        return [
            Row(
                task.prompt_ids,
                derive_seed(self._seed, "hinted rollout", step, task.uid, visit * len(prompts) + index),
                hinted=prompt,
            )
            for index, prompt in enumerate(prompts)
        ]


def _start(task: RolloutTask, row: Row) -> EpisodeStart:
    return EpisodeStart(
        task.problem, task.ground_truth, task.messages, row.prompt_ids, row.seed, row.given_ids, row.given_source
    )


def _visits(tasks: Sequence[RolloutTask], earlier: Sequence[str]) -> list[int]:
    """Number of earlier occurrences of each task's prompt in the step."""
    seen = Counter(earlier)
    visits = []
    for task in tasks:
        visits.append(seen[task.uid])
        seen[task.uid] += 1
    return visits


def _replayed(task: RolloutTask) -> tuple[Trajectory, ...]:
    return () if task.replayed is None else (replayed_row(task.replayed),)


def _whole(task: RolloutTask, trace: Demonstration) -> Row:
    return Row(task.prompt_ids, trace=trace, num_given=len(trace.token_ids))


def _in_place_of_wrong(group: Group, traces: Sequence[Trajectory]) -> Group:
    """The group with its last wrong rollouts replaced by traces; surplus traces are left out."""
    wrong = [row for row in group.rollouts if not row.is_correct]
    count = min(len(traces), len(wrong))
    leaving = wrong[len(wrong) - count :]
    staying = tuple(row for row in group.trajectories if not any(row is other for other in leaving))
    return Group(group.uid, (*staying, *traces[:count]), replaced=tuple(leaving))
