"""Opens players of episodes from the configuration of an environment."""

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EnvironmentConfig, single_environments
from luffy.data.conversations import ConversationEncoder
from luffy.environments.environment import EnvironmentFactory, ScoringEnvironment
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.mixed_episode import MixedEpisode
from luffy.environments.registry import open_environment, syntax_of_results
from luffy.environments.rubric import EpisodeScorer
from luffy.environments.text_episodes import TextEpisodePlayer
from luffy.errors import DataError
from luffy.grading.judge import Judges


def open_player(
    config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, lanes: int, judges: Judges
) -> EpisodePlayer:
    """A player of the environment's episodes; `lanes` as in `EpisodePlayer`, `judges` for measures that need one.

    Raises ConfigError for an environment that cannot be loaded, and DataError for a chat template that rewrites earlier
    turns or cannot write the results of tools.
    """
    encoder = ConversationEncoder(tokenizer, config.limits.history)
    check_template(config, encoder)
    make, scorer = open_scored(config, judges)
    return EpisodePlayer(make, encoder, config.limits, scorer, lanes)


def check_template(config: EnvironmentConfig, encoder: ConversationEncoder) -> None:
    """Raise DataError where the chat template cannot write the results of one call, or of two, of a tool."""
    for single in single_environments(config):
        if (syntax := syntax_of_results(single)) is None:
            continue
        for results in (["0"], ["0", "0"]):
            answer = syntax.results(results)
            try:
                encoder.between(answer)
            except DataError as error:
                role = answer[0].role
                raise DataError(
                    f"environment.calls: results of tools are messages of the role {role}: {error}"
                ) from None


def open_text_player(config: EnvironmentConfig, judges: Judges) -> TextEpisodePlayer:
    """A player for models that answer with text; ConfigError for an environment that cannot be loaded."""
    make, scorer = open_scored(config, judges)
    return TextEpisodePlayer(make, config.limits, scorer)


def open_scored(config: EnvironmentConfig, judges: Judges | None = None) -> tuple[EnvironmentFactory, EpisodeScorer]:
    """The factory of environments and the scorer of their episodes; ConfigError where one cannot be loaded."""
    make = open_environment(config)
    environment = make()
    scores_itself = isinstance(environment, ScoringEnvironment)
    if isinstance(environment, MixedEpisode):
        scores_itself = environment.scores_itself
    counted = tuple(environment.counts())
    of_parts = counted if isinstance(environment, MixedEpisode) else ()
    scorer = EpisodeScorer(config.scoring, counted, scores_itself=scores_itself, judges=judges, of_parts=of_parts)
    return make, scorer
