"""Which prompts a step takes, from the stream and the replay buffer, and what later steps must remember of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luffy.config.objective import GroupFilter, ReplayConfig
from luffy.config.settings import RLSettings
from luffy.rl.collector import GroupCollector
from luffy.rl.failed_prompts import FailedPrompts
from luffy.rl.filters import kept_groups, needs_more
from luffy.rl.replay import ReplayBuffer
from luffy.rl.tasks import RolloutTask
from luffy.rollout.engine import RolloutEngine
from luffy.seeds import derive_seed
from luffy.tracking.journal import RolloutJournal
from luffy.training.sampler import stream_indices
from luffy.training.supervised import demonstration
from luffy.training.trainer import Trainer
from luffy.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Sources:
    """Where groups come from."""

    tasks: Sequence[RolloutTask]
    collector: GroupCollector
    journal: RolloutJournal
    trainer: Trainer
    """Tells which of a prompt's stored successes has the lowest entropy."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step is to roll out."""

    step: int
    position: int
    """Place in the stream of prompts where the step begins."""
    tasks: Sequence[RolloutTask]
    """Prompts of the first round."""
    journalled: Sequence[Group] | None
    """Groups that an interrupted run has left in the journal; nothing is generated then."""


class Experience:
    """Gives each step its groups, and remembers what later steps need of them.

    What it remembers (its place in the stream of prompts, the replay buffer, failed prompts) depends on the groups of
    earlier steps alone: a resumed run that replays journalled steps comes to the same memory.
    """

    def __init__(self, settings: RLSettings, sources: Sources) -> None:
        self._settings = settings
        self._sources = sources
        objective = settings.objective
        self._by_uid = {task.uid: task for task in sources.tasks}
        self._replay = (
            None
            if objective.replay is None
            else ReplayBuffer(objective.replay, settings.seed, sources.journal.read_group)
        )
        self._prompts_taken = 0
        self._planned: dict[int, int] = {}
        """Prompts from the stream, by step, of the steps that are planned and not observed yet."""
        self._failed = None if objective.interleaved_sft is None else FailedPrompts(objective.interleaved_sft.take)

    def plan(self, step: int) -> StepPlan:
        """What `step` rolls out, given what was observed until now; call once for each step, in order."""
        position = self._prompts_taken + sum(self._planned.values())
        journalled = self._sources.journal.read(step)
        if journalled is not None:
            self._planned[step] = _num_fresh(journalled)
            return StepPlan(step, position, (), journalled)
        replayed = self._replayed_tasks(step)
        fresh = self._from_stream(position, self._wanted - len(replayed))
        self._planned[step] = len(fresh)
        return StepPlan(step, position, [*replayed, *fresh], None)

    def generate(self, plan: StepPlan, engine: RolloutEngine) -> list[Group]:
        """The graded groups of a planned step, in as many rounds as dynamic sampling needs.

        Reads nothing that other steps change, so that several steps may be generated at the same time.
        """
        if plan.journalled is not None:
            return list(plan.journalled)
        groups: list[Group] = []
        rounds = 0
        while rounds == 0 or needs_more(groups, self._filter, self._wanted, rounds):
            following = self._from_stream(plan.position + _num_fresh(groups), self._wanted)
            tasks = following if rounds else plan.tasks
            groups += self._sources.collector.collect(engine, tasks, plan.step, [group.uid for group in groups])
            rounds += 1
        return groups

    def commit(self, plan: StepPlan, groups: Sequence[Group]) -> None:
        """Make the groups of a step durable, before anything is learned from them."""
        if plan.journalled is None:
            self._sources.journal.commit(plan.step, groups)

    def kept(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups that the step learns from.

        Admission bounds how stale rollouts can be. Should an engine have missed a weight update all the same, stale
        groups are dropped whole: dropping only their late rows would favour short answers.
        """
        oldest = step - 1 - self._settings.rl.max_staleness
        fresh = [group for group in groups if group.oldest_weights >= oldest]
        return kept_groups(fresh, self._filter, self._wanted)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Remember what later steps need; once a step, after it has learned."""
        self._planned.pop(step, None)
        self._prompts_taken += _num_fresh(groups)
        if self._replay is not None:
            self._replay.observe(step, groups)
        if self._failed is not None:
            self._failed.observe(groups, lambda uid: bool(self._by_uid[uid].demonstrations))

    def hard_demonstrations(self, step: int) -> list[Trajectory] | None:
        """Traces of prompts that every rollout failed, once enough prompts wait; they leave the queue."""
        config = self._settings.objective.interleaved_sft
        if self._failed is None or config is None:
            return None
        uids = self._failed.take(config.buffer_size)
        return None if uids is None else [self._one_trace(self._by_uid[uid], step) for uid in uids]

    def state(self) -> dict[str, object]:
        """What a checkpoint must hold."""
        memories = {"replay": self._replay, "failed": self._failed}
        state: dict[str, object] = {"prompts_taken": self._prompts_taken}
        return state | {name: memory.state() for name, memory in memories.items() if memory is not None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint."""
        self._prompts_taken = state["prompts_taken"]
        if self._replay is not None:
            self._replay.restore(state["replay"])
        if self._failed is not None:
            self._failed.restore(state["failed"])

    @property
    def _filter(self) -> GroupFilter | None:
        return self._settings.objective.group.filter

    @property
    def _wanted(self) -> int:
        return self._settings.rl.prompts_per_step

    def _from_stream(self, first: int, count: int) -> list[RolloutTask]:
        tasks = self._sources.tasks
        return [tasks[i] for i in stream_indices(len(tasks), first, count, self._settings.seed)]

    def _replayed_tasks(self, step: int) -> list[RolloutTask]:
        config = self._settings.objective.replay
        if self._replay is None or config is None:
            return []
        uids = self._replay.draw(step, round(config.share * self._wanted))
        stored = {uid: self._replay.candidates(uid) for uid in uids}
        return [replace(self._by_uid[uid], replayed=self._choose(rows, config)) for uid, rows in stored.items()]

    def _choose(self, candidates: Sequence[Trajectory], config: ReplayConfig) -> Trajectory:
        """One of a prompt's stored successes, which come oldest first."""
        if config.choose == "latest" or len(candidates) == 1:
            return candidates[-1]
        entropies = self._sources.trainer.entropies(candidates)
        return candidates[entropies.index(min(entropies))]

    def _one_trace(self, task: RolloutTask, step: int) -> Trajectory:
        turn = derive_seed(self._settings.seed, "interleaved", step, task.uid) % len(task.demonstrations)
        return demonstration(task.prompt_ids, task.demonstrations[turn].token_ids)


def _num_fresh(groups: Sequence[Group]) -> int:
    """Prompts that came from the stream."""
    return sum(not group.is_replayed for group in groups)
