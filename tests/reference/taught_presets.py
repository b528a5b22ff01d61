"""Presets of other stages than RL, and the teacher that presets need and none of them names, as overrides."""

SUPERVISED = ("sft", "dft", "trsft", "psft")
"""Presets of the SFT stage."""
TAUGHT = ("opd", "opd_rl", "kdrl", "vold", "gkd", "opd_topk", "tgopd")
"""Presets that distil another model, which the user gives."""
SELF_TAUGHT = ("opsd", "opsd_jsd", "sdft", "sdpg", "rlsd", "rlrt", "sdpo", "srpo")
"""Presets whose teacher is the policy, shown a solution; that of `hdpo` is shown what the row was sampled with."""


def teacher_overrides(preset: str, folder: str = "teacher-model") -> list[str]:
    """`rl.teachers` for presets that need one; empty for the others. `mopd` has two, by the number of operations."""
    if preset == "mopd":
        by_length = f"{{kind: model, path: {folder}, rows: {{columns: {{num_operations: 1}}}}}}"
        return [f"rl.teachers={{short: {by_length}, long: {{kind: model, path: {folder}-2}}}}"]
    if preset == "tgopd":  # which names its rows
        return [f"rl.teachers.teacher.path={folder}"]
    return [f"rl.teachers={{teacher: {{kind: model, path: {folder}}}}}"] if preset in TAUGHT else []
