"""A few words in the form of nltk's corpus, which textarena's Wordle otherwise downloads."""

import json
from collections.abc import Sequence
from pathlib import Path

WORDS = ["crane", "house", "table", "plant", "river", "stone", "light", "train"]


def write_words(folder: Path, words: Sequence[str] = WORDS) -> None:
    """Fill `folder`, the value of `NLTK_DATA`, with `words` and with a tagger that knows them as nouns."""
    corpus, tagger = folder / "corpora" / "words", folder / "taggers" / "averaged_perceptron_tagger_eng"
    for made in (corpus, tagger):
        made.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("\n".join(words))
    for name, content in {"weights": {}, "tagdict": dict.fromkeys(words, "NN"), "classes": ["NN"]}.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(content))
