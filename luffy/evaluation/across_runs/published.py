"""Results that others have published, as reference rows: `data/published/*.yaml`, one file per table.

They are shown next to the rows of a workspace, without statistical tests, since their responses are not available.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt, ValidationError, model_validator

from luffy.config.fields import explain
from luffy.config.shipped import DATA
from luffy.config.strict import StrictModel
from luffy.config.yaml_source import read_yaml
from luffy.errors import ConfigError

Percent = Annotated[float, Field(ge=0.0, le=100.0)]


class PublishedBenchmark(StrictModel):
    """A column of a published table."""

    label: str
    problems: PositiveInt | None = None
    """Its number of problems; a suite with another number is a different benchmark. None: any number will do."""
    suites: tuple[str, ...] = Field(min_length=1)
    """Names that this benchmark may have among the suites of an experiment."""


class PublishedRow(StrictModel):
    """One model of a published table."""

    name: str
    accuracies: dict[str, Percent]


class PublishedTable(StrictModel):
    """A table of results from a paper."""

    title: str
    source: str
    """Its place in the paper, such as a table."""
    model: str
    """The model that all rows start from."""
    protocol: str
    """How they were evaluated, in words."""
    benchmarks: dict[str, PublishedBenchmark]
    rows: tuple[PublishedRow, ...]

    @model_validator(mode="after")
    def _rows_have_their_benchmarks(self) -> "PublishedTable":
        for row in self.rows:
            unknown = sorted(set(row.accuracies) - set(self.benchmarks))
            if unknown:
                raise ValueError(f"rows: {row.name} has {unknown[0]!r}, which is not among the benchmarks")
        return self

    def benchmark_of(self, suite: str, num_problems: int) -> str | None:
        """The table's benchmark that an evaluated suite is; None where it is none of them."""
        for name, benchmark in self.benchmarks.items():
            if suite in benchmark.suites and benchmark.problems in (None, num_problems):
                return name
        return None


def read_published(files: Sequence[Path] | None = None) -> tuple[PublishedTable, ...]:
    """The tables in `files`, by default those that ship with the project; ConfigError names file and field."""
    tables = []
    for path in sorted((DATA / "published").glob("*.yaml")) if files is None else files:
        values, origins = read_yaml(path)
        try:
            tables.append(PublishedTable.model_validate_json(json.dumps(values)))
        except ValidationError as error:
            raise ConfigError(explain(error, PublishedTable, origins, default_where=str(path))) from None
    return tuple(tables)
