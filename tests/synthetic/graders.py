"""Graders by short names, and combinations of them."""

from luffy.config.grading import (
    AnyGrader,
    BothGrader,
    ChoiceGrader,
    ExactGrader,
    FormatGrader,
    GraderKind,
    MathGrader,
    StrictMathGrader,
    WeightedGrader,
    WeightedPart,
)

MATH, STRICT, PREFERRED = MathGrader(), StrictMathGrader(), MathGrader(boxed="preferred")
EXACT, EXACT_BOX, CHOICE, FORMAT = ExactGrader(), ExactGrader(boxed="required"), ChoiceGrader(), FormatGrader()


def any_of(*kinds: GraderKind) -> AnyGrader:
    return AnyGrader(of=kinds)


def both_of(*kinds: GraderKind) -> BothGrader:
    return BothGrader(of=kinds)


def weighted(*parts: tuple[float, GraderKind]) -> WeightedGrader:
    return WeightedGrader(parts=tuple(WeightedPart(weight=weight, grader=kind) for weight, kind in parts))
