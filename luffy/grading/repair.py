r"""LaTeX commands whose backslash was read as the escape of a control character, put back.

`"\frac"` in a string that is not raw is a form feed and "rac"; JSON written by hand loses `\theta`, `\neq`, `\right`
and `\bar` the same way. The control character tells which letter is lost. Where it became a space or was dropped, only
fragments that are no English word and no product of variables are repaired (`extcirc`, `rac{1}{2}`).
"""

import re

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


def _broken(control: str) -> str:
    tails = sorted((name[1:] for name in _COMMANDS[control].split() if name[0] == _LETTERS[control]), key=len)
    return f"{re.escape(control)}(?:{'|'.join(reversed(tails))})(?![a-z])"


_BROKEN = re.compile("|".join(map(_broken, _COMMANDS)))
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
