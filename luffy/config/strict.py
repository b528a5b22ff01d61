"""The base of every configuration class: strict types, unknown keys refused, immutable."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Configuration is validated once, at load time, and never changes afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
