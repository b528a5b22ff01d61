"""Presets of other stages than RL, and the teacher that presets need and none of them names, as overrides."""

SUPERVISED = ("sft", "dft", "trsft")
"""Presets of the SFT stage."""
TAUGHT = ("opd", "opd_rl", "kdrl")
"""Presets that distil another model, which the user gives."""


def teacher_overrides(preset: str, folder: str = "teacher-model") -> list[str]:
    """`rl.teacher` for presets that need one; empty for the others."""
    return [f"rl.teacher={{kind: model, path: {folder}}}"] if preset in TAUGHT else []
