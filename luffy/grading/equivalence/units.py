"""Units and nouns after a number, and words that change its value."""

import re

_SPELLINGS = """
mm millimeter millimeters millimetre millimetres; cm centimeter centimeters centimetre centimetres;
dm decimeter decimeters decimetre decimetres; m meter meters metre metres; km kilometer kilometers kilometre kilometres;
in inch inches; ft foot feet; yd yard yards; mi mile miles; nm nanometer nanometers;
mg milligram milligrams; g gram grams; kg kilogram kilograms;
oz ounce ounces; lb lbs pound pounds; ms millisecond milliseconds; s sec second seconds; min minute minutes;
h hr hrs hour hours; day days; week weeks; month months; year years; W watt watts; kW kilowatt kilowatts;
N newton newtons; J joule joules; kJ kilojoule kilojoules; Hz hertz; kHz kilohertz; V volt volts; Pa pascal pascals;
K kelvin; mph; MB megabyte megabytes; GB gigabyte gigabytes;
ml mL milliliter milliliters millilitre millilitres; l L liter liters litre litres; gallon gallons;
dollar dollars; cent cents; euro euros; degree degrees; rad radian radians
"""
UNITS = {spelling: number for number, line in enumerate(_SPELLINGS.split(";")) for spelling in line.split()}
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
    r"(?P<value>.*[0-9)}\]!]|.*\\pi)(?P<space>\s*)(?P<noun>[A-Za-z]{1,20}(?:\s*\^\s*\{?[0-9]\}?)?"
    r"(?:(?:\s*/\s*|\s+)[A-Za-z]{1,20}(?:\s*\^\s*\{?[0-9]\}?)?){0,5})",
    re.DOTALL,
)
_POWERS = re.compile(r"\b(square|sq|cubic|cu)\.?\s+([A-Za-z]+)")
_PART = re.compile(r"([A-Za-z]+)(?:\s*\^\s*\{?([0-9])\}?)?")
_LETTERS = re.compile("[A-Za-z]+")
_SINGLE = frozenset("mgsLNJWVKhl")
"""Units of one letter."""
_SHORT = frozenset(("sq", "cu", "th", "st", "nd", "rd"))
"""What two letters after a number may be besides units and products."""
_IDLE = frozenset(("unit", "units", "of", "the", "a", "an", "total", "way", "ways"))


def words(text: str) -> list[str]:
    """The words of `text` in small letters, commands and segments (`AM`) left out; "p.m." and "at least" are one."""
    plain = _HALF_OF_DAY.sub(lambda match: f" {match[1].lower()}m", re.sub(r"\\[A-Za-z]+", " ", text))
    plain = re.sub(r"\bat\s+(least|most)\b", r"at_\1", _SEGMENT.sub(" ", plain).lower())
    return [word.replace("_", " ") for word in _WORD.findall(plain) if len(word) > 1]


def split_noun(text: str) -> tuple[str, str]:
    """Return a value and the unit or noun after it, which is empty where there is none."""
    match = _TRAILING.fullmatch(text)
    # After a command a space says nothing.
    if match is None or not is_noun(match["noun"], bool(match["space"]) and not match["value"].endswith("\\pi")):
        return text, ""
    return match["value"].strip(), match["noun"].strip()


def is_noun(letters: str, is_spaced: bool) -> bool:
    """Whether letters after a value are a unit or a noun; a few letters are a product of variables (`2ab`, `2 m n`).

    `is_spaced`: a space stands before them, without which `5m` and `3xyz` are products.
    """
    found = _LETTERS.findall(letters)
    if all(len(word) == 1 for word in found):
        return is_spaced and found[0] in _SINGLE and (len(found) == 1 or "/" in letters)
    return found[0] in UNITS or found[0] in _SHORT or len(found[0]) > (2 if is_spaced else 3)


def canonical_unit(noun: str) -> tuple[tuple[int | str, int], ...]:
    """The factors of a unit with their powers: `km/h`, `cm^2` and `square centimeters`; any noun is a factor."""
    powers = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
    noun = _POWERS.sub(lambda match: f"{match[2]}^{powers[match[1]]}", noun)
    noun = re.sub(r"\bper\b", "/", noun)
    factors: list[tuple[int | str, int]] = []
    for position, part in enumerate(noun.split("/")):
        for word, power in _PART.findall(part):
            if word.lower() in _IDLE:
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
