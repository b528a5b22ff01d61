r"""Multiple choice: the letter that a final reply chooses.

It is looked for in this order: the last `\boxed{}`, the last `<answer>` (before the box where the prompt asks for it),
the last "answer: C" / "the answer is (C)" / "答案：C", a reply (or last line) that is only a label, "C is correct."
after all of these. Each may hold a label, a label with its option's text, or that text; a capital that is a label never
counts as the text of another option. Labels are digits where the reference is one. Text that repeats the question is
ignored, two labels or a denied one (`C is wrong`) count as none, and a last "the answer is" without a label withdraws
the earlier ones.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence

from luffy.grading.extract import BOX, TAG, answer_tag, boxed_answer, marked_answer, own_reply
from luffy.grading.request import Grade, GradeRequest, Problem
from luffy.types import Outcome

MAX_OPTIONS = 26
_CUE = re.compile(
    r"(?:answer|option|choice)(?:\s(?:option|choice))?"
    r"(?:\W{0,4}\s(?:is|would be|must be|should be)\b(?:\s?\*{0,2}\s?:)?|[\"']?\s?\*{0,2}\s?:)[ \t]{0,4}"
    r"|(?P<chinese>答案)(?:\s?[是为选])?\s?[:：]?\s?(?=\W{0,3}[A-Z])"
    r"|\bANSWER\s(?=\(?[A-Z]\b)",
    re.IGNORECASE,
)
_WRAPPING = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|sf)|mbox|boxed|operatorname)(?![A-Za-z])\s*"
    r"|[{}$*_`\"']|\\[(),;:! \[\]]"
)
_CALLED_RIGHT = re.compile(
    r"(?:^|(?<=[.!:\n])\s|\b(?:so|thus|hence|therefore|clearly),?\s)\W{0,4}"
    r"(?:(?:the )?(?:option|choice|answer|letter)\s)?\W{0,4}\b(?P<label>(?-i:[A-Z0-9]))\b\W{0,4}\sis\s"
    r"(?:(?:clearly|therefore|thus|indeed|also)\s)?(?:the\s)?(?:only\s|single\s|best\s)?(?:correct|right)"
    r"(?:\s(?:answer|option|choice|one))?\W{0,4}(?:[.!\n]|$|\s(?:because|since|as)\b)",
    re.IGNORECASE | re.MULTILINE,
)
"""Statements such as "So, B is the right answer."; "neither A nor B is correct" is none."""
_LEAD = re.compile(r"(?:(?:option|choice|answer|letter)\b\s*:?\s*)*", re.IGNORECASE)
_COMMAND = re.compile(r"\s*\\[A-Za-z]+\s*")
_SENTENCE_END = re.compile(r"\.\s|\n")
_DENIED = re.compile(r"[\s)]{0,3}(?:(?:is|was) (?:not|wrong|incorrect|false)|isn['’]t|cannot)\b", re.IGNORECASE)
"""After a label: it is not the answer."""
_WINDOW = 400
_REASONS = frozenset(("because", "since", "as", "due", "given", "for", "by", "with", "which", "where", "based"))
"""Words that may follow a bare label `A` or `I`; before any other word they are an article and a pronoun."""


def grade_choice(request: GradeRequest) -> Grade:
    """Grade a multiple-choice response; linear in its length."""
    count = min(len(request.problem.options), MAX_OPTIONS)
    labels = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: count or 10]
    if unicodedata.normalize("NFKC", request.ground_truth).strip(" ()[].").isdigit():
        labels = "123456789"[: count or None] + ("0" if not count else "")
    gold = _label_in(request.ground_truth, labels, ())
    if gold is None:
        return Grade(Outcome.UNPARSABLE, None, "the reference is no option's label")
    reply = own_reply(request.response, request.problem.question, False, request.problem.shown)
    if reply is None:
        return Grade(Outcome.NO_ANSWER, None, "the reasoning is not closed")
    first = None
    for sign, text in _phrases(reply, labels, request.problem):
        label = _label_in(text, labels, request.problem.options)
        if label is not None:
            outcome = Outcome.CORRECT if label == gold else Outcome.WRONG
            return Grade(outcome, label, f"label by {sign}")
        first = first or Grade(Outcome.UNPARSABLE, text[:80], f"{sign} names no single option")
    return first or Grade(Outcome.NO_ANSWER, None, "no option is named as the answer")


def _phrases(reply: str, labels: str, problem: Problem) -> Iterator[tuple[str, str]]:
    """Texts that may hold the answer, each with the sign that says so, the strongest first."""
    marked = marked_answer(reply, problem.in_tag)
    if marked is not None:
        yield marked.sign, marked.answer
    for sign, find in ((BOX, boxed_answer), (TAG, answer_tag)):
        if (marked is None or marked.sign != sign) and (text := find(reply)):
            yield sign, text
    if cue := _last_cue(reply, labels, problem.options):
        yield "'the answer is'", cue
    lines = [line for line in reply[-4 * _WINDOW :].splitlines() if line.strip()]
    last = lines[-1] if lines and len(lines[-1]) <= _WINDOW else ""
    if _BARE.fullmatch(_bare(last)) or (len(lines) == 1 and _LABELLED.match(_bare(last))):
        yield "the last line", last
    # The only label after the last cue that a statement calls right.
    cues = list(_CUE.finditer(reply))
    right = {match["label"] for match in _CALLED_RIGHT.finditer(reply, cues[-1].end() if cues else 0)}
    if len(right) == 1:
        yield "'is correct'", right.pop()


def _last_cue(reply: str, labels: str, options: Sequence[str]) -> str:
    """The text after the last cue. "this option is wrong" is not a cue, but "the right option is not C" is."""
    for cue in reversed(list(_CUE.finditer(reply))[-3:]):
        text = reply[cue.end() : cue.end() + _WINDOW].strip()
        sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
        is_cue = cue["chinese"] or cue[0][:6].casefold() == "answer" or re.search(rf"(?<!\w)[{labels}](?!\w)", sentence)
        if text and (is_cue or _label_in(text, labels, options) is not None):
            return text
    return ""


_LABELLED = re.compile(r"\(?[A-Z0-9](?:\)|[.:]\s)")
_BARE = re.compile(r"\(?\s*[A-Za-z0-9]\s*[).]?\.?")


def _bare(text: str) -> str:
    """The text without emphasis, dollar signs and LaTeX wrappers, and with full-width letters as plain ones."""
    return _WRAPPING.sub(" ", unicodedata.normalize("NFKC", text[:_WINDOW])).strip()


def _label_in(text: str, labels: str, options: Sequence[str]) -> str | None:
    """The single label at the beginning of `text`, or the label of the option whose text it is."""
    # The only option with this text, ignoring a full stop and further lines.
    wanted = {_plain(text), _plain(text.split("\n", 1)[0])} - {""}
    fitting = [index for index, option in enumerate(options) if _plain(option) in wanted]
    if len(fitting) == 1:
        # A bare label stays a label even if some option reads like it (C for carbon, I for a root of -1).
        read = _bare(text.split("\n", 1)[0]).strip(" ().")
        if len(read) == 1 and read in labels:
            return read
        return labels[fitting[0]] if fitting[0] < len(labels) else None
    bare = _LEAD.sub("", _bare(text), count=1)  # at the beginning: the pattern also matches the empty text
    found = re.match(rf"[(\[]?\s*([{labels}{labels.lower()}])[^\S\n]*([)\].:,]|(?![\w\-'’]))", bare)
    if found is None or _is_a_word(found.group(), bare[found.end() :]) or _goes_on(bare[found.end(1) :], labels):
        return None
    if _DENIED.match(bare, found.end(1)):
        return None
    return found.group(1).upper()


def _is_a_word(found: str, rest: str) -> bool:
    """Whether a label without brackets or full stop is a word: `a dog`, `I think`, or a small letter in a sentence."""
    if not found.strip().isalpha():
        return False
    words = _COMMAND.sub(" ", rest.split("\n", 1)[0]).split(None, 1)
    if found.strip().islower():
        return bool(words) and words[0][0].isalnum()
    return found.strip() in "AI" and bool(words) and words[0].isalpha() and words[0].casefold() not in _REASONS


def _goes_on(rest: str, labels: str) -> bool:
    """Whether a second label is named: next in the label's own sentence, or alone after it.

    A further sentence or line that says something about another option (`D is wrong`) does not name it.
    """
    parts = _SENTENCE_END.split(rest, maxsplit=1)
    if re.match(rf"\W{{0,4}}(?:(?:and|or|&)\b|[或和])?\W{{0,3}}[{labels}](?!\w)", _COMMAND.sub(" ", parts[0])):
        return True
    words = re.findall(r"\w+", parts[1]) if len(parts) > 1 else []
    return bool(words) and all(word in labels or word in ("and", "or") for word in words)


def _plain(text: str) -> str:
    return " ".join(_bare(text).casefold().split()).strip(" .()")
