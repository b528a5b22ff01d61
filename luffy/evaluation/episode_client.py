"""A model that answers an environment over several turns, as a client of the evaluator."""

import itertools
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import SuiteProtocol
from luffy.data.templates import decode, prompt_opener, stop_token_ids
from luffy.environments.episodes import Episode, EpisodePlayer, EpisodeStart
from luffy.environments.transcript import transcript
from luffy.evaluation.model_clients import render_as_ids, sampling_params
from luffy.evaluation.requests import RenderedPrompt, Response, SampleRequest
from luffy.grading import problem_of
from luffy.rollout.engine import Completion, RolloutEngine
from luffy.types import Prompt, Source


class EpisodeClient:
    """Plays an episode for every sample; its last turn is the reply that is graded."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, player: EpisodePlayer) -> None:
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
            text=self._opener + transcript(ids, source, self._text),
            num_tokens=source.count(Source.ON_POLICY),
            finish_reason=episode.finish_reason,
            reply=self._opener + self._text(last),
            measures=episode.measures,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids)


def _start(sample: SampleRequest) -> EpisodeStart:
    prompt = sample.prompt
    return EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, sample.rendered.ids, sample.seed)
