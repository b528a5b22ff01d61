"""Where an environment of the package verifiers is, and with which arguments it is loaded."""

from pydantic import Field, JsonValue, PositiveFloat, SerializationInfo, SerializerFunctionWrapHandler, model_serializer

from luffy.config.strict import StrictModel, is_for_identity


class VerifiersPackage(StrictModel):
    """An environment of the package verifiers (0.1.9 to 0.3.1, or 0.4.0), which a separate Python interpreter has."""

    environment: str = Field(min_length=1)
    """Its id, as `vf-eval` takes it: `vf-wordle` is the module `vf_wordle`."""
    arguments: dict[str, JsonValue] = Field(default={})
    """Given to its `load_environment`. With 0.4.0: the configuration of the environment (`taskset`, its agent by name,
    ...), `select` for its tasks, and `eval: {taskset, select}` for those of the split `eval`."""
    version: int = Field(default=0, ge=0)
    """Its code is not part of a stage's identity: increase this when it changes."""
    python: str
    """The interpreter that has verifiers and the environment, e.g. `/opt/verifiers/bin/python`. Like `call_timeout_s`
    it is not part of a stage's identity."""
    call_timeout_s: PositiveFloat = 120.0
    """Limit of one answer or one score of the environment; starting it may take ten times as long."""

    def is_same_as(self, other: "VerifiersPackage") -> bool:
        """Whether both load the same environment in the same way."""
        named = ("environment", "arguments", "version", "python")
        return all(getattr(self, name) == getattr(other, name) for name in named)

    @model_serializer(mode="wrap")
    def _serialized(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        values = dump(self)
        if is_for_identity(info.context):  # where it is installed changes no result
            del values["python"], values["call_timeout_s"]
        return values
