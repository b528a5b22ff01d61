"""What the rows of a step get from a teacher on servers."""

from collections.abc import Sequence
from dataclasses import dataclass

from luffy.rl.teaching import ServedTeaching
from luffy.rollout.served_scores import ScoreRequest
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory

OWN, TOOL = Source.ON_POLICY, Source.ENVIRONMENT


@dataclass
class Scorer:
    """Gives every token its own number as its score."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return [tuple(map(float, request.token_ids[request.first :])) for request in requests]

    def close(self) -> None:
        pass


def row(prompt: tuple[int, ...], response: tuple[int, ...], source: tuple[Source, ...]) -> Trajectory:
    known = (-1.0,) * len(response)
    versions = (0,) * len(response)
    return Trajectory(prompt, response, source, known, versions, 0.0, Outcome.WRONG, FinishReason.STOP)


def test_rows_get_the_scores_of_what_is_learned_and_none_of_what_an_environment_wrote() -> None:
    groups = [
        Group("a", (row((1, 2), (3, 4, 5), (OWN, TOOL, OWN)), row((1, 2), (6,), (OWN,)))),
        Group("b", (row((7,), (8, 9), (OWN, OWN)),)),
    ]
    taught = ServedTeaching(Scorer()).taught(groups)  # type: ignore[arg-type]
    found = [[each.teacher_logprobs for each in group.trajectories] for group in taught]
    assert found == [[(3.0, 5.0), (6.0,)], [(8.0, 9.0)]]
    assert [group.uid for group in taught] == ["a", "b"]
