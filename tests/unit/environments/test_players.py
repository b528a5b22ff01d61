"""Players are opened only where the chat template can write what the environment answers."""

import pytest

from luffy.config.environment import EpisodeLimits, History, ToolsEnvironment
from luffy.data.conversations import ConversationEncoder
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.registry import check_template
from luffy.errors import DataError

CHAT = (
    "{% for m in messages %}TOOL{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
RAISES = "{% if m.role == 'tool' %}{{ raise_exception('unknown role') }}{% endif %}"
ALTERNATES = (
    "{% if m.role == 'tool' and messages[loop.index0 - 1].role != 'assistant' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
DROPS = "{% if m.role == 'tool' %}{% continue %}{% endif %}"


def checked(calls: str, clause: str, history: History) -> None:
    tokenizer = build_tokenizer(["user assistant tool 0"] * 4)
    tokenizer.chat_template = CHAT.replace("TOOL", clause)
    limits = EpisodeLimits(history=history)
    config = ToolsEnvironment(kind="tools", tools=("calculator",), calls=calls, limits=limits)
    check_template(config, ConversationEncoder(tokenizer, history))


@pytest.mark.parametrize("history", ["exact", "as_sampled", "branching"])
@pytest.mark.parametrize(
    ("clause", "words"),
    [(RAISES, "unknown role"), (ALTERNATES, "roles must alternate"), (DROPS, "leaves out a message")],
)
def test_a_template_that_cannot_write_results_of_tools_is_refused(history: History, clause: str, words: str) -> None:
    with pytest.raises(DataError, match=f"results of tools are messages of the role tool: .*{words}") as caught:
        checked("llama3", clause, history)
    assert "\n" not in str(caught.value)
    checked("hermes", clause, history)  # whose results are messages of the user
    checked("llama3", "", history)
