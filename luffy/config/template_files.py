"""`evaluation.template: PATH` becomes the text of that file, before anything is validated.

So the text itself is in the settings, and in every identity that depends on it; the path is not.
"""

from pathlib import Path

from luffy.config.evaluation import QUESTION_SLOT, TEMPLATES
from luffy.config.yaml_source import KeyPath, Value
from luffy.errors import ConfigError
from luffy.files import refuse_special

_FIELD = "template"


def resolve_template_files(values: dict[str, Value], origins: dict[KeyPath, str], default_where: str) -> None:
    """Replace every template of `evaluation` that names a file, in place, by the file's text.

    A single line break at the end of the file is left out. Raises ConfigError, naming the line, for a file that cannot
    be read or lacks the slot of the question.
    """
    evaluation = values.get("evaluation")
    if not isinstance(evaluation, dict):
        return
    suites = evaluation.get("suites")
    suites = suites if isinstance(suites, dict) else {}
    sections: dict[KeyPath, Value] = {("evaluation",): evaluation}
    sections |= {("evaluation", "suites", name): suite for name, suite in suites.items()}
    for path, section in sections.items():
        template = section.get(_FIELD) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(template, str) and _names_file(template):
            where = origins.get((*path, _FIELD), default_where)
            section[_FIELD] = _text(Path(template).expanduser(), f"{where}: {'.'.join(path)}.{_FIELD}")


def _names_file(template: str) -> bool:
    is_text = QUESTION_SLOT in template or "\n" in template
    return template not in TEMPLATES and not is_text and ("/" in template or bool(Path(template).suffix))


def _text(path: Path, where: str) -> str:
    try:
        refuse_special(path)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{where}: {path}: no such file; relative paths start at {Path.cwd()}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"{where}: {path}: cannot be read ({reason})") from None
    if text.count(QUESTION_SLOT) != 1:
        raise ConfigError(
            f"{where}: {path}: must have {QUESTION_SLOT} once, where the question goes; it has it "
            f"{text.count(QUESTION_SLOT)} times"
        )
    return text.removesuffix("\n")
