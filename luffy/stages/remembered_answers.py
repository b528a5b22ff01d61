"""The responses of a stage that keeps correct answers, held from their generation until they are graded.

answers = RememberedAnswers(tokenizer, model, decoding)
engine = answers.engine(engine)          # single turns
player = answers.player(player)          # episodes
trace = answers.take(record)             # once for each graded response; None unless it is correct and complete
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from luffy.data.kept_answers import GradedAnswer
from luffy.data.schema import joined_text
from luffy.data.templates import encode_traces
from luffy.environments.episodes import Episode, EpisodePlayer
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.transcript import trace_turns
from luffy.evaluation.sample_records import SampleRecord
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Outcome, Trace

_AUTHOR = "policy"


@dataclass(frozen=True, slots=True)
class RememberedAnswers:
    """Completions and episodes by the seed of their request, until they are taken."""

    tokenizer: PreTrainedTokenizerBase
    model: str
    """`Trace.model` of the traces."""
    decoding: str
    _completions: dict[int, Completion] = field(default_factory=dict)
    _episodes: dict[int, tuple[EpisodeStart, Episode]] = field(default_factory=dict)

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        """`engine`, wrapped so that its completions are kept."""
        return _RememberingEngine(engine, self._completions)

    def player(self, player: EpisodePlayer) -> "RememberingPlayer":
        """`player`, wrapped so that its episodes are kept."""
        return RememberingPlayer(player, self._episodes)

    def take(self, record: SampleRecord) -> Trace | None:
        """Remove the response and return it as a trace; None if it is wrong or incomplete.

        Raises DataError for an episode in which the environment takes the first turn.
        """
        if record.reply is not None:
            return self._of_episode(record, *self._episodes.pop(record.seed))
        completion = self._completions.pop(record.seed)
        answer = self._answer(record, record.response)
        known = self._logprobs(answer.text, completion) if answer.may_be_kept else None
        return dataclasses.replace(answer, logprobs=known).trace() if answer.may_be_kept else None

    def _of_episode(self, record: SampleRecord, start: EpisodeStart, episode: Episode) -> Trace | None:
        turns = trace_turns(episode.completion, start.problem.data_source)
        answer = self._answer(record, joined_text(episode.completion))
        return dataclasses.replace(answer, turns=turns).trace() if answer.may_be_kept else None

    def _answer(self, record: SampleRecord, text: str) -> GradedAnswer:
        is_complete = record.finish_reason == FinishReason.STOP
        outcome = Outcome(record.outcome)
        return GradedAnswer(text, record.num_tokens, outcome, is_complete, _AUTHOR, self.model, self.decoding)

    def _logprobs(self, text: str, completion: Completion) -> tuple[float, ...] | None:
        """Log-probabilities of the sampled tokens; None where the text is tokenized differently."""
        if tuple(encode_traces(self.tokenizer, [text])[0]) != completion.token_ids:
            return None
        return tuple(min(value, 0.0) for value in completion.logprobs)  # rounding may leave 1e-9 above


@dataclass(frozen=True, slots=True)
class _RememberingEngine:
    """An engine that keeps each completion."""

    inner: RolloutEngine
    known: dict[int, Completion]

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """The engine's completions, all of them kept."""
        completions = self.inner.generate(requests, params)
        self.known.update(zip((request.seed for request in requests), completions, strict=True))
        return completions

    def close(self) -> None:
        """Free what the engine holds."""
        self.inner.close()


@dataclass(frozen=True, slots=True)
class RememberingPlayer:
    """A player that keeps each episode."""

    inner: EpisodePlayer
    known: dict[int, tuple[EpisodeStart, Episode]]

    def play(self, starts: Sequence[EpisodeStart], engine: RolloutEngine, params: SamplingParams) -> list[Episode]:
        """The player's episodes, all of them kept."""
        episodes = self.inner.play(starts, engine, params)
        self.known.update((start.seed, (start, episode)) for start, episode in zip(starts, episodes, strict=True))
        return episodes
