"""Pages of the site that are not Markdown in docs/: every configuration field and command, notebooks, other folders."""

import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from luffy.cli.main import application
from luffy.config import ExperimentConfig
from luffy.config.many_runs.sweep_design import SweepDesign
from luffy.config.strict import field_docs

ROOTS: Mapping[str, type[BaseModel]] = {
    "An experiment": ExperimentConfig,
    "A grid, a comparison or a study": SweepDesign,
}
PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
ELSEWHERE: Mapping[str, str] = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "data/README.md": "data_sources.md",
    "deploy/README.md": "deployment.md",
    "deploy/offline/README.md": "offline.md",
    "exp_configs/README.md": "presets.md",
}
"""Files outside of docs/ and their pages."""
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    files.append(File.generated(config, "reference/configuration.md", content=configuration_page()))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    for notebook in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        content = notebook_page(notebook.read_text(encoding="utf-8"), notebook.name)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=content))
    for source, page in ELSEWHERE.items():
        text = (Path(config.docs_dir).parent / source).read_text(encoding="utf-8")
        for prefix in ("", "../", "../../"):
            text = text.replace(f"]({prefix}docs/", "](")
        files.append(File.generated(config, page, content=text.replace("](offline/README.md", "](offline.md")))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Lead links that work in a repository, to notebooks and to files outside of docs/, to their pages of the site."""
    markdown = re.sub(r"\]\((notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)
    for source, page in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown


def notebook_page(text: str, name: str) -> str:
    """An executed notebook with its outputs, as Markdown."""
    blocks = list[str]()
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            kind = next(each for each in ("image/png", "text/html", "text/plain") if each in data)
            shown = "".join(data[kind]).strip()
            if kind == "image/png":
                shown = f"![Output of the cell above](data:image/png;base64,{shown})"
            elif kind == "text/html":  # without its own style, and without empty lines, which would end it
                shown = re.sub(r"<style.*?</style>|(?<=<table)[^>]*|\n\s*(?=\n)", "", shown, flags=re.DOTALL)
            else:
                shown = f"```text\n{shown}\n```"
            blocks.append(shown)
    first, *rest = blocks
    return "\n\n".join([first, f"[The notebook]({name}), with its outputs:", *rest]) + "\n"


def configuration_page() -> str:
    """Every configuration class that a YAML file can reach, in the order in which fields name them."""
    text = "# Configuration\n\nGenerated from `luffy/config`. Every key is checked when a file is loaded.\n"
    seen: set[type[BaseModel]] = set()
    for title, root in ROOTS.items():
        text += f"\n## {title}\n"
        for model in reachable(root, seen):
            text += section(model)
    return text


def reachable(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """`model` and the models that its fields mention, each once, depth first."""
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        for mentioned in models_in(field.annotation):
            yield from reachable(mentioned, seen)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The model classes inside a type annotation."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from models_in(part)


def section(model: type[BaseModel]) -> str:
    """One class: its docstring and a table of its fields."""
    doc = inspect.cleandoc(model.__doc__ or "")
    docs = field_docs(model)
    rows = "".join(row(name, field, docs.get(name, "")) for name, field in model.model_fields.items())
    table = f"\n| key | value | default | meaning |\n|---|---|---|---|\n{rows}" if rows else ""
    return f"\n### {model.__name__} {{ #{model.__name__.lower()} }}\n\n{doc}\n{table}"


def row(name: str, field: FieldInfo, doc: str) -> str:
    """A line of the table."""
    default = "*required*" if field.is_required() else f"`{written(field.get_default(call_default_factory=True))}`"
    meaning = " ".join(doc.split())
    cells = (f"`{name}`", type_text(field.annotation, field.metadata), default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def written(value: Any) -> str:
    """A default as YAML would say it."""
    if isinstance(value, BaseModel):
        given = value.model_dump(exclude_defaults=True)
        return "{" + ", ".join(f"{key}: {written(part)}" for key, part in given.items()) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(written, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def type_text(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """A type as a reader of YAML would say it, with its bounds and links to other classes."""
    bounds = " ".join(f"{sign} {getattr(m, key)}" for m in metadata for key, sign in BOUNDS.items() if hasattr(m, key))
    return f"{_bare_type(annotation)} {bounds}".strip()


def _bare_type(annotation: Any) -> str:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{written(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_bare_type, arguments)))
    if origin in (tuple, list):
        return "list of " + " or ".join(dict.fromkeys(_bare_type(part) for part in arguments if part is not Ellipsis))
    if origin is not None and issubclass(origin, Mapping):
        return f"mapping to {_bare_type(arguments[1])}"
    return PLAIN.get(annotation, "any value")


def commands_page() -> str:
    """What `luffy COMMAND --help` prints, for every command."""
    text = "# Commands\n\nWhat `luffy COMMAND --help` prints; `python -m luffy` is the same program.\n"
    app = application()
    for name in typer.main.get_command(app).commands:
        shown = CliRunner().invoke(app, [name, "--help"], prog_name="luffy", env={"COLUMNS": "84", "NO_COLOR": "1"})
        assert shown.exit_code == 0, shown.output
        text += f"\n## luffy {name}\n\n```text\n{shown.output.strip()}\n```\n"
    return text
