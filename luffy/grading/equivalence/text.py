r"""Answers as text, before anything is read as mathematics: layout, presentation, exact numbers.

`unadorned` removes what only presents an answer, `readable` rewrites it into LaTeX that math-verify reads, and
`strict_text` drops all layout. `number` is the exact value of a number as text: `0.5`, `1/2`, `\frac12`, `50\%` and
`5\times10^{-1}` are equal.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from luffy.grading.extract import last_box

_LETTERS = {"\t": "t", "\n": "n", "\r": "r", "\f": "f", "\b": "b", "\v": "v", "\a": "a"}
_COMMANDS = {
    "\t": "textcirc textbf textit textrm text times theta tan tau triangle therefore tfrac to",
    "\n": "neq ne not notin nu nabla neg",
    "\r": "right rangle rfloor rceil rho Re rightarrow rbrace",
    "\f": "frac forall",
    "\b": "boxed bar begin beta binom big bigcup bmod bullet backslash mathbf",
    "\v": "varnothing varphi vec vee vert",
    "\a": "alpha approx angle arctan arcsin arccos arg",
}
_TAILS = {
    control: sorted((name[1:] for name in names.split() if name[0] == _LETTERS[control]), key=len, reverse=True)
    for control, names in _COMMANDS.items()
}
_BROKEN = re.compile(
    "|".join(f"{re.escape(control)}(?:{'|'.join(tails)})(?![a-z])" for control, tails in _TAILS.items())
)
_CONTROL = re.compile(r"[\t\n\r\f\v\x07\x08]")
_LOST = re.compile(r"(?<![A-Za-z\\])(?:(extcirc)(?![a-z])|(rac)(?=\s*\{[^{}]*\}\s*\{)|(ext)(?=\{)|(inom)(?=\{))")
_LOST_LETTER = {"extcirc": "t", "rac": "f", "ext": "t", "inom": "b"}
_CIRCLE = re.compile(r"\\textcirc(?![a-z])|\^?\s*\\textdegree(?![a-z])")


def repaired(text: str) -> str:
    r"""Return `text` with its broken commands whole, and `\textcirc` (which LaTeX lacks) as `\circ`."""
    if _CONTROL.search(text):
        text = _BROKEN.sub(lambda match: f"\\{_LETTERS[match[0][0]]}{match[0][1:]}", text)
    text = _LOST.sub(lambda match: f"\\{_LOST_LETTER[match[0]]}{match[0]}", text)
    return _CIRCLE.sub(lambda match: "^\\circ" if "degree" in match[0] else "\\circ", text)


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_CIRCLED = re.compile(r"([①-⒛⓪⓫-⓿❶-➓㉑-㉟㊱-㊿])(\s*(?=[①-⒛⓪⓫-⓿❶-➓㉑-㉟㊱-㊿]))?")
"""Numbers of statements; side by side they are several."""
_SIZES = re.compile(r"\\(?:[bB]igg?[lrm]?|middle)(?![A-Za-z])")
_SLANTED = re.compile(r"\\(?P<sign>le|ge)q(?:slant|q)(?![A-Za-z])")
_UPRIGHT_FUNCTION = re.compile(
    r"\\(?:text(?:rm|normal)?|mathrm|mbox|operatorname\*?)\s*\{\s*"
    r"(?P<name>arc(?:sin|cos|tan|cot)|(?:sin|cos|tan)h?|cot|csc|ln|log|lg|exp|gcd|lcm)\s*\}"
)
"""A function's name as text; `sec` is also a unit."""
_SYMBOLS = str.maketrans(
    {
        "π": r"\pi ",
        "∞": r"\infty ",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "−": "-",
        "–": "-",
        **dict.fromkeys("≤⩽≦", r"\le "),
        **dict.fromkeys("≥⩾≧", r"\ge "),
        "≠": r"\ne ",
        "∪": r"\cup ",
        "°": r"^\circ ",
    }
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_ROOT_IN_BRACKETS = re.compile(r"(?:\\|(?<![A-Za-z\\]))sqrt\s*\(([^()]*)\)")
_BASED = re.compile(r"\(([0-9]+)\)(?=_)")
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,3})(?![\w.])")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,;:!]|\{,\}|,\\!) ?(?=[0-9]{3}(?![0-9]))")
_BOLD = re.compile(r"\\(?:boldsymbol|bm|pmb)\s*\{([^{}]*)\}")
_EMPHASIS = re.compile(r"(?<![\w)\]}])\*\*(?=\S)([^*]+)(?<=\S)\*\*|^\s*\*\*([^*]*)$")
"""Two asterisks after an operand are a power, not emphasis."""
_POWER = re.compile(
    r"(?<=[\w)\]}])\s?\*\*\s?(?:([+-]?(?:[0-9]++(?:\.[0-9]++)?+|[A-Za-z](?![A-Za-z])))|\(([^()]*)\))(?!\s?\*\*)"
)
"""A power of a power is left alone: LaTeX defines no order for it."""


def readable(text: str) -> str:
    """Return `text` in LaTeX that math-verify reads; linear in its length."""
    text = _EMPHASIS.sub(lambda match: match[1] or match[2] or "", repaired(text))
    text = _POWER.sub(lambda match: f"^{{{match[1] or match[2]}}}", text)
    text = _UPRIGHT_FUNCTION.sub(r"\\\g<name> ", _SLANTED.sub(r"\\\g<sign> ", _SIZES.sub("", text)))
    text = _RAISED.sub(lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _CIRCLED.sub(lambda match: f"{unicodedata.numeric(match[1]):.0f}{'' if match[2] is None else ','}", text)
    text = _VULGAR.sub(lambda match: rf"\frac{{{unicodedata.normalize('NFKC', match[0]).replace('⁄', '}{')}}}", text)
    if not (text.isascii() and text.isprintable()):
        text = "".join(map(_plain, unicodedata.normalize("NFKC", text.replace("√", "\ue000")))).replace("\ue000", "√")
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text.translate(_SYMBOLS))
    text = _ROOT_IN_BRACKETS.sub(r"\\sqrt{\1}", text)
    text = _BASED.sub(r"\1", _BOLD.sub(r"\1", text))
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", _THOUSANDS.sub("", text))
    return _PI.sub(r"\\pi", text).strip()


def _plain(character: str) -> str:
    """The character; a digit of any script becomes ASCII, an invisible character or pictogram is dropped."""
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    kind = unicodedata.category(character)
    return character if kind not in ("Cf", "Cc", "Cs", "So") or character in "°\n\t\ue000" else ""


_SPACE = r"(?:\s|~|\\[ ,;:!]|\\q?quad(?![A-Za-z]))*"
_AROUND = re.compile(r"(?:\\(?:textcolor|color)\s*\{[^{}]*\}\s*|(?P<line>\\underline\s*))?\{")
"""A command whose last argument, or a group, may be the whole answer."""
_SWITCH = re.compile(
    r"\\(?:color\s*\{[^{}]*\}|(?:bf|rm|it|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z]))" + _SPACE
)
_TICK = re.compile(r"\\checkmark\s*$")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LETTER = re.compile(r"(?<!\\)\b[A-Za-z]")
_MAX_LAYERS = 4


def unadorned(text: str) -> str:
    """Return `text` without its presentation."""
    text = text.strip()
    for _ in range(_MAX_LAYERS):
        text = _peeled(text) or text
    return _BARE_COMMAND.sub(r"\\\1", text)


def _peeled(text: str) -> str:
    """`text` without one layer."""
    if tick := _TICK.search(text):
        return re.sub(_SPACE + r"\Z", "", text[: tick.start()])
    around = _AROUND.match(text)
    if around is not None and closes_at_the_end(text, around.end()):
        inside = text[around.end() : -1].strip()
        # Underlined letters are the digits of a number, and not their product.
        return text if around["line"] and _LETTER.search(inside) else inside
    switch = _SWITCH.match(text)
    return text[switch.end() :].strip() if switch is not None else text


def closes_at_the_end(text: str, start: int, opening: str = "{", closing: str = "}") -> bool:
    """Whether the group whose content begins at `start` ends with the text; escaped braces are not counted."""
    marks = _BRACE if opening == "{" else re.compile(f"{re.escape(opening)}|{re.escape(closing)}")
    depth = 1
    for mark in marks.finditer(text, start):
        depth += {opening: 1, closing: -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end() == len(text)
    return False


_REPLACED = {
    "\\frac": ("\\dfrac", "\\tfrac", "\\cfrac"),
    "": ("\\displaystyle", "US\\$", "\\$", "$", "€", "£", "¥", "₹", "\\!"),
    " ": ("\\,", "\\;", "\\:", "\\quad", "~"),
    ",": ("{,}",),
    ":": ("{:}",),
    "''": ("^{\\prime\\prime}",),
    "'": ("^{\\prime}", "^\\prime"),
    " for all ": ("\\forall",),
    "^\\circ": ("^{\\circ}",),
    "\\{": ("\\lbrace",),
    "\\}": ("\\rbrace",),
}
"""What `strict_text` writes for each of these, in this order."""
_BRACKET_SIZE = re.compile(r"\\(?:left|right)(?![A-Za-z])")
_RELATION = re.compile(r"\\(?P<sign>ne|le|ge)q(?![A-Za-z])")
_ESCAPED_SPACE = re.compile(r"(?<!\\)((?:\\\\)*)\\ ")
"""A backslash and a space; the second backslash of a matrix's row break is none."""
_STRAY_EMPHASIS = re.compile(r"(?<![\w)\]}])\*\*|\*\*$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textnormal|textrm|mbox|operatorname)\s*\{([^{}]*)\}")
_DOUBLED = re.compile(r"\\\\(?=(?:left|right|[dt]?frac|sqrt|pi|text|cdot|times|infty|le|ge)(?![a-z]))")
PERCENT_WORD = re.compile(r"(?<=[0-9])\s*(?:percentage|percent|pct)$")
_DEGREE_WORD = re.compile(r"(?<=[0-9}])\s*deg(?:rees?)?(?=\s*(?:$|[,;)\]]|\\\}|(?:and|or)\b))")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_VARIABLE = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*=\s*(?=[^=]+$)")
_BARE_COMMAND = re.compile(r"(?<![A-Za-z\\])(sqrt|d?frac)(?=\s*\{)")
"""A command without its backslash."""
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_TIMES_TEN = re.compile(r"(.+?)(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([+-]?[0-9]{1,3})\s*\}?")
_EXPONENT = re.compile(r"([+-]?[0-9.]+)[eE]([+-]?[0-9]{1,3})")
_FRACTION = re.compile(r"([+-]?)\s*\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_MIXED = re.compile(r"([+-]?)\s*([0-9]+)\s*(?:\\frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}|\s([0-9]+)/([0-9]+))")
MAX_EXPONENT = 400


@lru_cache(maxsize=256)
def strict_text(text: str) -> str:
    """Return `text` without its layout."""
    text = _BARE_COMMAND.sub(r"\\\1", readable(_DOUBLED.sub(r"\\", text)))
    text = _RELATION.sub(r"\\\g<sign>", _BRACKET_SIZE.sub("", text))
    for replacement, layout in _REPLACED.items():
        for found in layout:
            text = text.replace(found, replacement)
    text = _STRAY_EMPHASIS.sub(" ", _TEXT.sub(r" \1 ", _ESCAPED_SPACE.sub(r"\1 ", text)))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = " ".join(text.split()).removesuffix(".").strip()
    return _DEGREE_WORD.sub(r"^\\circ", PERCENT_WORD.sub(r"\\%", text))


def without_variable(text: str) -> str:
    """Return the right-hand side of `x = ...`; `text` itself where it is not such an equation."""
    return _VARIABLE.sub("", text)


def compact(text: str) -> str:
    """Return `text` without spaces, except where two words or digits would run together."""
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])|(?<=[0-9]) (?=[A-Za-z])|(?<=[A-Za-z]) (?=[0-9])", "", text)


def without_unit(text: str) -> tuple[str, str]:
    """Return `text` and the word of a unit after its number; degrees are a unit."""
    if text.endswith("^\\circ"):
        angle = text.removesuffix("^\\circ")
        return (angle, "degrees") if number(angle) is not None else (text, "")
    return split_noun(text)


def number(text: str) -> Fraction | None:
    """Return the exact value of a number as text; None for anything else."""
    text = text.strip()
    if text.endswith("\\%") or text.endswith("%"):
        part = number(text.removesuffix("%").removesuffix("\\"))
        return None if part is None else part / 100
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := _TIMES_TEN.fullmatch(text) or _EXPONENT.fullmatch(text):
        base, exponent = number(match[1]), int(match[2])
        return None if base is None or abs(exponent) > MAX_EXPONENT else base * Fraction(10) ** exponent
    if match := _MIXED.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        return None if below == 0 else _signed(match[1], Fraction(int(match[2])) + Fraction(above, below))
    if match := _FRACTION.fullmatch(text):
        return _quotient(match[1], match[2], match[3])
    head, slash, tail = text.partition("/")
    if slash and "/" not in tail:
        return _quotient("", head, tail)
    return None


def _quotient(sign: str, above: str, below: str) -> Fraction | None:
    top, bottom = number(above), number(below)
    return None if top is None or not bottom else _signed(sign, top / bottom)


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


_METRIC = """
m meter meters metre metres; g gram grams; s sec second seconds; l L liter liters litre litres; W watt watts;
N newton newtons; J joule joules; Hz hertz; V volt volts; Pa pascal pascals; K kelvin; A amp amps ampere amperes;
T tesla; G gauss; C coulomb coulombs; F farad farads; H henry; ohm ohms; M molar; mol mole moles; Da dalton daltons;
eV electronvolt electronvolts; cal calorie calories; bar bars; pc parsec parsecs; yr yrs year years; B byte bytes
"""
_OTHERS = """
in inch inches; ft foot feet; yd yard yards; mi mile miles; oz ounce ounces; lb lbs pound pounds; min minute minutes;
h hr hrs hour hours; day days; week weeks; month months; mph; gallon gallons; dollar dollars; cent cents; euro euros;
degree degrees deg; rad radian radians; AU; ly; atm atmosphere atmospheres; u amu; dB; dyn dyne dynes; erg ergs; ppm;
um micron microns micrometer micrometers micrometre micrometres; angstrom angstroms; torr; Msun; Lsun; Rsun
"""
_PREFIX_NAMES = "- - p pico n nano u micro m milli c centi d deci k kilo M mega G giga T tera P peta"
_PREFIXES = _PREFIX_NAMES.split()
_PREFIXED = [
    " ".join((prefixes[len(spelling) > 3] + spelling).strip("-") for spelling in line.split())
    for prefixes in zip(_PREFIXES[::2], _PREFIXES[1::2], strict=True)
    for line in _METRIC.split(";")
]
UNITS = {spelling: at for at, line in enumerate(_PREFIXED + _OTHERS.split(";")) for spelling in line.split()}
"""Known units: each spelling with the number of its unit."""
SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_QUALIFYING = """
not no none never more less fewer greater than between except without half over under above below exceeds exceed neither
nor cannot otherwise am pm quarter twice double minus plus
"""
QUALIFIERS = frozenset((*_QUALIFYING.split(), "at least", "at most"))
"""Words that change the meaning of the number beside them."""
_WORD = re.compile(r"[A-Za-z]+(?:_[a-z]+)?")
_HALF_OF_DAY = re.compile(r"(?<=[0-9])\s*([apAP])\.?\s?[mM]\b\.?")
_SEGMENT = re.compile(r"(?<![A-Za-z])[A-Z]{2}(?![A-Za-z])")
_TRAILING = re.compile(
    r"(?P<value>.*[0-9)}\]!]|.*\\pi)(?P<space>\s*)(?P<noun>[A-Za-z一-鿿]{1,20}(?:\s*\^\s*\{?-?[0-9]\}?)?"
    r"(?:(?:\s*/\s*|\s+)[A-Za-z一-鿿]{1,20}(?:\s*\^\s*\{?-?[0-9]\}?)?){0,5})",
    re.DOTALL,
)
_UNIT_OF_LETTER = re.compile(
    r"(?P<value>.*[A-Za-z}])(?P<space>\s+)(?P<noun>[A-Za-z]{2,20}(?:\s*\^\s*\{?[0-9]\}?)?)", re.DOTALL
)
_POWERS = re.compile(r"\b(square|sq|cubic|cu)\.?\s+([A-Za-z]+)")
_PART = re.compile(r"([A-Za-z一-鿿]+)(?:\s*\^\s*\{?(-?[0-9])\}?)?")
_ANY_LETTERS = re.compile("[A-Za-z]+")
_SINGLE = frozenset("mgsLNJWVKhl")
"""Units of one letter."""
_SHORT_UNITS = "sq cu th st nd rd mm cm dm km nm in ft yd mi mg kg oz lb ms hr kW kJ Hz Pa MB GB ml mL"
_SHORT = frozenset(_SHORT_UNITS.split())
"""What two letters after a number may be besides products, `_SPACED` only after a space."""
_SPACED = frozenset(("eV", "yr", "AU"))
_IDLE = frozenset(("unit", "units", "of", "the", "a", "an", "total", "way", "ways"))


def words(text: str) -> list[str]:
    """The words of `text` in small letters, commands and segments (`AM`) left out; "p.m." and "at least" are one."""
    plain = _HALF_OF_DAY.sub(lambda match: f" {match[1].lower()}m", re.sub(r"\\[A-Za-z]+", " ", text))
    plain = re.sub(r"\bat\s+(least|most)\b", r"at_\1", _SEGMENT.sub(" ", plain).lower())
    return [word.replace("_", " ") for word in _WORD.findall(plain) if len(word) > 1]


def split_noun(text: str) -> tuple[str, str]:
    r"""Return a value and the unit or noun after it, which is empty where there is none.

    `\frac{\pi}{6}` is in radians whether it says so or not.
    """
    match = _TRAILING.fullmatch(text)
    # After a command a space says nothing.
    if match is None or not is_noun(match["noun"], bool(match["space"]) and not match["value"].endswith("\\pi")):
        match = _UNIT_OF_LETTER.fullmatch(text)
        if match is None or _ANY_LETTERS.findall(match["noun"])[0] not in UNITS:
            return text, ""
    value, noun = match["value"].strip(), match["noun"].strip()
    return value, "" if "\\pi" in value and UNITS.get(noun) == UNITS["rad"] else noun


def without_groups(text: str) -> str:
    """Return `1200 people` for `1,200 people`: a number that stands before a noun without its commas."""
    value, noun = split_noun(text)
    return f"{value.replace(',', '')} {noun}" if noun and _GROUPED.fullmatch(value) else text


def is_noun(letters: str, is_spaced: bool) -> bool:
    """Whether letters after a value are a unit or a noun; a few letters are a product of variables (`2ab`, `2 m n`).

    `is_spaced`: a space stands before them, without which `5m` and `3xyz` are products.
    """
    found = _ANY_LETTERS.findall(letters)
    if not letters.isascii():
        return True
    if all(len(word) == 1 for word in found):
        return is_spaced and found[0] in _SINGLE and (len(found) == 1 or "/" in letters)
    if len(found[0]) == 2:
        return found[0] in _SHORT or (is_spaced and found[0] in _SPACED)
    return is_spaced or found[0] in UNITS or len(found[0]) > 3


def canonical_unit(noun: str) -> tuple[tuple[int | str, int], ...]:
    """The factors of a unit with their powers: `km/h`, `cm^2` and `square centimeters`; any noun is a factor."""
    powers = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
    noun = _POWERS.sub(lambda match: f"{match[2]}^{powers[match[1]]}", noun)
    noun = re.sub(r"\bper\b", "/", noun)
    factors: list[tuple[int | str, int]] = []
    for position, part in enumerate(noun.split("/")):
        for word, power in _PART.findall(part):
            if word.lower() in _IDLE and word not in UNITS:
                continue
            factor: int | str = UNITS.get(word, word)
            if word not in UNITS and len(word) > 2:
                factor = UNITS.get(word.lower(), word.lower().removesuffix("s"))
            factors.append((factor, int(power or 1) * (-1 if position else 1)))
    return tuple(sorted(factors, key=str))


def units_differ(left: str, right: str) -> bool:
    """Whether both nouns are there and differ, at least one of them being a known unit."""
    one, other = canonical_unit(left), canonical_unit(right)
    is_known = any(all(isinstance(factor, int) for factor, _ in unit) for unit in (one, other))
    return bool(one and other) and one != other and is_known


_UPRIGHT = r"\\(?:text(?:rm|normal)?|mathrm|mbox)\s*\{(?:[^{}]|\{[^{}]*\})*\}(?:\s*\^\s*(?:\{-?[0-9]\}|[0-9]))?"
_UPRIGHT_UNIT = re.compile(
    r"(?<=[0-9)}])(?:(?:\s|~|/|·|\\[ ,;:!]|\\cdot(?![a-z])|\\mu(?![a-z]))*"
    rf"(?:{_UPRIGHT}|\\Omega|\\AA|[ΩÅ]|(?:\\mu\s*|[μµ])m))+"
    r"(?=[\s.]*(?:$|[$,;)\]]|\\\}))"
)
_UNIT_QUOTIENT = re.compile(
    rf"\\[dt]?frac\s*\{{\s*({_UPRIGHT})\s*\}}\s*\{{\s*((?:{_UPRIGHT}(?:\s|\\cdot|\\[ ,])*)+)\}}"
)
_SOLAR = re.compile(r"(?:\\(?:text|mathrm)\s*\{)?\s*([MLR])\}?_\s*\{?\s*\\odot\s*\}*")
_SIGNS = r"\\mu(?![a-z])|\\Omega|\\AA|[ΩÅμµ]"
_PLAIN_UNIT = re.compile(rf"(?<=[0-9)}}\s])(?!e[-+]?[0-9])(?:{_SIGNS}|[A-Za-z])(?:{_SIGNS}|[A-Za-z0-9/^{{}}()·\s-])*$")
_GREEK_UNITS = {
    r"\\mu(?![a-z])\s*(?:\\(?:text|mathrm)\s*\{)?|[μµ]": "u",
    r"\\Omega|Ω": "ohm",
    r"\\AA|Å": "angstrom",
    r"\\(?:cdot|[a-z]+\s*\{|[ ,;:!])|[{}~·]|(?<=/)\s*\(|\)": " ",
}
_UNIT_FACTORS = re.compile(r"(?:[\s/]*[A-Za-z]+(?:\s*\^\s*-?[0-9])?)+[\s.]*")
_SHORT_WORDS = "i e am AM PM or and if is as so to no of on it at by all any odd"
_NO_UNITS = frozenset(_SHORT_WORDS.split())
_OTHER_LETTERS = re.compile(r"\\\$|\\(?:text|math|mbox)|(?<![A-Za-z\\])[A-Za-z]+(?:\s*\^\{?-?[0-9]\}?)?$")
"""Letters that may be a unit in another notation."""
_ARC = re.compile(r"\\pi(?![a-z])|π|(?<![A-Za-z\\])pi(?![A-Za-z])")
_ANGLE = re.compile(r"circ(?![a-z])|°|\bdeg(?:rees?)?\b|\\textdegree")
Unit = tuple[tuple[int | str, int], ...]


def without_upright_units(answer: str, gold: str) -> tuple[str, str] | None:
    """Return both texts without upright units that both have or only one; None if their units differ.

    Upright letters after a number are a unit, never a product of variables: `5\\text{ T}`, `1.6\\,\\mu\\mathrm{m}`.
    """
    if any(_ARC.search(one) and _ANGLE.search(other) for one, other in ((answer, gold), (gold, answer))):
        return answer, gold  # an angle in radians beside one in degrees
    (bare, found), (reference, wanted) = _upright_units(answer), _upright_units(last_box(gold) or gold)
    for units, text in ((found, reference), (wanted, bare)):
        if units and ("%" in text or ("\\circ" in text and set(units) != {canonical_unit("degrees")})):
            return None
    if found and wanted and set(found) != set(wanted):
        is_known = any(isinstance(factor, int) for unit in (*found, *wanted) for factor, _ in unit)
        return None if is_known else (answer, gold)
    if len(set(found)) > 1 and wanted:
        return answer, gold  # which belongs to which
    for units, text, others in ((found, answer, wanted), (wanted, gold, found)):
        if not units and _OTHER_LETTERS.search(text.strip(" .$")):
            value, plain = _upright_units(_PLAIN_UNIT.sub(lambda match: rf"\text{{{match[0]}}}", text.strip(" .$")))
            if not plain or set(plain) != set(others):
                return answer, gold
            return (value, reference) if text is answer else (bare, value)
    return bare, reference if wanted else gold


def _upright_units(text: str) -> tuple[str, list[Unit]]:
    """The text without its upright units, and these; unchanged where other upright text remains."""
    plain = _SOLAR.sub(r"\\text{\1sun}", _UNIT_QUOTIENT.sub(r"\1/\2", text))
    bare = _UPRIGHT_UNIT.sub("", plain)
    if bare == plain or "\\text" in bare or "\\math" in bare or "\\circ" in bare:
        return text, []
    units = []
    for unit in _UPRIGHT_UNIT.findall(plain):
        for written, letters in _GREEK_UNITS.items():
            unit = re.sub(written, letters, unit)
        if not _UNIT_FACTORS.fullmatch(unit) or any(
            word in _NO_UNITS or (len(word) > 2 and word not in UNITS) for word in _ANY_LETTERS.findall(unit)
        ):
            return text, []
        units.append(canonical_unit(unit))
    return bare, units
