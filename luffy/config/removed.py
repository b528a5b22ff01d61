"""Settings that earlier versions had: the line for who still gives one, and the reading of files that have one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from luffy.config.yaml_source import KeyPath, Value

_TEACHERS = (
    "teachers are authors of the stage sample: write the fields of this section below sample, as sample.teachers"
)
_OWN_CODE = (
    "modules of your own and what they import of your own count by their content; give a file that they open a new "
    "name when it changes"
)
_SANDBOX = "what can be set is call_cpu_s, call_wall_s, memory_mib and max_threads; remove it"
_SERVERS = "engines on servers elsewhere are gone; cluster: ray has engines on other machines"
_MEASURED = "the section difficulty chooses prompts by a policy's pass rates"
_STEPS = "give optimizer_steps; tokens and rollouts are reported as costs"
_BUCKETS = "buckets are drawn as in the ExGRPO paper; remove it"
_COUNTED = "runs of 13 words are compared, half of which are enough; remove it"
_LIMITS = {
    "interrupt_grace_s": 1.0, "session_cpu_s": 120.0, "session_wall_s": 3600.0, "tmp_mib": 64, "file_mib": 64,
    "max_files": 2000, "max_open_files": 64, "shown_output_bytes": 8192, "printed_bytes": 1 << 20,
}  # fmt: skip
_CELLS = "give each situation as a cell: cells: {NAME: {label: TEXT, overrides: [KEY=VALUE]}}"
_STARTS = "what rows are given stands in one place, as in the presets of exp_configs/methods: objective.group.starts:"


class Removed(NamedTuple):
    """A field that is gone."""

    default: Value
    """The value with which it had no effect."""
    instead: str
    """What to do now."""


REMOVED: Mapping[str, Removed] = {
    "attention": Removed("sdpa", "it is torch's own, and packing decides what a call attends to; remove it"),
    "filters.difficulty": Removed(None, _MEASURED),
    "filters.difficulty_boundary_tokens": Removed(None, _MEASURED),
    "expert_iteration": Removed(
        None,
        "the chain repeats its rounds: stages.rounds.repeat=3; with stages.rounds.stages.sft.inputs=null each goes on "
        "from the one before",
    ),
    "difficulty.policy": Removed(
        "base", "the newest policy is measured: put difficulty behind the stage that makes it"
    ),
    "group_measures": Removed(
        {},
        "nor is there luffy.environments.relative:shortest_correct; weigh what a single episode has (measures, tokens, "
        "turns), for example weights: {answer: 1.0, tokens: -0.001}",
    ),
    "mlflow": Removed(None, "tracking.wandb and tracking.tensorboard show a run, and metrics.jsonl has its numbers"),
    "offload_parameters": Removed(
        False, "weights stay on the GPU: use zero_stage: 3 on more ranks, or offload_optimizer"
    ),
    "rl.teacher": Removed(None, "teachers have names: rl.teachers={teacher: {kind: model, path: FOLDER}}"),
    "rl_teacher": Removed({}, "servers go by the names of rl.teachers: execution.rl_teachers.NAME.urls=[URL]"),
    "replay_traces": Removed("off", "training traces of many turns are taken as recorded; remove it"),
    "sequence_parallel": Removed(
        1, "every rank has whole sequences: use gradient_checkpointing, zero_stage: 3 or a lower micro_batch_tokens"
    ),
    "synthesize": Removed(None, _TEACHERS),
    "synthesis": Removed(None, _TEACHERS),
    "unsafe_local": Removed(False, "model-written code runs under bubblewrap alone (apt-get install bubblewrap)"),
    "sft.max_tokens": Removed(None, "give sft.epochs or sft.steps"),
    "rl.max_tokens": Removed(None, "give rl.steps"),
    **{f"budget.{name}": Removed(None, _STEPS) for name in ("tokens", "rollouts", "max_optimizer_steps")},
    "sft_tokens": Removed(None, "give sft_steps"),
    "dashboard": Removed(False, "ray start --head starts a cluster with its dashboard: give execution.ray.address"),
    "connect_timeout_s": Removed(10.0, "servers have ten seconds to accept a connection; remove it"),
    "log_level": Removed("info", "log.txt of a stage has its messages from the level INFO on; remove it"),
    "advantage.off_policy_scale": Removed(1.0, "give the terms on off-policy tokens a coefficient"),
    "advantage.on_policy_scale": Removed(1.0, "give the terms on on-policy tokens a coefficient"),
    "replay.bucket_mean": Removed(0.5, _BUCKETS),
    "replay.bucket_std": Removed(0.125, _BUCKETS),
    "replay.retire_solved": Removed(True, "a prompt whose rollouts are all right is never replayed; remove it"),
    "group.off_policy": Removed(0, f"{_STARTS} {{trace: {{show: {{kind: trace}}, rows: 1}}}}"),
    "group.off_policy_when_accuracy_at_most": Removed(
        None, f"{_STARTS} {{trace: {{show: {{kind: trace}}, when: {{accuracy_at_most: 0.0}}}}}}"
    ),
    "group.choose": Removed(
        "in_turn", f"{_STARTS} {{trace: {{show: {{kind: trace, choose: likeliest_answer}}, ...}}}}"
    ),
    "group.prefix": Removed(None, f"{_STARTS} {{prefix: {{show: {{kind: prefix}}, dose: 0.5, rows: 1}}}}"),
    "group.guidance": Removed(None, f"{_STARTS} {{trace: {{..., when: {{pass_rate_at_most: 0.2, memory: 0.9}}}}}}"),
    "group.hint": Removed(None, f"{_STARTS} {{hint: {{show: {{kind: hint}}, dose: 0.5, rows: 8, when: ...}}}}"),
    "group.retry": Removed(None, f"{_STARTS} {{critique: {{show: {{kind: critique, ...}}, rows: 8, when: ...}}}}"),
    "group.anchor": Removed(
        None, f"{_STARTS} {{anchor: {{show: {{kind: prefix, pieces: 10}}, dose: {{kind: search}}, rows: all, ...}}}}"
    ),
    "interleaved_sft.take": Removed("newest", "an SFT step takes the prompts that failed last; remove it"),
    "interleaved_sft.lr_scale": Removed(1.0, "the SFT step has the learning rate of RL; remove it"),
    "tools.version": Removed(0, _OWN_CODE),
    "tools.max_calls": Removed(16, "a turn may have 16 calls; remove it"),
    "tools.max_result_characters": Removed(8192, "a result is cut at 8192 characters; remove it"),
    "custom.version": Removed(0, _OWN_CODE),
    "scoring.version": Removed(0, _OWN_CODE),
    "exact.ignore_case": Removed(True, "exact never looks at case; use a grader of kind custom where it matters"),
    "judge.max_answer_chars": Removed(8000, "a judge sees the last 8000 characters of an answer; remove it"),
    **{f"limits.{name}": Removed(default, _SANDBOX) for name, default in _LIMITS.items()},
    "data.rejected_samples": Removed(5, "quarantine.jsonl shows five rows for each source and reason; remove it"),
    "luffy_parquet": Removed(False, "train.parquet has the columns of LUFFY's file; rewrite it with pyarrow"),
    "author_column": Removed(None, "give traces.author, or rows with the column traces, each trace with its author"),
    "decontamination.ngram": Removed(13, _COUNTED),
    "decontamination.overlap": Removed(0.5, _COUNTED),
    "axes": Removed(None, f"{_CELLS}; a level that left the centre is the cell AXIS-LEVEL"),
    "interactions": Removed(None, _CELLS),
    "seeds_elsewhere": Removed(None, "a cell that has other seeds than the study gives them: cells.NAME.seeds"),
    "select.random": Removed(None, "every point of a grid is tried: give each arm a grid of as many points"),
}
"""By the field's own name, or by its section's, or that section's kind, and its own (`rl.seed`)."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("stages", "synthesize"): "the stage is sample, with sample.teachers",
    ("kind", "synthesize"): "the stage is sample, with sample.teachers",
    ("weight_transfer", "broadcast"): "use object_store, or ipc with ray.placement: colocated",
    ("rl.engine", "openai"): _SERVERS,
    ("sft.engine", "openai"): "validations by servers elsewhere are gone; use vllm, or cluster",
    ("difficulty.engine", "openai"): _SERVERS,
    ("sample.engine", "openai"): _SERVERS,
    ("kind", "unsafe_local"): REMOVED["unsafe_local"].instead,
    ("kind", "word_problems"): (
        "they are files: {kind: file, path: data/samples/word_problems_train.jsonl}, and word_problems_test.jsonl, of "
        "which only: {extra_info.num_events: [2, 3, 4]} takes those with as many calculations"
    ),
    ("calls", "xml"): "choose hermes or llama3, whichever format the model was trained on",
    ("coefficient", "adaptive"): "give a number or a schedule",
}
"""By field, named likewise, and value, which of a section is its kind."""


def removed_field(path: KeyPath, kind: object = None) -> str | None:
    """What to do in place of the field at `path`, in a section of that kind; None where no earlier version had it."""
    found = _removed(path, kind)
    return None if found is None else found.instead


def removed_value(path: KeyPath, value: str) -> str | None:
    """What to do in place of `value` there; None where no earlier version took it."""
    return next((REMOVED_VALUES[name, value] for name in _names(path) if (name, value) in REMOVED_VALUES), None)


def without_removed(values: Value, *, finished: bool = False, section: str = "") -> Value:
    """The values of a file of an earlier version without removed fields that had no effect; `section` holds them.

    `finished`: of a finished stage, which nothing will run again. There removed fields go with any value, and removed
    values, whose fields then have their defaults.
    """
    if isinstance(values, list):
        left = [each for each in values if not (finished and removed_value((section,), str(each)) is not None)]
        return [without_removed(value, finished=finished, section=section) for value in left]
    if not isinstance(values, dict):
        return values
    if section == "group" and "starts" not in values and "off_policy" in values:
        values = {**values, "starts": _starts(values)}
    kept = {}
    for key, value in values.items():
        known = _removed((section, key), values.get("kind"))
        is_gone = known is not None and (finished or value == known.default)
        said = value.get("kind") if isinstance(value, dict) else value
        if finished and isinstance(said, str):
            is_gone = is_gone or removed_value((section, key), said) is not None
        if not is_gone:
            kept[key] = without_removed(value, finished=finished, section=key)
    return kept


def _removed(path: KeyPath, kind: object) -> Removed | None:
    return next((REMOVED[name] for name in (*_names(path), f"{kind}.{path[-1]}") if name in REMOVED), None)


def _names(path: KeyPath) -> tuple[str, str]:
    """The field's name, alone and with its section's; an element of a list goes by the list's."""
    path = path[:-1] if path[-1].isdigit() else path
    return path[-1], ".".join(path[-2:])


def _starts(group: Mapping[str, Any]) -> Value:
    """The starts of a group as earlier versions wrote it, with all of its fields."""
    rows = group["off_policy"]
    given: dict[str, Any] = {"rows": "all" if rows == group["size"] else rows}
    if (bound := group.get("off_policy_when_accuracy_at_most")) is not None:
        given["when"] = {"accuracy_at_most": bound}
    elif group.get("guidance"):
        given["when"] = group["guidance"]
    starts: dict[str, Any] = {}
    if rows and (prefix := group.get("prefix")):
        length, renamed = dict(prefix["length"]), {"evenly_spaced": "even", "by_success": "ladder"}
        length["kind"] = renamed.get(length["kind"], length["kind"])
        if "chunks" in length:
            length["pieces"] = length.pop("chunks")
        starts["prefix"] = {"show": {"kind": "prefix"}, "dose": length, "shared": prefix["shared"], **given}
    elif rows:
        starts["trace"] = {"show": {"kind": "trace", "choose": group.get("choose", "in_turn")}, **given}
    if hint := group.get("hint"):
        starts["hint"] = _hint(hint)
    if retry := group.get("retry"):
        of_rows = ("num_rows", "keep", "learn", "accuracy_at_most")
        show = {name: value for name, value in retry.items() if name not in of_rows}
        starts["critique"] = {"show": {"kind": "critique", **show}, **_second_round(retry, retry["num_rows"])}
    if anchor := group.get("anchor"):
        starts["anchor"] = {
            "show": {"kind": "prefix", "pieces": anchor["pieces"]},
            "dose": {"kind": "search", "at_least": anchor["success_at_least"], "at_most": anchor["success_at_most"]},
            "when": {"accuracy_at_most": anchor["accuracy_at_most"]},
            "rows": "all",
            "keep": "nearest",
        }
    return starts


def _second_round(second: Mapping[str, Any], rows: int) -> dict[str, Any]:
    learn = "shown" if second["learn"] == "hinted" else "bare"
    when = {"accuracy_at_most": second["accuracy_at_most"], "after": second.get("after", 0.0)}
    return {"rows": rows, "keep": second["keep"], "learn": learn, "when": when}


def _hint(hint: Mapping[str, Any]) -> Value:
    show, shares, groups = {"kind": "hint", "template": hint["template"]}, hint["levels"], hint["groups"]
    if not groups:
        rows = len(shares) * hint["rows_per_level"]
        return {"show": show, "dose": {"kind": "levels", "shares": shares}, **_second_round(hint, rows)}
    level = dict(groups["level"])
    if level["kind"] == "by_history":
        level |= {"kind": "prompt_levels", "shares": shares}
    else:  # numbers of levels
        at = {name: shares[round(level[name]) - 1] for name in ("value", "start", "peak", "end") if name in level}
        level |= at
    return {"show": show, "dose": level, "rows": "all", "learn": "shown", "when": {"share": groups["share"]}}
