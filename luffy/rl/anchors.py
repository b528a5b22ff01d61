"""Anchor search: finds how much of a trace the policy has to be given before it sometimes succeeds.

The method is the episode anchor search of "BREAD: Branched Rollouts from Expert Anchors" (arXiv 2506.17211).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luffy.config.objective import AnchorConfig
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.seeds import derive_seed
from luffy.types import Group, Trajectory

_FEWEST_LEFT = 2
"""Minimum number of tokens after the last cut: one of the trace's text, and the stop token."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class _Try:
    """A group whose rows were sampled after the first pieces of the trace."""

    num_pieces: int
    rows: tuple[Trajectory, ...]

    @property
    def success(self) -> float:
        return sum(row.is_correct for row in self.rows) / len(self.rows)


class AnchorSearch:
    """A binary search for the number of pieces of a trace after which the policy's success rate is within bounds.

    Below the bounds it tries more pieces, above them fewer. It ends with the first try within the bounds, or when no
    number is left.
    """

    def __init__(self, config: AnchorConfig, trace: Demonstration, ends: Sequence[int]) -> None:
        """`ends`: number of tokens in the first 1, 2, ... pieces of the trace, up to the last piece but one."""
        self.trace = trace
        self._config = config
        self._ends = ends
        self._too_few, self._too_many = 0, len(ends) + 1
        self._tries: list[_Try] = []

    @property
    def num_pieces(self) -> int | None:
        """The number of pieces to try next; None: the search has ended."""
        within = self._tries and not self._distance(self._tries[-1])
        if within or self._too_many - self._too_few < 2:
            return None
        return (self._too_few + self._too_many) // 2

    @property
    def num_given(self) -> int:
        """Tokens of the trace that the rows of the next try begin with."""
        assert self.num_pieces is not None, "the search has ended"
        return self._ends[self.num_pieces - 1]

    def observe(self, rows: Sequence[Trajectory]) -> None:
        """Record the graded rows of the try with `num_pieces` pieces."""
        assert self.num_pieces is not None, "the search has ended"
        tried = _Try(self.num_pieces, tuple(rows))
        if tried.success < self._config.success_at_least:
            self._too_few = tried.num_pieces
        elif tried.success > self._config.success_at_most:
            self._too_many = tried.num_pieces
        self._tries.append(tried)

    def group(self, bare: Group) -> Group:
        """The group to train on: among the tries with a correct row, the one nearest to the bounds, then the one with
        the fewest pieces; `bare` where no try has a correct row.

        All other rows go to `Group.replaced`.
        """
        solved = [each for each in self._tries if each.success > 0]
        if not solved:
            return Group(bare.uid, bare.trajectories, replaced=(*bare.replaced, *_rows(self._tries)))
        best = min(solved, key=lambda each: (self._distance(each), each.num_pieces))
        others = [each for each in self._tries if each is not best]
        return Group(bare.uid, best.rows, replaced=(*bare.replaced, *bare.trajectories, *_rows(others)))

    def _distance(self, tried: _Try) -> float:
        """Distance of the success rate from the bounds; 0 within them."""
        return max(self._config.success_at_least - tried.success, tried.success - self._config.success_at_most, 0.0)


def _rows(tries: Sequence[_Try]) -> list[Trajectory]:
    return [row for tried in tries for row in tried.rows]


class Anchors:
    """Creates the anchor search of a task, a pure function of the task, the step and the seed.

    A task needs a trace that can be cut into at least two pieces; of several, each step chooses one at random.
    """

    def __init__(self, config: AnchorConfig, decode: Decode, seed: int) -> None:
        """`decode` gives the text of tokens and nothing else: a template's opener would put a line end into each."""
        self.config = config
        self._decode = decode
        self._seed = seed

    def search(self, task: RolloutTask, step: int) -> AnchorSearch | None:
        """A new search; None where no trace of the task can be cut."""
        cut = [(trace, self._ends(trace)) for trace in task.demonstrations]
        usable = [(trace, ends) for trace, ends in cut if ends]
        if not usable:
            return None
        trace, ends = usable[derive_seed(self._seed, "anchoring trace", step, task.uid) % len(usable)]
        return AnchorSearch(self.config, trace, ends)

    def _ends(self, trace: Demonstration) -> tuple[int, ...]:
        return piece_ends([self._decode([token_id]) for token_id in trace.token_ids], self.config.pieces)


def piece_ends(texts: Sequence[str], pieces: int) -> tuple[int, ...]:
    """Cuts of a trace into at most `pieces` pieces: the number of tokens before each cut, ascending.

    `texts` are the texts of the trace's tokens. Pieces have nearly equal numbers of steps: lines, or words where the
    trace is one line, or tokens where it shows no words. At least two tokens follow the last cut. Empty for a trace of
    one step.
    """
    places = range(1, len(texts) - _FEWEST_LEFT + 1)
    lines = [place for place in places if "\n" in texts[place - 1]]
    words = [place for place in places if texts[place][:1].isspace() or texts[place - 1][-1:].isspace()]
    steps = lines or words or list(places)
    num_pieces = min(pieces, len(steps) + 1)
    return tuple(steps[piece * (len(steps) + 1) // num_pieces - 1] for piece in range(1, num_pieces))
