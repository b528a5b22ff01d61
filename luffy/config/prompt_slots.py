"""Prompt templates with named slots, such as `{trace}`, each of which occurs exactly once."""

import re
from collections.abc import Mapping


def check_slots(template: str, *names: str) -> None:
    """Raise ValueError unless every slot, such as `{trace}`, occurs in the template exactly once."""
    for name in names:
        if template.count(f"{{{name}}}") != 1:
            raise ValueError(f"template must have {{{name}}} once; it is {template!r}")


def fill_slots(template: str, texts: Mapping[str, str]) -> str:
    """The template with its slots filled. The texts themselves may hold braces or the name of a slot."""
    slots = "|".join(re.escape(f"{{{name}}}") for name in texts)
    return re.sub(slots, lambda slot: texts[slot[0][1:-1]], template)
