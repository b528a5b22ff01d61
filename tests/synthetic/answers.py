"""Answers to grade: ordinary ones with their references, and hostile ones."""

import random

Pair = tuple[str, str]
"""Answer, reference."""


def ordinary_pairs(count: int, seed: int) -> list[Pair]:
    """Distinct answers of the forms that mathematics benchmarks have, some three quarters of them right."""
    luck = random.Random(seed)
    pairs: dict[str, Pair] = {}
    while len(pairs) < count:
        answer, gold = luck.choice(_FORMS)(luck)
        pairs[answer] = (answer, gold if luck.random() < 0.75 else luck.choice(_FORMS)(luck)[1])
    return list(pairs.values())


def _fraction(luck: random.Random) -> Pair:
    above, below, scale = luck.randint(1, 999), luck.randint(2, 99), luck.randint(2, 9)
    return rf"\frac{{{above * scale}}}{{{below * scale}}}", rf"\dfrac{{{above}}}{{{below}}}"


def _radical(luck: random.Random) -> Pair:
    factor, root = luck.randint(2, 60), luck.choice((2, 3, 5, 6, 7, 10, 11, 13))
    return rf"\sqrt{{{factor * factor * root}}}", rf"{factor}\sqrt{{{root}}}"


def _polynomial(luck: random.Random) -> Pair:
    a, b = luck.randint(1, 60), luck.randint(1, 60)
    return f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b}".replace("+-", "-")


def _interval(luck: random.Random) -> Pair:
    low, high = luck.randint(-99, 0), luck.randint(1, 99)
    return rf"\left[{low},\frac{{{high}}}{{3}}\right)", rf"[{low},\frac{{{2 * high}}}{{6}})"


def _tuple(luck: random.Random) -> Pair:
    a, b = luck.randint(1, 99), luck.randint(1, 99)
    return rf"\left({a}, \frac{{\pi}}{{{b}}}\right)", rf"({a},\pi/{b})"


def _integer(luck: random.Random) -> Pair:
    number = luck.randint(-9999, 99999)
    return str(number), str(number)


def _expression(luck: random.Random) -> Pair:
    a, b = luck.randint(2, 99), luck.randint(2, 99)
    return rf"{a}+{b}\pi", rf"{b}\pi+{a}"


_FORMS = [_fraction, _radical, _polynomial, _interval, _tuple, _integer, _expression]

TOWERS = (
    "9^{9^{9^{9}}}", "%d^{9^{9^9}}", "%d000000000!", r"\binom{10^9}{5\cdot 10^8}+%d",
    r"\sum_{k=1}^{1000000000} k^{k+%d}", r"\prod_{k=1}^{10000000} (k+%d)",
    r"\{" + ",".join(f"x_{{{n}}}" for n in range(200)) + r", %d\}",
    r"\cup".join(f"({n},{n + 1})" for n in range(0, 200, 2)) + r"\cup\{%d\}",
    r"\begin{vmatrix}"
    + r"\\".join("&".join(f"a_{{{r}{c}}}" for c in range(8)) for r in range(8))
    + r"\end{vmatrix}+%d",
    r"7^{7^{7^7}} \bmod %d",
)  # fmt: skip
"""Formulas that are short and never end; `%d` makes them distinct."""
ENDLESS = (
    r"(%d+\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{60}",
    r"\int e^{x^2}\sin(x^3)\ln(x+%d) dx",
    r"(x+%d)^{5000}",
)
"""Formulas that look ordinary and never end."""
_LARGE = (
    r"\sqrt{%d+" * 60 + "2" + "}" * 60, r"\frac{1}{%d+" * 30 + "x" + "}" * 30, "{" * 5000 + "%d",
    "}" * 3000 + r"\boxed{%d}", r"\boxed{" * 40 + "%d" + "}" * 40, "(" * 99 + "%d" + ")" * 99, "9" * 100_000 + "%d",
    "x" * 100_000 + "%d", r"\[" * 2000 + "%d", "$" * 3001 + "%d",
    r"\begin{pmatrix}" + r"\\".join("&".join("1" * 12) for _ in range(12)) + r"\end{pmatrix}+%d",
    r"\left[-\infty, %d" + r"\right) \cup [3, " * 60, "0." + "9" * 900 + "%d",
)  # fmt: skip
_STRANGE = (
    "٣%d", "３%d", "\ud800%d", "%d\x00", "\u202e%d\u202c", "%d\u200b\ufeff", "__import__('os').system('exit %d')",
    "def f():\n    while True: %d", "{{{%d", r"\frac{%d}{0}", r"\frac{}{%d}", r"\sqrt[0]{%d}", "%d🎉", "∞^∞+%d",
    r"\text{%d", "<think>%d", "%d</think>", "<answer>%d", r"\\boxed{%d}", "1e999999%d", "%d%%%%", "nan+%d",
    r"\infty-\infty+%d", r"\log_{1}{%d}", r"\lim_{x\to 0}\frac{%d}{x}", "%d;DROP TABLE answers",
)  # fmt: skip
_ALPHABET = "\\{}[]()^_$&,.+-*/=<>0123456789xyπ√ \n\t\x00!|%#~'\"éß٣\ud800"
_WORDS = [r"\frac", r"\sqrt", r"\boxed", r"\left(", r"\right)", r"\text", r"\cup", r"\infty", r"\pi", "<think>", *"^{}"]


def hostile_answers(count: int, seed: int, endless: int) -> list[str]:
    """Contents for a box: `endless` that are to be killed, towers, large and strange ones, and random text."""
    luck = random.Random(seed)
    made = [luck.choice(ENDLESS).replace("%d", str(n + 2)) for n in range(endless)]
    while len(made) < count:
        made.append(_hostile(luck))
    luck.shuffle(made)
    return made


def _hostile(luck: random.Random) -> str:
    number = str(luck.randint(1, 30))
    draw = luck.random()
    if draw < 0.05:
        return luck.choice(TOWERS).replace("%d", number)
    if draw < 0.06:
        return luck.choice(_LARGE).replace("%d", number)
    if draw < 0.55:
        return luck.choice(_STRANGE).replace("%d", number)
    if draw < 0.80:
        return "".join(luck.choices(_ALPHABET, k=luck.randint(0, 40)))
    return "".join(luck.choice(_WORDS) + luck.choice(_ALPHABET) for _ in range(luck.randint(1, 12)))
