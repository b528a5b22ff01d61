"""RL runs on a scripted engine, with a record of what each rank would have learned in place of the model.

All else is that of a run: prompts, replay, prefixes, dynamic sampling, journal, trainer.
"""

import itertools
import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from reference.taught_presets import teacher_overrides

from luffy.config.settings import RLSettings
from luffy.grading.pool import GraderPool
from luffy.rl.group_starts import Texts, open_starts
from luffy.rl.groups import GroupCollector
from luffy.rl.loop import StepRunner
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.trace_choice import TraceChoice
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, limit
from luffy.tracking.journal import RolloutJournal
from luffy.training.batching import Shard
from luffy.training.learner import Trainer, TrainerRank
from luffy.types import FinishReason, Group, Message, Trajectory
from synthetic.settings import rl_settings

RIGHT, WRONG, STOP = 1, 2, 3
BARE_LOGP, HINTED_LOGP = -0.5, -0.25
"""Of every token that the script samples."""
PROMPTS, STEPS = 12, 4
UPDATES, RANKS = (1, 2, 4), (1, 2)
CUTS = tuple(itertools.product(UPDATES, RANKS))
SMALL = {"relift": ("objective.interleaved_sft.buffer_size=3",), "exgrpo": ("objective.replay.start_accuracy=0.05",)}
Watch = Callable[[], None]
Sent = list[tuple[Callable[..., Any], list[Shard]]]


def settings_of(method: str, *more: str, steps: int = STEPS) -> RLSettings:
    overrides = [
        "chain=rl", f"method={method}", f"rl.prompts_per_step={PROMPTS}", f"rl.steps={steps}", *SMALL.get(method, ()),
        *teacher_overrides(method), *more,
    ]  # fmt: skip
    return rl_settings(*overrides)


def decode(ids: Sequence[int]) -> str:
    return r"\boxed{7}" if RIGHT in ids else r"\boxed{8}"


def _encode(messages: Sequence[Message]) -> tuple[int, ...]:
    """The prompt's token, and after it one for each word that it is shown."""
    number, *rest = messages[-1].content.split()
    return (int(number), *[99] * len(rest))


def _spelt(ids: Sequence[int]) -> str:
    """A character for each token of a trace."""
    return "".join({RIGHT: "7", STOP: "."}.get(token, "-") for token in ids)


def _trace(index: int) -> Demonstration:
    ids = (STOP,) if index % 6 == 3 else (*[20] * (index % 11), RIGHT, STOP)
    return Demonstration("step 1\nstep 2\nstep 3\nstep 4\n" + decode(ids), ids, (-0.1,) * len(ids))


TASKS = [
    RolloutTask(
        f"p{i}", (10 + i,), "7", tuple(_trace(i + j) for j in range((0, 1, 2, 1, 1, 1)[i % 6])),
        messages=(Message("user", str(10 + i)),),
    )
    for i in range(48)
]  # fmt: skip
"""Of every six prompts, one has no trace, one has a trace of one token, and one has two traces."""
LENGTHS = {task.uid: {len(trace.token_ids) for trace in task.demonstrations} for task in TASKS}
HAS_TRACE = {uid: bool(lengths) for uid, lengths in LENGTHS.items()}


def num_given(uid: str, share: float) -> set[int]:
    """Numbers of tokens that this share of a trace may have; 0 without a trace."""
    return {min(math.floor(round(length * share, 6)), length - 1) for length in LENGTHS[uid]} or {0}


class Parrot:
    """An engine that says `script(i, request)` to the i-th request of a call, and remembers what it was asked."""

    def __init__(self, script: Callable[[int, RolloutRequest], Sequence[int]]) -> None:
        self.calls: list[list[RolloutRequest]] = []
        self._script = script

    @property
    def requests(self) -> list[RolloutRequest]:
        return [*itertools.chain(*self.calls)]

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.calls.append([*requests])
        said = [tuple(self._script(place, request)) for place, request in enumerate(requests)]
        stops = (STOP, *params.stop_token_ids)
        ends = [FinishReason.STOP if ids[-1] in stops else FinishReason.LENGTH for ids in said]
        logps = [tuple(-0.5 / (1 + t) for t in range(len(ids))) for ids in said]
        return [Completion(ids, *more, (6,) * len(ids)) for ids, *more in zip(said, logps, ends, strict=True)]

    def close(self) -> None: ...


class Script:
    """An engine whose response depends on the request alone: of every four prompts one is never solved, one always.

    A hint, or some tokens of a trace to continue, make all of them equally hard. A share of the responses ends as
    episodes do whose environment failed. A request with too few tokens gets the first of them.
    """

    def __init__(self, version: int, failing: float = 0.0) -> None:
        self.version = version
        self.watch: Watch = lambda: None
        self._failing = failing
        self.requests: list[list[RolloutRequest]] = []
        """In the step, those of each call."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.watch()
        self.requests.append([*requests])
        return [self._response(request, limit(request, params)) for request in requests]

    def close(self) -> None: ...

    def _response(self, request: RolloutRequest, most: int) -> Completion:
        rng = random.Random(request.seed)
        is_hinted = request.prompt_ids[1:] != ()
        is_helped = is_hinted or len(request.prefix_ids) > 2
        is_right = rng.random() < (0.4 if is_helped else (0.0, 0.3, 0.7, 1.0)[request.prompt_ids[0] % 4])
        ids = (*[9] * rng.randrange(6), RIGHT if is_right else WRONG, STOP)
        end = FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH
        reason, ids = FinishReason.ENVIRONMENT_ERROR if rng.random() < self._failing else end, ids[:most]
        return Completion(
            ids, (HINTED_LOGP if is_hinted else BARE_LOGP,) * len(ids), reason, (self.version,) * len(ids)
        )


@dataclass
class RecordedRanks:
    """Stands for the trainer's ranks: keeps the shards that they are sent, and the state for their checkpoints.

    A row's score or entropy is its number of learnable tokens.
    """

    num_ranks: int
    saved: list[Mapping[str, object]] = field(default_factory=list)
    """The state in the checkpoint of each step."""
    sent: Sent = field(default_factory=list)
    """In the step."""
    watch: Watch = lambda: None

    def call(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method in (TrainerRank.entropies, TrainerRank.mean_probabilities):
            self.watch()
            return [[float(len(row.response_ids)) for row in rows] for (rows,) in arguments]
        if method is TrainerRank.follow:
            return [None for _ in arguments]
        if method is TrainerRank.save:
            self.saved.append(json.loads(json.dumps(arguments[0][1])))
            assert self.saved[-1] == arguments[0][1], "a checkpoint holds nothing that JSON would change"
            return [None for _ in arguments]
        if method is TrainerRank.restore:
            return [json.loads(json.dumps(self.saved[step - 1])) for (step,) in arguments]
        self.sent.append((method, [shard for shard, _ in arguments]))
        return [{} for _ in arguments]


class ScriptedCluster:
    """A cluster whose engine is the script and whose ranks are a record."""

    def __init__(self, trainer: Trainer, failing: float) -> None:
        self.trainer = trainer
        self.engine = Script(0, failing)

    def publish(self, version: int) -> None:
        self.engine.version = version

    def metrics(self) -> dict[str, float]:
        return {}


def learned(settings: RLSettings, groups: Sequence[Group], step: int, num_updates: int, num_ranks: int) -> list[Shard]:
    """What each rank would learn of a step's groups."""
    rl = settings.rl.model_copy(update={"prompts_per_update": PROMPTS // num_updates})
    ranks = RecordedRanks(num_ranks)
    Trainer(settings.model_copy(update={"rl": rl}), ranks).learn(groups, step)
    return ranks.sent[0][1]


@dataclass(frozen=True)
class Learned:
    """A row and what its rank knows of its group."""

    trajectory: Trajectory
    group: int
    advantage: float
    accuracy: float


def _learned_by(shard: Shard) -> list[list[Learned]]:
    rows = [
        Learned(row, group, advantage, shard.accuracies[group])
        for row, group, advantage in zip(shard.rows, shard.groups, shard.advantages, strict=True)
    ]
    return [[rows[row] for row in update] for update in shard.updates]


@dataclass(eq=False)
class Step:
    """One RL step as it was composed."""

    settings: RLSettings
    number: int
    groups: list[Group]
    """Those that are complete."""
    left_open: list[Group]
    kept: list[Group]
    metrics: dict[str, float]
    sent: Sent
    """To the ranks: the rows of the RL step, and of an SFT step after it."""
    requests: list[list[RolloutRequest]]
    """What each call asked of the engine."""

    @property
    def seeds(self) -> list[int]:
        return [request.seed for call in self.requests for request in call]

    @cached_property
    def shards(self) -> dict[tuple[int, int], list[Shard]]:
        """By updates and ranks: what each rank learns."""
        return {case: learned(self.settings, self.kept, self.number, *case) for case in CUTS}

    def updates(self, num_updates: int, num_ranks: int) -> list[list[Learned]]:
        """The rows that all ranks together learn in each update."""
        parts = [_learned_by(shard) for shard in self.shards[num_updates, num_ranks]]
        return [[row for part in update for row in part] for update in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Run:
    """The steps of one stage."""

    settings: RLSettings
    tasks: Sequence[RolloutTask]
    folder: Path
    """Of its journal."""
    steps: list[Step]
    saved: list[Mapping[str, object]]
    """The state in the checkpoint of each step."""

    @property
    def groups(self) -> list[Group]:
        return [group for step in self.steps for group in step.groups]

    @property
    def sft_steps(self) -> list[list[Shard]]:
        """What each rank learns in the SFT steps between them."""
        return [shards for step in self.steps for method, shards in step.sent if method is TrainerRank.sft_step]


def runner_of(
    settings: RLSettings,
    grader: GraderPool,
    journal: RolloutJournal,
    ranks: RecordedRanks,
    failing: float = 0.0,
    tasks: Sequence[RolloutTask] = TASKS,
) -> tuple[StepRunner, Script]:
    """The loop of a run, and its engine."""
    group, steps = settings.objective.group, settings.rl.steps
    texts = Texts(_encode, decode, decode)
    starts = [
        start.with_room(tasks, 64, None) for start in open_starts(group.starts, texts, settings.seed, steps, group.size)
    ]
    params, partial_tokens = SamplingParams(1.0, 64, (STOP,)), settings.rl.partial_rollout_tokens
    collector = GroupCollector(grader, decode, params, group, settings.seed, steps, starts, step_tokens=partial_tokens)
    cluster = ScriptedCluster(Trainer(settings, ranks), failing)
    choice = TraceChoice(_spelt, lambda text: (RIGHT,), 100) if group.lets_trainer_choose else None
    return StepRunner(settings, cluster, tasks, collector, journal, choice=choice), cluster.engine


def _nothing_is_journalled(journal: RolloutJournal, step: int, folder: Path, files: Sequence[Path]) -> None:
    assert journal.read(step) is None, "a journalled step is neither sampled nor chosen again"
    assert sorted(folder.iterdir()) == files, "a step is journalled once all of its rows are known"


def scripted_run(
    settings: RLSettings,
    grader: GraderPool,
    folder: Path,
    failing: float = 0.0,
    tasks: Sequence[RolloutTask] = TASKS,
    saved: Sequence[Mapping[str, object]] = (),
) -> Run:
    """The steps of a stage after those whose checkpoints are `saved`.

    Whenever something is sampled or chosen for a step, nothing of the step is in the journal: a kill repeats all of it.
    """
    journal, ranks, steps = RolloutJournal(folder), RecordedRanks(2, [*saved]), list[Step]()
    runner, engine = runner_of(settings, grader, journal, ranks, failing, tasks)
    with runner:
        if saved:
            runner.restore(len(saved))
        for number in range(len(saved) + 1, settings.rl.steps + 1):
            engine.requests, ranks.sent = [], []
            files = sorted(folder.iterdir())
            engine.watch = ranks.watch = partial(_nothing_is_journalled, journal, number, folder, files)
            outcome = runner.run(number)
            runner.save(number)
            assert [method for method, _ in ranks.sent].count(TrainerRank.learn) == 1, "each step learns from groups"
            groups, left_open = journal.read(number) or [], journal.read_open(number) or []
            kept, metrics = list(outcome.groups), outcome.metrics
            steps.append(Step(settings, number, groups, left_open, kept, metrics, ranks.sent, engine.requests))
    return Run(settings, tasks, folder, steps, ranks.saved)


def assert_resumes(found: Run, grader: GraderPool, folder: Path, last: int, journalled: int) -> None:
    """A kill after the checkpoint of `last`, when the journal had the steps up to `journalled`, changes nothing."""
    folder.mkdir()
    for step in range(1, journalled + 1):
        for file in found.folder.glob(f"*_{step:06d}.parquet"):
            shutil.copy(file, folder)
    (folder / f"open_{journalled + 1:06d}.parquet").write_bytes(b"of an attempt that was killed")
    again = scripted_run(found.settings, grader, folder, tasks=found.tasks, saved=found.saved[:last])
    assert again.saved == found.saved
    for one, other in zip(again.steps, found.steps[last:], strict=True):
        assert repr(one.sent) == repr(other.sent)
        assert one.seeds == ([] if one.number <= journalled else other.seeds), "a journalled step is not sampled again"
    files, expected = ({file.name: file.read_bytes() for file in run.folder.iterdir()} for run in (again, found))
    assert files == expected
