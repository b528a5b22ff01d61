"""Files that configuration names: recipes, benchmarks and chat templates that ship with the project, and patterns."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data"
_RECIPE_FOLDERS = ("recipes", "benchmarks")


def template_file(chat_template: str) -> Path:
    """Return the file of a chat template given by shipped name (`qwen`, `luffy`, `r1_zero`, `none`) or by path."""
    shipped = DATA / "templates" / f"{chat_template}.jinja"
    return shipped if shipped.is_file() else Path(chat_template)


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes and benchmarks."""
    return sorted(file.stem for folder in _RECIPE_FOLDERS for file in (DATA / folder).glob("*.yaml"))


def recipe_file(name: str) -> Path | None:
    """Return the shipped recipe or benchmark of that name, if there is one."""
    files = [DATA / folder / f"{name}.yaml" for folder in _RECIPE_FOLDERS]
    return next((file for file in files if file.is_file()), None)


def benchmark_names() -> list[str]:
    """Return the names of the registered benchmarks (`data/benchmarks/`)."""
    return sorted(file.stem for file in (DATA / "benchmarks").glob("*.yaml"))


def published_files() -> list[Path]:
    """Return the tables of published results (`data/published/`)."""
    return sorted((DATA / "published").glob("*.yaml"))


def expand_pattern(path: str) -> list[Path]:
    """Return the files that a path or a pattern with `*` names, sorted; a plain path is returned unseen."""
    plain = Path(path).expanduser()
    if "*" not in path:
        return [plain]
    fixed = next(parent for parent in plain.parents if "*" not in str(parent))
    return sorted(fixed.glob(str(plain.relative_to(fixed))))
