"""The data types shared by all packages: prompts, traces, trajectories, groups and training batches.

Shape legend: `B` sequences, `T` tokens (prompt and response, right-padded), `V` vocabulary, `C` choices of a teacher.
Importable without torch; `TrainBatch` names its tensors only for the type checker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Source(IntEnum):
    """Who produced a token."""

    ON_POLICY = 0
    """Sampled by the policy in training."""
    OFF_POLICY = 1
    """Taken from a demonstration."""
    REPLAY = 2
    """Sampled by the policy in an earlier step; off-policy, with the log-probabilities of that time."""
    ENVIRONMENT = 3
    """Written by the environment between two turns: part of the context, never learned from and never counted."""
    HINTED = 4
    """Sampled by the policy in training under a prompt with a hint that the row is learned without; off-policy, with
    the log-probabilities under the hinted prompt."""


SAMPLED = frozenset({Source.ON_POLICY, Source.HINTED})
"""Sources of tokens that the policy sampled for this step."""


class Outcome(StrEnum):
    """What grading found; only `CORRECT` earns the reward, and each of the others is counted separately."""

    CORRECT = "correct"
    WRONG = "wrong"
    """A readable answer that does not equal the reference."""
    NO_ANSWER = "no_answer"
    """No final answer in the response (no box, or an empty one)."""
    UNPARSABLE = "unparsable"
    """An answer (or a reference) that the grader cannot read, or refuses as too large to compute with."""
    TIMED_OUT = "timed_out"
    """Verification passed its time limit and was killed."""
    CRASHED = "crashed"
    """The grading worker died, or what it called raised."""


class FinishReason(StrEnum):
    """Why generation of a response ended."""

    STOP = "stop"
    """The stop token was sampled, or a stop text was completed (both are part of the response)."""
    LENGTH = "length"
    """The token limit of the whole response was reached."""
    TURN_LENGTH = "turn_length"
    """The token limit of one turn was reached."""
    TURNS = "turns"
    """The limit of turns was reached, and the environment would have gone on."""
    INTERRUPTED = "interrupted"
    """The tokens of an RL step were used up (`rl.partial_rollout_tokens`); the next step continues the response."""
    ENVIRONMENT_ERROR = "environment_error"
    GRADER_ERROR = "grader_error"
    """The user's own reward function raised, or returned no finite number."""
    REFUSED = "refused"
    """The model or its content filter declined, or the endpoint rejected the request for good."""
    FAILED = "failed"
    """No answer after all retries, while other requests were answered."""


PART_MEASURE = "part/"
"""Prefix of the measures that say which part of a mixture of environments played an episode."""
ANSWER_PROBABILITY = "answer_probability"
"""The measure by which the trainer chose among traces (`luffy.rl.trace_choice`)."""
WITHOUT_REWARD = frozenset({FinishReason.ENVIRONMENT_ERROR, FinishReason.GRADER_ERROR})
"""Ends of rows that are counted, and in no baseline and no update."""
NO_TEACHER = -1
"""`Trajectory.taught_by` of a row without a teacher."""
TOKEN_LIMITS = frozenset({FinishReason.LENGTH, FinishReason.TURN_LENGTH})
"""Ends of responses that ran into a limit of tokens."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


class Origin(StrEnum):
    """Where a trace of rewritten training data is from (`sample.rewrite`)."""

    OWN = "own"
    """The policy solved the prompt by itself."""
    REWRITTEN = "rewritten"
    """The policy solved it with the expert's trace in its prompt."""
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Trace:
    """A demonstration for a prompt, by a stronger model or a person."""

    text: str
    """The assistant's whole reply, without the stop token; where there are `turns`, all of them as lines."""
    author: str
    """Who wrote it, e.g. `deepseek-r1` or `arithmetic-teacher`."""
    verified: bool | None = None
    """Whether its answer was graded correct; None: not graded yet."""
    logprobs: tuple[float, ...] | None = None
    """The author's own log-probabilities of the trace's tokens (and stop token), where known."""
    turns: tuple[Message, ...] = ()
    """A trace of many turns: the assistant's, and the environment's answers between them. Empty for a single reply."""
    model: str | None = None
    """The model that was sampled, where known: a folder, a hub id or the name at an endpoint."""
    decoding: str | None = None
    num_tokens: int | None = None
    """Tokens by the author's tokenizer, stop token included, where known."""
    origin: Origin | None = None
    """None: the data was not rewritten."""

    @property
    def reply(self) -> str:
        """The last turn, which gives the answer."""
        return self.turns[-1].content if self.turns else self.text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem: the messages, the reference answer, and the demonstrations that the policy may learn from."""

    uid: str
    """Stable identity: a hash of the data source and the messages."""
    data_source: str
    messages: tuple[Message, ...]
    ground_truth: str
    traces: tuple[Trace, ...] = ()
    ability: str = "math"
    extra_info: dict[str, object] = field(default_factory=dict)
    grader: str | None = None
    """Name of this problem's grader; None: the experiment's."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a row was given before the policy wrote (`objective.group.starts`)."""

    name: str
    dose: float | None = None
    """The share of a trace that was wanted, before it was cut to whole tokens or steps; None: all of it, or a
    critique."""
    shown: str | None = None
    """Text that was in the prompt while the row was sampled; None: what was given begins the response."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response to one prompt, token for token as it will be trained on."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    source: tuple[Source, ...]
    """Per response token; a row may be prefix-conditioned (the start of a trace, continued by the policy)."""
    logp_behavior: tuple[float, ...]
    """Per response token: log-probability under the policy that sampled it; NaN where unknown."""
    weight_version: tuple[int, ...]
    """Per response token: the number of RL steps that the weights that sampled it had been trained for; -1 for
    demonstrations."""
    reward: float
    outcome: Outcome
    finish_reason: FinishReason
    measures: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Rewards by component and counts of the episode, by name; empty for a single turn."""
    start: Start | None = None
    """What the row was given; None: nothing but the bare prompt."""
    answer: str = field(default="", compare=False, repr=False)
    """The final answer that the grader found; empty without one, and in what is read from a journal."""
    taught_by: int = NO_TEACHER
    """Index in `rl.teachers` of the one that scores the row."""
    teacher_prompt_ids: tuple[int, ...] = ()
    """The prompt that the teacher sees in place of the policy's; empty: the same."""
    teacher_logprobs: tuple[float, ...] = ()
    """Per learnable response token: its log-probability under a teacher that is served elsewhere; empty: the trainer's
    ranks hold the teacher, or there is none."""
    context_starts: tuple[int, ...] = ()
    """Positions in the response where the chat template rendered the whole conversation again (`history: branching`).
    Tokens from there to the policy's next turn count as the environment's; later tokens see none before them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response; those of every context where there are several."""
        return len(self.prompt_ids) + len(self.response_ids)

    def branches(self) -> tuple[Trajectory, ...]:
        """The episode as sequences for the model: one for each context, whose prompt is that context."""
        if not self.context_starts:
            return (self,)
        assert not self.teacher_prompt_ids
        assert not self.teacher_logprobs
        starts, ends = (0, *self.context_starts), (*self.context_starts, len(self.response_ids))
        branches = []
        for start, end in zip(starts, ends, strict=True):
            place = start
            while start and self.source[place] is Source.ENVIRONMENT:
                place += 1
            branch = replace(
                self,
                prompt_ids=self.response_ids[start:place] if start else self.prompt_ids,
                response_ids=self.response_ids[place:end],
                source=self.source[place:end],
                logp_behavior=self.logp_behavior[place:end],
                weight_version=self.weight_version[place:end],
                context_starts=(),
            )
            branches.append(branch)
        return tuple(branches)

    @property
    def is_off_policy(self) -> bool:
        """Whether a token was not sampled by this step's policy under the row's prompt: demonstrations,
        prefix-conditioned rows, replayed rows, rows learned without the hint that they were sampled with."""
        return any(source in self.source for source in (Source.OFF_POLICY, Source.REPLAY, Source.HINTED))

    @property
    def is_hinted(self) -> bool:
        """Whether it was sampled under another prompt than the bare one."""
        return self.start is not None and self.start.shown is not None

    @property
    def num_learnable(self) -> int:
        """Response tokens that the policy or a demonstration wrote: the length of the response for every count."""
        return len(self.source) - self.source.count(Source.ENVIRONMENT)

    @property
    def is_correct(self) -> bool:
        return self.outcome is Outcome.CORRECT

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason is not FinishReason.STOP

    @property
    def has_failed(self) -> bool:
        """Whether the environment or the user's reward function failed, so that the row has no reward."""
        return self.finish_reason in WITHOUT_REWARD


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one prompt in one RL step: the population of its group advantage."""

    uid: str
    trajectories: tuple[Trajectory, ...]
    replaced: tuple[Trajectory, ...] = ()
    """Rows that are not trained on: rollouts that rows with a start replaced, which count in the policy's metrics, and
    rows with a start that were not chosen."""
    failed: tuple[Trajectory, ...] = ()
    """Rows whose environment or reward function failed, demonstrations included. They have no reward, so they are
    counted, but neither compared with the others nor trained on."""
    beside: tuple[Trajectory, ...] = ()
    """Rows of a start with `keep: beside`, without failed ones. They are in no baseline, accuracy or filter; correct
    ones are learned from."""
    is_carried: bool = False
    """Whether an earlier step drew the prompt and began the rows (`rl.partial_rollout_tokens`)."""

    @property
    def learned(self) -> tuple[Trajectory, ...]:
        """The rows that are trained on, those beside the group last."""
        return (*self.trajectories, *(row for row in self.beside if row.is_correct))

    @property
    def rewards(self) -> Sequence[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def rollouts(self) -> Sequence[Trajectory]:
        """The rows that the policy sampled for this step from the bare prompt, failed ones left out."""
        return _own((*self.trajectories, *self.replaced))

    @property
    def failed_rollouts(self) -> Sequence[Trajectory]:
        """The failed rows that the policy sampled for this step from the bare prompt."""
        return _own(self.failed)

    @property
    def is_open(self) -> bool:
        """Whether a later step continues some of the rows, which have no reward yet."""
        return any(row.finish_reason is FinishReason.INTERRUPTED for row in self.trajectories)

    @property
    def is_learnable(self) -> bool:
        """Whether the step may train on the group. Where every rollout failed, nothing is known of the prompt, and the
        remaining rows have nothing to be compared with."""
        failed = [row for row in self.failed_rollouts if row.start is None]
        return bool(self.trajectories) and not (failed and not self.rollouts)

    def of_start(self, name: str) -> Sequence[Trajectory]:
        """The rows with a start, those that are not trained on included."""
        rows = (*self.trajectories, *self.replaced, *self.beside)
        return [row for row in rows if row.start is not None and row.start.name == name]

    @property
    def is_replayed(self) -> bool:
        """Whether one of the rows comes from an earlier step."""
        return any(Source.REPLAY in trajectory.source for trajectory in self.trajectories)

    @property
    def oldest_weights(self) -> float:
        """The lowest weight version of the tokens sampled for this step; infinite without such a token."""
        sampled = (
            version
            for row in self.trajectories
            for version, source in zip(row.weight_version, row.source, strict=True)
            if source in SAMPLED
        )
        return min(sampled, default=math.inf)

    @property
    def accuracy(self) -> float:
        """Share of correct rollouts, failed ones left out; 0 without a rollout."""
        rollouts = self.rollouts
        return sum(row.is_correct for row in rollouts) / len(rollouts) if rollouts else 0.0


def _own(rows: Sequence[Trajectory]) -> list[Trajectory]:
    return [row for row in rows if not row.is_off_policy and not row.is_hinted]


@dataclass(slots=True)
class TrainBatch:
    """Rows ready for the policy, of a whole step or of a micro-batch; every tensor is `(B, T)`, one entry a token, or
    `(B, T, C)`, one for each choice of the teacher.

    Position `t` of a per-token tensor belongs to token `input_ids_BT[:, t]`, whose log-probability is read from the
    logits at `t - 1`; position 0 never carries a response token. A packed micro-batch has its sequences in one row.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    position_ids_BT: Tensor
    """Position in the sequence; where rows are packed, positions restart at each sequence."""
    response_mask_BT: Tensor
    """True on response tokens that may be trained on: all but those of an environment."""
    is_off_policy_BT: Tensor
    advantage_BT: Tensor
    logp_old_BT: Tensor
    """The trainer's own log-probabilities at the start of the optimizer phase; NaN where they are the current ones (a
    single update in the phase)."""
    logp_behavior_BT: Tensor
    """Log-probabilities under the policy that sampled the token; NaN where unknown."""
    logp_ref_BT: Tensor
    """Log-probabilities under the reference of `kl` terms; 0 where no term needs them."""
    logp_teacher_BT: Tensor
    """Log-probabilities under the row's teacher; 0 without one, and where no term needs them."""
    entropy_teacher_BT: Tensor
    """Entropy (nats) of the teacher's distribution; 0 where no term needs it."""
    choice_BTC: Tensor
    """int32: the most probable tokens in place of this one, by the teacher, the policy or both; none where no term
    needs them."""
    logq_BTC: Tensor
    """Their log-probabilities under the teacher, then that of all other tokens; empty, as `choice_BTC` is."""
    taught_by_BT: Tensor
    """int8: index in `rl.teachers` of the row's teacher; -1 for none."""
    value_old_BT: Tensor
    """The critic's values at the start of the optimizer phase; 0 without a critic."""
    return_BT: Tensor
    """The critic's targets; 0 without a critic."""
    sequence_BT: Tensor
    """Which sequence the token belongs to (int64, unique within the step's batch): rows may be packed."""
    episode_BT: Tensor
    """Which response the token belongs to (int64): a sequence, or all sequences of an episode with several contexts.
    Denominators count responses."""
    is_correct_BT: Tensor
    """True on rows that earned the reward."""
    group_accuracy_BT: Tensor
    """Share of correct rollouts in the row's group."""

    def __len__(self) -> int:
        return int(self.input_ids_BT.shape[0])

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of each row, padding left out."""
        return self.attention_mask_BT.sum(dim=-1).tolist()

    @property
    def num_scored(self) -> int:
        """Number of tokens that may be trained on."""
        return int(self.response_mask_BT.sum())

    def map(self, function: Callable[[Tensor], Tensor]) -> TrainBatch:
        """The batch with `function` applied to each of its tensors."""
        return TrainBatch(**{column.name: function(getattr(self, column.name)) for column in fields(self)})
