"""An objective: how groups are composed, how advantages are estimated, and a list of loss terms."""

from collections.abc import Iterator

from pydantic import Field, PositiveInt

from luffy.config.group import (
    AdvantageConfig,
    ComparedAdvantage,
    GeneralizedAdvantage,
    GlobalBatchAdvantage,
    GroupConfig,
    NoAdvantage,
    PassAtKAdvantage,
    ReplayConfig,
)
from luffy.config.starts import StartConfig, TraceHint, TracePrefix, WholeTrace
from luffy.config.strict import StrictModel
from luffy.config.terms import (
    ClippedSurrogateLoss,
    CustomLoss,
    DivergenceLoss,
    EntropyLoss,
    ImportanceCorrection,
    KLLoss,
    NegativeLogLikelihoodLoss,
    ShapedSurrogateLoss,
    TermConfig,
    complaints_about,
    depends_on_length,
    reads,
)


class SupervisedObjectiveConfig(StrictModel):
    """What an SFT step minimises: terms over demonstrations."""

    terms: tuple[TermConfig, ...] = Field(min_length=1)

    @property
    def depends_on_length(self) -> bool:
        return any(depends_on_length(term.coefficient) for term in self.terms)

    @property
    def compares_with_old(self) -> bool:
        """Whether a term has a ratio to the policy of some steps before; every token's advantage is then 1."""
        return any(isinstance(term.loss, ClippedSurrogateLoss) for term in self.terms)

    def _complaints(self) -> Iterator[str]:
        yield from complaints_about(self.terms)
        supervised = NegativeLogLikelihoodLoss | EntropyLoss | CustomLoss | ClippedSurrogateLoss
        wrong = [term.name for term in self.terms if not isinstance(term.loss, supervised) or _needs_rollouts(term)]
        if wrong := wrong or [term.name for term in self.terms if term.select == "on_policy"]:
            yield f"terms {', '.join(wrong)}: SFT has neither rollouts nor rewards; use nll or entropy"
        if isinstance(self, InterleavedSFTConfig) and self.compares_with_old:
            yield "a single SFT step has no earlier policy for the ratio of clipped_surrogate; use nll"
        if any(term.gate is not None for term in self.terms):
            yield "a gate looks at rollouts, and SFT has none; remove it"
        if any(term.normaliser.mode == "constant" for term in self.terms):
            yield "normaliser mode constant divides by rl.max_response_tokens; in SFT use token or sequence"


def _needs_rollouts(term: TermConfig) -> bool:
    return term.needs_teacher or any(reads(term.loss, what) for what in ("advantage", "sampler", "reference"))


class InterleavedSFTConfig(SupervisedObjectiveConfig):
    """ReLIFT (arXiv 2506.07527): prompts that every rollout failed are queued; a full queue makes an SFT step."""

    buffer_size: PositiveInt
    """Prompts (that have a trace) an SFT step takes, first those that failed last; its learning rate is that of RL."""


class ObjectiveConfig(StrictModel):
    """What an RL step minimises; see `exp_configs/methods/` for the published ones."""

    group: GroupConfig
    advantage: AdvantageConfig
    terms: tuple[TermConfig, ...] = Field(min_length=1)
    replay: ReplayConfig | None = None
    interleaved_sft: InterleavedSFTConfig | None = None

    @property
    def has_off_policy_rows(self) -> bool:
        given = any(start.has_off_policy_rows for start in self.group.starts.values())
        return given or self.replay is not None

    @property
    def needs_reference(self) -> bool:
        return any(
            (isinstance(term.loss, KLLoss) and term.loss.against == "reference") or reads(term.loss, "reference")
            for term in self.terms
        )

    @property
    def needs_teacher(self) -> bool:
        return any(term.needs_teacher for term in self.terms)

    @property
    def divergence(self) -> DivergenceLoss | None:
        """A divergence of the terms, all of which have its choices."""
        return next((term.loss for term in self.terms if isinstance(term.loss, DivergenceLoss)), None)

    @property
    def needs_teacher_entropy(self) -> bool:
        return any(term.weigh is not None for term in self.terms)

    @property
    def learns_by_advantage(self) -> bool:
        """Whether all terms of an RL step are weighted by advantages, except regularising ones (entropy, KL)."""
        by_advantage = all(
            term.is_policy_gradient or isinstance(term.loss, EntropyLoss | KLLoss) for term in self.terms
        )
        return by_advantage and self.interleaved_sft is None

    @property
    def has_regularising_terms(self) -> bool:
        """Whether a term is an entropy bonus or a KL penalty, which needs no advantage."""
        return any(isinstance(term.loss, EntropyLoss | KLLoss) for term in self.terms)

    @property
    def compares_with_old(self) -> bool:
        return any(isinstance(term.loss, KLLoss) and term.loss.against == "old" for term in self.terms)

    @property
    def needs_critic(self) -> bool:
        return isinstance(self.advantage, GeneralizedAdvantage)

    def with_correction(self, correction: ImportanceCorrection) -> "ObjectiveConfig":
        """The same objective with `correction` on every term that learns from rollouts alone without one."""
        added = {"correction": correction}
        terms = tuple(term.model_copy(update=added) if term.lacks_correction else term for term in self.terms)
        return self.model_copy(update={"terms": terms})

    @property
    def depends_on_length(self) -> bool:
        interleaved = self.interleaved_sft is not None and self.interleaved_sft.depends_on_length
        scheduled = interleaved or any(depends_on_length(term.coefficient) for term in self.terms)
        return scheduled or any(start.depends_on_length for start in self.group.starts.values())

    def _complaints(self) -> Iterator[str]:
        yield from complaints_about(self.terms)
        yield from self._complaints_about_off_policy_rows()
        yield from self._complaints_about_advantages()
        if self.group.size == 1 and self.group.filter is not None:
            yield "group.filter drops groups whose rewards are all equal, which a group of one row always is; remove it"
        fallback = self.group.fallback
        if fallback is not None and fallback.keep == "beside":
            yield from self._complaints_about_beside(fallback)
        if self.replay is None:
            return
        if self.group.size - self.group.num_other_rows < 2:
            yield "replay takes one row of the group, and starts the others: no rollout is left; raise group.size"
        for name, start in self.group.starts.items():
            if not isinstance(start.show, WholeTrace):
                yield f"replay and group.starts.{name} cannot be combined (show.kind: {start.show.kind}); remove one"

    def _complaints_about_off_policy_rows(self) -> Iterator[str]:
        selecting = [
            term for term in self.terms if term.select != "on_policy" and not isinstance(term.loss, EntropyLoss)
        ]
        only_off = [term.name for term in self.terms if term.select == "off_policy"]
        starts = self.group.starts
        if only_off and not self.has_off_policy_rows:
            yield (
                f"term {only_off[0]!r} selects off_policy tokens but group.starts gives rows none and there is no "
                "replay: it would have no effect"
            )
        if self.replay is not None and not selecting:
            yield "replay has no effect: no term learns from off_policy tokens; add one or remove replay"
        for name, start in starts.items():
            # A prefix steers the rollout that follows it even where no term learns from its own tokens.
            if start.has_off_policy_rows and not selecting and not isinstance(start.show, TracePrefix):
                what = "learn: bare" if start.is_in_prompt else f"show.kind: {start.show.kind}"
                yield f"group.starts.{name} with {what} has no effect: no term learns from off_policy tokens; add one"
            if start.is_in_prompt and start.learn == "bare":
                yield from self._complaints_about_bare(start, selecting)
        # Where traces replace failed rollouts only, some gates on them are superfluous and others never open.
        fallback = self.group.fallback
        if fallback is None or fallback.when is None or len(starts) > 1 or not isinstance(fallback.show, WholeTrace):
            return
        bound = fallback.when.accuracy_at_most
        if bound is None or self.replay is not None:
            return
        for term in self.terms:
            if term.select != "off_policy" or term.gate is None:
                continue
            above, at_most = term.gate.group_accuracy_above, term.gate.group_accuracy_at_most
            if above is not None and above >= bound:
                yield f"term {term.name!r}: there are no traces where the accuracy of the group is above {above:g}"
            if at_most is not None and at_most >= bound:
                yield (
                    f"term {term.name!r}: group_accuracy_at_most {at_most:g} has no effect, since traces come only "
                    f"where it is at most {bound:g}; remove it"
                )

    def _complaints_about_beside(self, start: StartConfig) -> Iterator[str]:
        assert start.when is not None
        if self.group.filter is not None and not start.when.accuracy_at_most:
            yield "keep: beside has no effect with group.filter, which drops groups without a right row; remove one"
        if self.needs_critic:
            yield "keep: beside gives rows no advantage, and advantage.kind: gae one to each token; remove one"
        alone = self.replay is None and not any(
            other.has_off_policy_rows for other in self.group.starts.values() if other is not start
        )
        for term in (term for term in self.terms if alone and term.select == "off_policy" and term.is_policy_gradient):
            yield (
                f"term {term.name!r} has no effect: its only rows have keep: beside, and so no advantage; use a loss "
                "without one, such as divergence or nll"
            )

    def _complaints_about_bare(self, start: StartConfig, selecting: list[TermConfig]) -> Iterator[str]:
        """Complaints about terms on rows that are learned without what their prompt showed."""
        for term in selecting:
            if isinstance(term.loss, ShapedSurrogateLoss):
                if term.loss.behavior == "one" and isinstance(start.show, TraceHint):
                    yield (
                        f"term {term.name!r}: hinted rows have log-probabilities of their own; set behavior: recorded, "
                        "so that the ratio is to the policy with the hint"
                    )
            elif term.is_policy_gradient and not reads(term.loss, "sampler"):
                yield (
                    f"term {term.name!r}: {term.loss.kind} takes hinted rows for samples of the bare prompt; set "
                    "select: on_policy, and learn from them by a shaped_surrogate with behavior: recorded, or "
                    "set learn: shown"
                )

    def _complaints_about_advantages(self) -> Iterator[str]:
        advantage = self.advantage
        surrogates = [term for term in self.terms if term.is_policy_gradient]
        uses_rewards = surrogates or any(term.gate is not None and term.gate.outcome is not None for term in self.terms)
        if isinstance(advantage, NoAdvantage):
            if surrogates:
                name = surrogates[0].name
                yield f"advantage.kind: none leaves the surrogate {name!r} nothing to learn; use another kind"
            if advantage.zero_truncated:
                yield "advantage.zero_truncated has no effect with kind: none; remove it"
        elif self.needs_teacher and not uses_rewards:
            yield f"advantage.kind: {advantage.kind} has no effect: no term uses it; set kind: none"
        if not uses_rewards and not self.needs_teacher:
            yield "no term uses the advantage: this is supervised learning; use the sft stage"
        if not surrogates and isinstance(advantage, GeneralizedAdvantage):
            yield "advantage.kind: gae has no effect: no surrogate uses it, and a critic would train for nothing"
        if isinstance(advantage, ComparedAdvantage):
            yield from self._complaints_about_baseline(advantage)

    def _complaints_about_baseline(self, advantage: ComparedAdvantage) -> Iterator[str]:
        joint = advantage.population == "joint"
        num_rollouts = self.group.size - self.group.num_other_rows  # at most
        size = self.group.size if joint else num_rollouts
        compares_in_group = not isinstance(advantage, GlobalBatchAdvantage) or advantage.group_baseline
        if size < 2 and compares_in_group:
            yield f"a baseline over {size} row of a group makes every advantage 0; raise group.size"
        fewest = size if joint or self.replay is None else size - 1  # a replayed row takes the place of a rollout
        if isinstance(advantage, PassAtKAdvantage) and advantage.k >= fewest:
            yield f"advantage.k {advantage.k} must be below the {fewest} rows it chooses from: all subsets are one"
        if joint:
            return
        if not self.has_off_policy_rows:
            yield "advantage.population: on_policy has no effect without off-policy rows; set it to joint"
        if any(term.is_policy_gradient and term.select != "on_policy" for term in self.terms):
            yield (
                "advantage.population: on_policy gives off-policy rows advantage 0, so a surrogate on them "
                "would have no effect; select on_policy tokens or set population: joint"
            )
        if self.group.shows(TracePrefix):
            yield (
                "advantage.population: on_policy gives rows with a prefix advantage 0, so their continuations would "
                "not be learned from; set population: joint"
            )
