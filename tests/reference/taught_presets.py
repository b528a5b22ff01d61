"""Presets of other stages than RL, and the teacher that presets need and none of them names, as overrides."""

SUPERVISED = ("sft", "dft", "trsft", "psft")
"""Presets of the SFT stage."""
TAUGHT = ("opd", "opd_rl", "kdrl", "gkd", "opd_topk")
"""Presets that distil another model, which the user gives."""
SELF_TAUGHT = ("opsd", "opsd_jsd", "sdft", "sdpg", "rlsd", "sdpo")
"""Presets whose teacher is the policy, shown a solution."""


def teacher_overrides(preset: str, folder: str = "teacher-model") -> list[str]:
    """`rl.teacher` for presets that need one; empty for the others."""
    return [f"rl.teacher={{kind: model, path: {folder}}}"] if preset in TAUGHT else []
