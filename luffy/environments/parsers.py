"""Readers of a turn of the policy, for environments of your own: the reply after the reasoning, and XML fields."""

from collections.abc import Sequence

from luffy.grading.extract import final_reply


def after_thinking(turn: str) -> str:
    """Return the text after the last `</think>`; all of it without reasoning, "" where the reasoning is unclosed."""
    return final_reply(turn) or ""


def xml_fields(text: str, fields: Sequence[str | tuple[str, ...]]) -> dict[str, str | None]:
    """Return what stands in the first element of each name, without outer white space; None where there is none.

    A tuple in `fields` lists alternatives, such as `("code", "answer")`: each of them is a key of the result.
    """
    names = [name for field in fields for name in ((field,) if isinstance(field, str) else field)]
    return {name: _first_element(text, name) for name in names}


def _first_element(text: str, name: str) -> str | None:
    _, opened, rest = text.partition(f"<{name}>")
    content, closed, _ = rest.partition(f"</{name}>")
    return content.strip() if opened and closed else None
