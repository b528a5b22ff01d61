"""Models that answer an environment over several turns, as clients of the evaluator."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EnvironmentConfig
from luffy.config.evaluation import SuiteProtocol
from luffy.data.templates import decode, prompt_opener, stop_token_ids
from luffy.environments.episodes import Episode, context_starts
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import open_player, open_text_player
from luffy.environments.text_episodes import TextEpisode, TextEpisodePlayer
from luffy.environments.transcript import headed, transcript
from luffy.evaluation.model_clients import (
    ModelClient,
    TextModelClient,
    TokenModelClient,
    render_as_ids,
    render_as_text,
    sampling_params,
)
from luffy.evaluation.requests import RenderedPrompt, Response, SampleRequest
from luffy.grading.judge import Judges
from luffy.grading.request import problem_of
from luffy.rollout.engine import Completion, RolloutEngine, SamplingParams
from luffy.rollout.text_endpoint import TextEndpoint
from luffy.types import Prompt, Source


def open_client(
    environment: EnvironmentConfig | None,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    lanes: int,
    judges: Judges,
) -> ModelClient:
    """A client of the engine: for episodes with an environment (the rest is `open_player`'s), or for single turns."""
    if environment is None:
        return TokenModelClient(engine, tokenizer)
    return EpisodeClient(engine, tokenizer, open_player(environment, tokenizer, lanes, judges))


def open_text_client(environment: EnvironmentConfig | None, endpoint: TextEndpoint, judges: Judges) -> ModelClient:
    """As `open_client`, for a model that answers with text."""
    if environment is None:
        return TextModelClient(endpoint)
    return TextEpisodeClient(endpoint, open_text_player(environment, judges))


class Player(Protocol):
    """Plays episodes; `luffy.environments.episodes.EpisodePlayer` does."""

    def play(self, starts: Sequence[EpisodeStart], engine: RolloutEngine, params: SamplingParams) -> list[Episode]:
        """One episode per start, in order."""
        ...


class EpisodeClient:
    """Plays an episode for every sample; its last turn is the reply that is graded."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, player: Player) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._player = player
        self._opener = prompt_opener(tokenizer)

    def render(self, prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        return render_as_ids(self._tokenizer)(prompts, template)

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """One response per sample, in order."""
        params = sampling_params(protocol, max_response_tokens, stop_token_ids(self._tokenizer))
        return map(self._response, self._player.play([_start(sample) for sample in samples], self._engine, params))

    def _response(self, episode: Episode) -> Response:
        source = [
            Source.ON_POLICY if isinstance(segment, Completion) else Source.ENVIRONMENT
            for segment in episode.segments
            for _ in segment.token_ids
        ]
        ids = list(itertools.chain.from_iterable(segment.token_ids for segment in episode.segments))
        last = episode.segments[-1].token_ids if episode.segments else ()
        return Response(
            text=self._opener
            + transcript(ids, source, self._text, episode.prompt_ids, context_starts(episode.segments)),
            num_tokens=source.count(Source.ON_POLICY),
            finish_reason=episode.finish_reason,
            reply=self._opener + self._text(last),
            measures=episode.measures,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)


class TextEpisodeClient:
    """An `EpisodeClient` for a model served by a text endpoint."""

    def __init__(self, endpoint: TextEndpoint, player: TextEpisodePlayer) -> None:
        self._endpoint = endpoint
        self._player = player

    def render(self, prompts: Sequence[Prompt], template: str) -> list[RenderedPrompt]:
        return render_as_text(prompts, template)

    def generate(
        self, samples: Sequence[SampleRequest], protocol: SuiteProtocol, max_response_tokens: int
    ) -> Iterable[Response]:
        """One response per sample, in order; the endpoint counts the tokens."""
        params = sampling_params(protocol, max_response_tokens, ())
        return map(_in_text, self._player.play([_start(sample) for sample in samples], self._endpoint, params))


def _in_text(episode: TextEpisode) -> Response:
    written = [
        (Source.ON_POLICY if message.role == "assistant" else Source.ENVIRONMENT, message.content)
        for message in episode.completion
    ]
    replies = [text for who, text in written if who is Source.ON_POLICY]
    return Response(
        text=headed(written),
        num_tokens=episode.num_tokens,
        finish_reason=episode.finish_reason,
        reply=replies[-1] if replies else "",
        measures=episode.measures,
    )


def _start(sample: SampleRequest) -> EpisodeStart:
    prompt = sample.prompt
    return EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, sample.rendered.ids, sample.seed)
