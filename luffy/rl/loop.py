"""The RL steps of a stage: generate groups, filter them, train, update the state for later steps.

`StepRunner` runs the steps. `Experience` chooses the prompts of each, from the sampler and the replay buffer, and keeps
that state. `Generation` schedules: right before a step, or up to `max_staleness` steps ahead of the trainer.
`LogpGapCheck` checks that the engine and the trainer compute the same policy.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from luffy.cluster.local import Cluster
from luffy.config.model import DType
from luffy.config.settings import RLSettings
from luffy.errors import CheckpointError, NumericalError
from luffy.rl.doses import memory_of
from luffy.rl.groups import GroupCollector, kept_groups, needs_more
from luffy.rl.prompts import NEVER_DRAWN, PromptHistory, PromptRecord, fresh_uids, open_sampler
from luffy.rl.replay import FailedPrompts, ReplayBuffer
from luffy.rl.rows import BusyTime, RolloutTask
from luffy.rl.teaching import Teaching
from luffy.rl.trace_choice import TraceChoice
from luffy.rollout.engine import RolloutEngine
from luffy.seeds import derive_seed
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.rollout_metrics import (
    choice_metrics,
    learned_metrics,
    partial_metrics,
    rollout_metrics,
    staleness_metrics,
    start_metrics,
    tokens_sampled,
)
from luffy.training.learner import Trainer
from luffy.training.supervised import demonstration
from luffy.types import Group, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The groups of a finished step and its metrics."""

    groups: Sequence[Group]
    """The groups it trained on, or all groups if every one was filtered out."""
    metrics: dict[str, float]


class StepRunner:
    """Runs RL steps with a cluster's engine and trainer.

    A context manager: running generation is abandoned when the context ends.
    """

    def __init__(
        self,
        settings: RLSettings,
        cluster: Cluster,
        tasks: Sequence[RolloutTask],
        collector: GroupCollector,
        journal: RolloutJournal,
        teaching: Teaching | None = None,
        choice: TraceChoice | None = None,
    ) -> None:
        self._settings = settings
        self._trainer = cluster.trainer
        self._teaching = teaching
        self._experience = Experience(settings, tasks, collector, journal, cluster.trainer, choice)
        self._generation = Generation(self._experience, cluster, settings.rl.max_staleness, settings.rl.steps)

    def run(self, step: int) -> StepOutcome:
        """Run RL step `step` (from 1), after all earlier ones; its groups are journalled before training on them."""
        began, passes = time.perf_counter(), self._settings.rl.passes
        found, metrics = self._generation.take(step)
        groups = [group for group in found if not group.is_open]
        kept = self._experience.kept(step, groups)
        objective, rl = self._settings.objective, self._settings.rl
        metrics |= rollout_metrics(groups, replays=objective.replay is not None)
        metrics["batch/kept_share"] = len(kept) / len(groups)
        metrics |= staleness_metrics(groups, step, rl.staleness_bound)
        metrics |= {} if rl.partial_rollout_tokens is None else partial_metrics(found, step)
        metrics |= start_metrics(groups, objective.group.starts)
        metrics |= choice_metrics(groups) if objective.group.lets_trainer_choose else {}
        metrics |= self._experience.metrics(step, found)
        teaching_began = time.perf_counter()
        taught = kept if self._teaching is None else self._teaching.taught(kept)
        teacher_s = 0.0 if self._teaching is None else time.perf_counter() - teaching_began
        metrics |= {} if self._teaching is None else self._teaching.metrics(taught)
        metrics |= self._trainer.learn(taught, step)
        if "perf/teacher_s" in metrics:
            metrics["perf/teacher_s"] += teacher_s
        self._experience.observe(step, found)
        demonstrations = self._experience.hard_demonstrations(step) or ()
        if demonstrations:
            sft_began = time.perf_counter()
            metrics |= self._trainer.sft_step(demonstrations, step)
            metrics["batch/optimizer_steps"] += 1
            metrics["perf/update_s"] = metrics.get("perf/update_s", 0.0) + time.perf_counter() - sft_began
        self._trainer.finish_step(step)
        metrics |= learned_metrics(kept, demonstrations, passes)
        # Throughput of the step, and of its training part, which counts the groups trained on once for each pass.
        seconds, idle_s = time.perf_counter() - began, metrics["perf/trainer_idle_s"]
        num_tokens, num_kept = (
            sum(row.num_tokens for group in part for row in group.learned) for part in (groups, kept)
        )
        metrics |= {
            "perf/step_s": seconds,
            "perf/tokens_per_s": num_tokens / seconds,
            "perf/trainer_idle_share": idle_s / seconds,
            "perf/train_tokens_per_s": passes * num_kept / (seconds - idle_s),
        }
        return StepOutcome(kept or groups, metrics)

    def save(self, step: int, *, is_extra: bool = False) -> None:
        """Write the checkpoint of a finished step; `is_extra`: it is not on the schedule."""
        self._trainer.save(step, self._experience.state(), is_extra=is_extra)

    def restore(self, step: int) -> None:
        """Restore the checkpoint of `step`; the next step to run is `step` + 1."""
        self._experience.restore(self._trainer.restore(step))

    def __enter__(self) -> "StepRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self._generation.close()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The prompts of a step."""

    step: int
    tasks: Sequence[RolloutTask]
    """Prompts of the first round, after those whose groups the step before left open."""
    journalled: Sequence[Group] | None
    """Groups that an interrupted run left in the journal, open ones too; if given, nothing is generated."""


class Experience:
    """Provides the groups of each step and keeps the state that later steps need.

    The state (of the sampler, the replay buffer and the failed prompts) depends on the groups of earlier steps
    alone, so a resumed run that reads journalled steps arrives at the same state.
    """

    def __init__(
        self,
        settings: RLSettings,
        tasks: Sequence[RolloutTask],
        collector: GroupCollector,
        journal: RolloutJournal,
        trainer: Trainer,
        choice: TraceChoice | None = None,
    ) -> None:
        """`trainer` computes the entropies by which a stored success is chosen, and the scores of `choice`, which comes
        with `show.choose`."""
        self._settings = settings
        self._collector = collector
        self._journal = journal
        self._trainer = trainer
        self._choice = choice
        objective = settings.objective
        assert (choice is not None) == objective.group.lets_trainer_choose, "a choice comes with its setting"
        replay, sft, starts = objective.replay, objective.interleaved_sft, objective.group.starts
        ahead = settings.rl.max_staleness
        self._by_uid = {task.uid: task for task in tasks}
        self._sampler = open_sampler(settings, tasks)
        self._replay = None if replay is None else ReplayBuffer(replay, settings.seed, journal.read_group, ahead)
        self._failed = None if sft is None else FailedPrompts()
        self._solved = {
            name: (start.when.pass_rate_at_most, PromptHistory(start.when.memory, ahead))
            for name, start in starts.items()
            if start.when is not None and start.when.pass_rate_at_most is not None
        }
        """By start: the highest pass rate of a prompt that has it, and the history of all prompts."""
        doses = {name: memory_of(name, start, ahead) for name, start in starts.items()}
        self._doses = {name: memory for name, memory in doses.items() if memory is not None}
        memories = {
            "replay": self._replay,
            "failed": self._failed,
            **{f"pass rates of {name}": history for name, (_, history) in self._solved.items()},
            **{f"dose of {name}": memory.fold for name, memory in self._doses.items()},
        }
        self._memories = {name: memory for name, memory in memories.items() if memory is not None}
        self._filter, self._wanted = objective.group.filter, settings.rl.prompts_per_step

    def plan(self, step: int) -> StepPlan:
        """The plan of `step`, given the steps observed so far; called once per step, in order."""
        complete = self._journal.read(step)
        if complete is not None:
            journalled = [*complete, *(self._journal.read_open(step) or ())]
            self._sampler.plan(step, fresh_uids(journalled))
            return StepPlan(step, (), journalled)
        replayed, config = list[RolloutTask](), self._settings.objective.replay
        if self._replay is not None and config is not None:
            stored = self._replay.sample(step, round(config.share * self._wanted))
            for uid, successes in stored.items():  # oldest first
                chosen = successes[-1]
                if config.choose != "latest" and len(successes) > 1:
                    entropies = self._trainer.entropies(successes)
                    chosen = successes[entropies.index(min(entropies))]
                replayed.append(replace(self._by_uid[uid], replayed=chosen))
        fresh = self._sampler.draw(step, self._wanted - len(replayed))
        self._sampler.plan(step, [task.uid for task in fresh])
        return StepPlan(step, self._guided(step, [*self._carried(step), *replayed, *fresh]), None)

    def generate(self, plan: StepPlan, engine: RolloutEngine) -> list[Group]:
        """The graded groups of a planned step that the journal lacks, in as many rounds as dynamic sampling needs.

        Reads no state that other steps change, so several steps may be generated concurrently.
        """
        groups: list[Group] = []
        rounds = 0
        while rounds == 0 or needs_more(groups, self._filter, self._wanted, rounds):
            tasks = plan.tasks
            if rounds:
                tasks = self._guided(plan.step, self._sampler.draw(plan.step, self._wanted, fresh_uids(groups)))
            groups += self._collector.collect(engine, tasks, plan.step, [group.uid for group in groups])
            rounds += 1
        while all(group.is_open for group in groups):  # nothing to learn from yet
            earlier = rounds * [group.uid for group in groups]
            groups = self._collector.collect(engine, self._going_on(groups), plan.step, earlier)
            rounds += 1
        return groups

    def grading_s(self) -> float:
        return self._collector.grading_s()

    def commit(self, plan: StepPlan, groups: list[Group]) -> None:
        """Write the groups of a step to the journal, before the trainer learns from them.

        With `show.choose` the trainer, which has finished all earlier steps, first chooses among their traces, and
        `groups` holds what it chose.
        """
        if plan.journalled is None:
            if self._choice is not None:
                groups[:] = self._choice.made(groups, self._by_uid, self._trainer.mean_probabilities)
            self._journal.commit(plan.step, groups)

    def kept(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups that the step trains on, after filtering.

        Admission already bounds staleness. If an engine missed a weight update nevertheless, stale groups are dropped
        as a whole: dropping only their late rows would favour short responses.
        """
        oldest = step - 1 - self._settings.rl.staleness_bound
        fresh = [group for group in groups if group.oldest_weights >= oldest]
        return kept_groups(fresh, self._filter, self._wanted)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Update the state with the groups of a step, open ones too; called once per step, after training on it."""
        self._sampler.observe(step, groups)
        for _, history in self._solved.values():
            history.observe(step, groups)
        for memory in self._doses.values():
            memory.observe(step, groups)
        closed = [group for group in groups if not group.is_open]
        if self._replay is not None:
            self._replay.observe(step, closed)
        if self._failed is not None:
            self._failed.observe(closed, lambda uid: bool(self._by_uid[uid].demonstrations))

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        return self._sampler.metrics(step, groups)

    def hard_demonstrations(self, step: int) -> list[Trajectory] | None:
        """Traces of queued prompts on which all rollouts failed; None until there are enough of them."""
        config = self._settings.objective.interleaved_sft
        if self._failed is None or config is None:
            return None
        uids = self._failed.take(config.buffer_size)
        if uids is None:
            return None
        rows = []
        for task in [self._by_uid[uid] for uid in uids]:
            index = derive_seed(self._settings.seed, "interleaved", step, task.uid) % len(task.demonstrations)
            trace = task.demonstrations[index]
            rows.append(demonstration(task.prompt_ids, trace.token_ids, trace.source, trace.context_starts))
        return rows

    def state(self) -> dict[str, object]:
        memories = {name: memory.state() for name, memory in self._memories.items()}
        return {"sampler": self._sampler.state(), **memories}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sampler.restore(state["sampler"])
        for name, memory in self._memories.items():
            memory.restore(state[name])

    def _carried(self, step: int) -> list[RolloutTask]:
        """The prompts whose groups the step before left open."""
        if self._settings.rl.partial_rollout_tokens is None or step == 1:
            return []
        left_open = self._journal.read_open(step - 1)
        if left_open is None:
            raise CheckpointError(
                f"the rollout journal has lost step {step - 1}, whose open groups step {step} continues; delete the "
                "checkpoints to restart the stage"
            )
        return self._going_on([replace(group, is_carried=True) for group in left_open])

    def _going_on(self, groups: Sequence[Group]) -> list[RolloutTask]:
        return [replace(self._by_uid[group.uid], begun=group) for group in groups]

    def _guided(self, step: int, tasks: Sequence[RolloutTask]) -> list[RolloutTask]:
        """The tasks with what earlier steps say of their starts: which of them a prompt that was solved too often goes
        without, and what doses depend on."""
        solved = {name: (most, history.as_known_to(step)) for name, (most, history) in self._solved.items()}
        known = {name: memory.known_to(step) for name, memory in self._doses.items()}

        def is_solved(uid: str, most: float, rates: Mapping[str, PromptRecord]) -> bool:
            rate = rates.get(uid, NEVER_DRAWN).pass_rate
            return rate is not None and rate > most

        return [
            replace(
                task,
                without=frozenset(name for name, found in solved.items() if is_solved(task.uid, *found)),
                known={name: of(task.uid) for name, of in known.items()},
            )
            for task in tasks
        ]


class Generation:
    """Generates the groups of each step, possibly ahead of the trainer.

    With `max_staleness` k, rollouts of step s start once the weights after step s - 1 - k are published. This admission
    rule bounds staleness, so no rollouts have to be discarded. With k = 0, generation and training alternate.
    """

    def __init__(self, experience: Experience, cluster: Cluster, max_staleness: int, last_step: int) -> None:
        self._experience = experience
        self._cluster = cluster
        self._ahead = max_staleness
        self._last_step = last_step
        self._running: dict[int, tuple[StepPlan, Future[list[Group]]]] = {}
        self._threads = ThreadPoolExecutor(max(max_staleness, 1), thread_name_prefix="generation")
        self._busy = BusyTime()
        self._counting = threading.Lock()
        self._num_tokens = 0

    def take(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The groups of `step`, now in the journal, and metrics of the wait for them (`perf/`).

        Called when the trainer has finished all earlier steps.
        """
        began = time.perf_counter()
        waiting = [s for s in range(step, min(step + self._ahead, self._last_step) + 1) if s not in self._running]
        plans = [self._experience.plan(s) for s in waiting]
        publishing_began = time.perf_counter()
        if any(plan.journalled is None for plan in plans):
            self._cluster.publish(step - 1)
        weights_s = time.perf_counter() - publishing_began
        for plan in plans:
            if self._ahead:
                future = self._threads.submit(self._generate, plan)
            else:  # no overlap: run in this thread, which has the trainer's torch settings
                future = Future()
                future.set_result(self._generate(plan))
            self._running[plan.step] = (plan, future)
        plan, future = self._running.pop(step)
        depth = future.done() + sum(other.done() for _, other in self._running.values())
        groups = future.result()
        self._experience.commit(plan, groups)
        waited = time.perf_counter() - began
        metrics = {"perf/trainer_idle_s": waited, "perf/weights_s": weights_s}
        if self._ahead:
            metrics["perf/queue_depth"] = float(depth)
        # Since the last step: seconds of generation (grading included) and of grading alone.
        elapsed, busy = self._busy.since_last()
        with self._counting:
            num_tokens, self._num_tokens = self._num_tokens, 0
        metrics |= {"perf/generation_s": busy, "perf/grading_s": self._experience.grading_s()}
        metrics["perf/engine_idle_share"] = 1 - busy / elapsed if elapsed > 0 else 0.0
        if num_tokens and busy:
            metrics["perf/rollout_tokens_per_s"] = num_tokens / busy
        return groups, metrics | self._cluster.metrics()

    def close(self) -> None:
        """Abandon running generation."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _generate(self, plan: StepPlan) -> list[Group]:
        if plan.journalled is not None:
            return list(plan.journalled)
        with self._busy.measured():
            groups = self._experience.generate(plan, self._cluster.engine)
        with self._counting:
            self._num_tokens += tokens_sampled(groups, plan.step)
        return groups


_SUSPICIOUS_GAP: Mapping[DType, float] = {"float32": 0.01, "bfloat16": 0.1}


def suspicious_gap(dtype: DType, staleness_bound: int) -> float | None:
    """The mean difference of log-probabilities, in nats, above which kernels do not explain it.

    Different kernels differ by about 1e-6 in float32. In bfloat16, those of a 0.5B model differ by 0.01 on an H200
    (docs/performance.md). None with `staleness_bound` above 0: then the policy has been updated since some tokens were
    sampled.
    """
    return _SUSPICIOUS_GAP[dtype] if staleness_bound == 0 else None


class LogpGapCheck:
    """Watches the difference of the engine's and the trainer's log-probabilities of the sampled tokens."""

    def __init__(self, bound: float | None, suspicious: float | None) -> None:
        self._bound = bound
        """The stage ends above it; None: never."""
        self._warn_above = suspicious

    def check(self, metrics: Mapping[str, float]) -> None:
        """Warn of a suspicious gap in a step, and again once it has doubled. Raises NumericalError above the bound."""
        gap = metrics.get("rollout/logp_gap_mean")
        if gap is None:
            return
        if self._bound is not None and gap > self._bound:
            raise NumericalError(
                f"rollout/logp_gap_mean is {gap:.4f}, above execution.max_logp_gap {self._bound}: the engine does not "
                "generate with the trainer's weights or temperature"
            )
        if self._warn_above is not None and gap > self._warn_above:
            self._warn_above = 2 * gap
            logger.warning(
                "the engine's log-probabilities differ from the trainer's by %.4f nats per token on average; "
                "the next warning comes at twice that (rollout/logp_gap_mean has every step)",
                gap,
            )
