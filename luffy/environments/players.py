"""From the configuration of an environment to a player of its episodes."""

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EnvironmentConfig
from luffy.data.conversations import ConversationEncoder
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.registry import open_environment


def open_player(config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, lanes: int) -> EpisodePlayer:
    """A player of the environment's episodes; `lanes` as in `EpisodePlayer`.

    Raises ConfigError for an environment that cannot be loaded, and DataError for a chat template that rewrites earlier
    turns.
    """
    encoder = ConversationEncoder(tokenizer, keeps_history=config.limits.keeps_history)
    return EpisodePlayer(open_environment(config), encoder, config.limits, lanes)
