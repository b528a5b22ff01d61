"""Chooses the prompts of each step, from the sampler and the replay buffer, and keeps the state for later steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luffy.config.objective import GroupFilter, ReplayConfig
from luffy.config.settings import RLSettings
from luffy.rl.groups import GroupCollector, kept_groups, needs_more
from luffy.rl.prompts import NEVER_DRAWN, PromptHistory, fresh_uids, open_sampler
from luffy.rl.replay import FailedPrompts, ReplayBuffer
from luffy.rl.rows import RolloutTask
from luffy.rollout.engine import RolloutEngine
from luffy.seeds import derive_seed
from luffy.tracking.journal import RolloutJournal
from luffy.training.learner import Trainer
from luffy.training.supervised import demonstration
from luffy.types import Group, Source, Trajectory


@dataclass(frozen=True, slots=True)
class Sources:
    """The parts that groups are made from."""

    tasks: Sequence[RolloutTask]
    collector: GroupCollector
    journal: RolloutJournal
    trainer: Trainer
    """Computes the entropies by which a stored success is chosen."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The prompts of a step."""

    step: int
    tasks: Sequence[RolloutTask]
    """Prompts of the first round."""
    journalled: Sequence[Group] | None
    """Groups that an interrupted run left in the journal; if given, nothing is generated."""


class Experience:
    """Provides the groups of each step and keeps the state that later steps need.

    The state (of the sampler, the replay buffer and the failed prompts) depends on the groups of earlier steps
    alone, so a resumed run that reads journalled steps arrives at the same state.
    """

    def __init__(self, settings: RLSettings, sources: Sources) -> None:
        self._settings = settings
        self._sources = sources
        objective = settings.objective
        self._by_uid = {task.uid: task for task in sources.tasks}
        ahead = settings.rl.max_staleness
        self._replay = (
            None
            if objective.replay is None
            else ReplayBuffer(objective.replay, settings.seed, sources.journal.read_group, ahead)
        )
        self._sampler = open_sampler(settings, sources.tasks)
        guidance = objective.group.guidance
        self._pass_rates = None if guidance is None else PromptHistory(guidance.memory, ahead)
        self._failed = None if objective.interleaved_sft is None else FailedPrompts(objective.interleaved_sft.take)

    def plan(self, step: int) -> StepPlan:
        """The plan of `step`, given the steps observed so far; called once per step, in order."""
        journalled = self._sources.journal.read(step)
        if journalled is not None:
            self._sampler.plan(step, fresh_uids(journalled))
            return StepPlan(step, (), journalled)
        replayed = self._replayed_tasks(step)
        fresh = self._sampler.draw(step, self._wanted - len(replayed))
        self._sampler.plan(step, [task.uid for task in fresh])
        return StepPlan(step, self._guided(step, [*replayed, *fresh]), None)

    def generate(self, plan: StepPlan, engine: RolloutEngine) -> list[Group]:
        """The graded groups of a planned step, in as many rounds as dynamic sampling needs.

        Reads no state that other steps change, so several steps may be generated concurrently.
        """
        if plan.journalled is not None:
            return list(plan.journalled)
        groups: list[Group] = []
        rounds = 0
        while rounds == 0 or needs_more(groups, self._filter, self._wanted, rounds):
            tasks = plan.tasks
            if rounds:
                tasks = self._guided(plan.step, self._sampler.draw(plan.step, self._wanted, fresh_uids(groups)))
            groups += self._sources.collector.collect(engine, tasks, plan.step, [group.uid for group in groups])
            rounds += 1
        return groups

    def grading_s(self) -> float:
        """Seconds of grading since the last call."""
        return self._sources.collector.grading_s()

    def commit(self, plan: StepPlan, groups: Sequence[Group]) -> None:
        """Write the groups of a step to the journal, before the trainer learns from them."""
        if plan.journalled is None:
            self._sources.journal.commit(plan.step, groups)

    def kept(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups that the step trains on, after filtering.

        Admission already bounds staleness. If an engine missed a weight update nevertheless, stale groups are dropped
        as a whole: dropping only their late rows would favour short responses.
        """
        oldest = step - 1 - self._settings.rl.max_staleness
        fresh = [group for group in groups if group.oldest_weights >= oldest]
        return kept_groups(fresh, self._filter, self._wanted)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Update the state with the groups of a step; called once per step, after training on it."""
        self._sampler.observe(step, groups)
        if self._pass_rates is not None:
            self._pass_rates.observe(step, groups)
        if self._replay is not None:
            self._replay.observe(step, groups)
        if self._failed is not None:
            self._failed.observe(groups, lambda uid: bool(self._by_uid[uid].demonstrations))

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Where the prompts of a step came from; called before its groups are observed."""
        metrics = self._sampler.metrics(step, groups)
        if self._pass_rates is not None:
            guided = [any(Source.OFF_POLICY in row.source for row in group.trajectories) for group in groups]
            metrics["batch/guided_share"] = sum(guided) / len(groups)
        return metrics

    def hard_demonstrations(self, step: int) -> list[Trajectory] | None:
        """Traces of queued prompts on which all rollouts failed; None until there are enough of them."""
        config = self._settings.objective.interleaved_sft
        if self._failed is None or config is None:
            return None
        uids = self._failed.take(config.buffer_size)
        return None if uids is None else [self._one_trace(self._by_uid[uid], step) for uid in uids]

    def state(self) -> dict[str, object]:
        """The state for a checkpoint."""
        memories = {"replay": self._replay, "failed": self._failed, "pass_rates": self._pass_rates}
        state: dict[str, object] = {"sampler": self._sampler.state()}
        return state | {name: memory.state() for name, memory in memories.items() if memory is not None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._sampler.restore(state["sampler"])
        if self._replay is not None:
            self._replay.restore(state["replay"])
        if self._failed is not None:
            self._failed.restore(state["failed"])
        if self._pass_rates is not None:
            self._pass_rates.restore(state["pass_rates"])

    @property
    def _filter(self) -> GroupFilter | None:
        return self._settings.objective.group.filter

    @property
    def _wanted(self) -> int:
        return self._settings.rl.prompts_per_step

    def _guided(self, step: int, tasks: Sequence[RolloutTask]) -> list[RolloutTask]:
        """The tasks, without traces where earlier steps solved the prompt too often (`group.guidance`)."""
        guidance = self._settings.objective.group.guidance
        if self._pass_rates is None or guidance is None:
            return list(tasks)
        known = self._pass_rates.as_known_to(step)
        rates = [known.get(task.uid, NEVER_DRAWN).pass_rate for task in tasks]
        return [
            task if rate is None or rate <= guidance.pass_rate_at_most else replace(task, demonstrations=())
            for task, rate in zip(tasks, rates, strict=True)
        ]

    def _replayed_tasks(self, step: int) -> list[RolloutTask]:
        config = self._settings.objective.replay
        if self._replay is None or config is None:
            return []
        stored = self._replay.sample(step, round(config.share * self._wanted))
        return [replace(self._by_uid[uid], replayed=self._choose(rows, config)) for uid, rows in stored.items()]

    def _choose(self, candidates: Sequence[Trajectory], config: ReplayConfig) -> Trajectory:
        """One of a prompt's stored successes, given oldest first."""
        if config.choose == "latest" or len(candidates) == 1:
            return candidates[-1]
        entropies = self._sources.trainer.entropies(candidates)
        return candidates[entropies.index(min(entropies))]

    def _one_trace(self, task: RolloutTask, step: int) -> Trajectory:
        index = derive_seed(self._settings.seed, "interleaved", step, task.uid) % len(task.demonstrations)
        chosen = task.demonstrations[index]
        return demonstration(task.prompt_ids, chosen.token_ids, chosen.source, chosen.context_starts)
