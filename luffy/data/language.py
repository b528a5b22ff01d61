"""A coarse detector of a text's language, by script and most common words, for filtering a corpus."""

import re
from collections import Counter
from collections.abc import Collection

_SCRIPTS = {
    "ja": re.compile(r"[\u3040-\u30ff]"),
    "ko": re.compile(r"[\uac00-\ud7af]"),
    "ru": re.compile(r"[\u0400-\u04ff]"),
    "zh": re.compile(r"[\u4e00-\u9fff]"),
}
"""Scripts, in the order in which they are tried: Japanese text also contains Chinese characters."""
_SCRIPT_SHARE = 0.2
"""Minimum share of all letters for a script to count; formulas in a sentence add Latin letters."""
_COMMON = {
    "en": "the of and to in is that for are with by as be this from what how many find which has if each we so",
    "de": "der die das und ist nicht ein eine zu den mit von für auf dem im wie viele wenn sind werden auch wir",
    "es": "el los las que una por con para del es cuántos si son como se más cada hallar entonces cuál tiene",
    "fr": "le les des est une que dans pour qui sur avec par sont combien nous si alors soit chaque deux aux du",
    "it": "il che di è un una per con della sono quanti quale se gli più ogni nel trovare allora siano delle",
    "pt": "o os um uma que para com do da não é por são quantos se cada qual em mais seja então números dos",
}
_OWNERS: dict[str, list[str]] = {}
for _language, _text in _COMMON.items():
    for _word in _text.split():
        _OWNERS.setdefault(_word, []).append(_language)
_LETTERS = re.compile(r"[^\W\d_]")
_WORDS = re.compile(r"[^\W\d_]+")
_MAX_CHARACTERS = 20_000
_MIN_WORDS = 3


def language_of(text: str) -> str | None:
    """Return a two-letter code, or None where too little of the text is words (a formula, a number)."""
    text = text[:_MAX_CHARACTERS].casefold()
    letters = 0 if text.isascii() else len(_LETTERS.findall(text))
    for language, script in _SCRIPTS.items() if letters else ():
        if len(script.findall(text)) >= _SCRIPT_SHARE * letters:
            return language
    votes = Counter(owner for word in _WORDS.findall(text) for owner in _OWNERS.get(word, ()))
    if not votes or votes.most_common(1)[0][1] < _MIN_WORDS:
        return None
    return max(sorted(votes), key=lambda language: votes[language])


def is_foreign(text: str, allowed: Collection[str]) -> bool:
    """Whether the text shows a language that is none of `allowed`."""
    found = language_of(text)
    return found is not None and found not in allowed
