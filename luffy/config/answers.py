"""Answers to training prompts: of the policy, for its pass rates and its own traces, and of teachers."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from luffy.config.evaluation import StopText
from luffy.config.model import DType, EndpointModel
from luffy.config.starts import slot_complaints
from luffy.config.strict import Name, PositiveShare, RunName, Share, StrictModel


class KeepAnswers(StrictModel):
    """The correct, complete answers to a prompt that are kept as its traces; equal texts count once."""

    choose: Literal["first", "shortest", "diverse"] = "first"
    """`first` in the order of sampling (one per prompt: STaR, arXiv 2203.14465); `shortest` by tokens; `diverse`: the
    first, then always the one farthest from those chosen (different reasoning paths, as in RFT, arXiv 2308.01825)."""
    max_per_prompt: PositiveInt = 1


class DifficultyConfig(StrictModel):
    """Selection of RL's prompts by the pass rates of the newest policy. This section adds the stage `difficulty` behind
    the base to a chain with RL that does not place it. A prompt
    whose responses are all correct, or all wrong, gives its rollouts no advantage. Prompts that are never solved stay
    by default: in a mixed group the demonstration still teaches."""

    teacher: Name | None = None
    """The one of `rl.teachers`, of `kind: model`, whose pass rates are measured in place of the policy's, so that it
    teaches what it can solve (`rows: {pass_rate_at_least: 0.66}`). None: the newest policy."""
    num_samples: PositiveInt = 8
    """Responses per prompt."""
    temperature: PositiveFloat | None = None
    """None: `rl.temperature`."""
    max_response_tokens: PositiveInt | None = None
    """None: `rl.max_response_tokens`."""
    stop: tuple[StopText, ...] | None = None
    """Texts that end a response; None: `rl.stop`."""
    min_pass_rate: Share = 0.0
    """Lowest pass rate that is kept, inclusive."""
    max_pass_rate: Share = 0.9
    """Highest pass rate that is kept, inclusive."""
    engine: Literal["transformers", "vllm"] | None = None
    """What generates the responses; None: RL's engine (`cluster`, `rl.engine`)."""

    def _complaints(self) -> Iterator[str]:
        low, high, total = self.min_pass_rate, self.max_pass_rate, self.num_samples
        if low > high:
            yield f"min_pass_rate {low:g} is above max_pass_rate {high:g}; swap them"
        if self.teacher is not None and high < 1:
            yield f"max_pass_rate {high:g} leaves out the prompts that the teacher solves best; set it to 1.0"
        if not any(low <= correct / total <= high for correct in range(total + 1)):
            yield (
                f"no prompt could be kept: no pass rate over {total} responses lies between min_pass_rate {low:g} and "
                f"max_pass_rate {high:g}; widen the range or raise num_samples"
            )


class PriceConfig(StrictModel):
    """Price of a teacher's tokens, in any currency."""

    prompt_per_million: NonNegativeFloat
    completion_per_million: NonNegativeFloat
    """Reasoning included."""

    def of(self, prompt_tokens: int, num_tokens: int) -> float:
        """The price of so many tokens of prompts and answers."""
        return (self.prompt_per_million * prompt_tokens + self.completion_per_million * num_tokens) / 1_000_000


class SpendingLimit(StrictModel):
    """Limits on the total usage of all teachers. They are asked 32 questions at a time while the usage is below them:
    fewer than 32 answers exceed them, whatever the concurrency."""

    max_tokens: PositiveInt | None = None
    """Tokens of prompts and answers, as the teachers count them."""
    max_cost: PositiveFloat | None = None
    """In the currency of the prices, which every teacher must have."""

    def is_reached(self, tokens: int, cost: float) -> bool:
        """Whether so much usage is as much as allowed, or more."""
        too_long = self.max_tokens is not None and tokens >= self.max_tokens
        return too_long or (self.max_cost is not None and cost >= self.max_cost)


class TeacherConfig(StrictModel):
    """A model that answers training prompts: an endpoint or a model folder."""

    endpoint: EndpointModel | None = None
    """A model on an OpenAI-compatible server; its URLs are in `execution.teachers`, under the teacher's name."""
    path: str | None = None
    """A Hugging Face model folder or hub id; log-probabilities are kept where its tokenizer is the policy's."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates with a model folder."""
    dtype: DType = "float32"
    """Compute type of a model folder."""
    num_samples: PositiveInt = 4
    """Most answers to a prompt."""
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    max_response_tokens: PositiveInt
    """Longest answer, reasoning included; one that reaches it is no trace."""
    system_prompt: str | None = None
    """The teacher's system message, in place of the prompt's own; empty: none. None: the prompt's own."""
    price: PriceConfig | None = None
    """None: it costs nothing."""

    def _complaints(self) -> Iterator[str]:
        if (self.endpoint is None) == (self.path is None):
            yield "give exactly one of endpoint (a model on an OpenAI-compatible server) and path (a model folder)"
        inert = self.changed("engine", "dtype")
        if self.endpoint is not None and inert:
            yield f"{', '.join(inert)} has no effect on a model served by an endpoint; remove it"
        if self.temperature == 0 and self.num_samples > 1:
            yield "temperature 0 gives the same answer each time; set num_samples: 1"
        if self.temperature == 0 and self.top_p < 1:
            yield f"top_p {self.top_p} has no effect at temperature 0; remove it"
        request = self.endpoint.request if self.endpoint is not None else {}
        changed = [name for name in ("temperature", "top_p") if name in request and getattr(self, name) != 1]
        if changed:
            yield (
                f"endpoint.request.{changed[0]}: null leaves the endpoint at its default, but {changed[0]} is "
                f"{getattr(self, changed[0])}; remove one"
            )

    @property
    def model(self) -> str:
        """Its name in traces: the endpoint's name for it, or its folder or hub id."""
        return self.endpoint.name if self.endpoint is not None else str(self.path)

    @property
    def decoding(self) -> str:
        """How traces were sampled, as recorded with them."""
        return f"temperature {self.temperature:g}, top_p {self.top_p:g}"


class RewriteConfig(StrictModel):
    """Data rewriting (Mind the Gap, arXiv 2509.15157): what the policy solves by itself is kept, the rest it solves
    again with the expert's trace in its prompt, and the expert's own text is the last resort."""

    num_samples: PositiveInt = 4
    """Most answers to a prompt that shows the expert's trace."""
    template: str = (
        "{prompt}\n\nA correct solution, for your understanding:\n{trace}\n\n"
        "Solve the problem again in your own words, step by step, as if you had not seen this solution."
    )
    """Last message of that prompt; `{prompt}` is replaced by its text without the trace."""

    def _complaints(self) -> Iterator[str]:
        yield from slot_complaints(self.template, "prompt", "trace")


class SampleConfig(StrictModel):
    """The stage `sample`: models answer the training prompts, and correct answers become traces. Without `teachers` the
    chain's newest policy answers, and the SFT after it learns from these answers alone. `teachers` add the stage to a
    chain with SFT or RL: each in turn is asked the first sample of every prompt, then the second, and its answers join
    the training data; a trace's author is its teacher. Answers are graded as the experiment grades."""

    num_samples: PositiveInt = 8
    """The policy's responses per prompt."""
    seed: NonNegativeInt | None = None
    """Seed of this stage alone; None: the experiment's. Lets seeds share data and base."""
    temperature: PositiveFloat = 1.0
    """The policy's."""
    max_response_tokens: PositiveInt | None = None
    """The policy's; None: `data.max_trace_tokens`."""
    engine: Literal["transformers", "vllm"] | None = None
    """What generates the policy's responses; None: `vllm` with `cluster: ray`, else `transformers`."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a response of the policy."""
    keep: KeepAnswers = KeepAnswers()
    """Which correct answers of one author to one prompt become traces."""
    teachers: dict[RunName, TeacherConfig] = Field(default_factory=dict)
    """By name, in the order in which they are used; empty: the policy answers."""
    prompts: Literal["without_traces", "all"] = "without_traces"
    """Training prompts for teachers: those without a usable trace, or all, to which traces are then added."""
    stop_when_kept: bool = True
    """No more samples of a teacher once a prompt has `keep.max_per_prompt` usable ones. False: more to choose from."""
    cascade: bool = False
    """Send each teacher only the prompts that earlier teachers left without a usable answer."""
    budget: SpendingLimit | None = None
    """None: no limit; every question is sent to the teachers."""
    rewrite: RewriteConfig | None = None
    """The one teacher is the policy, and its answers replace the traces of the prompts; None: they are added."""

    def _complaints(self) -> Iterator[str]:
        of_policy = ("num_samples", "temperature", "max_response_tokens", "engine", "stop")
        of_teachers = ("prompts", "stop_when_kept", "cascade", "budget", "rewrite")
        if inert := self.changed(*(of_policy if self.teachers else of_teachers)):
            why = "beside teachers, each of which has its own" if self.teachers else "without teachers"
            yield f"{', '.join(inert)} has no effect {why}; remove it"
        if not self.teachers:
            return
        if self.rewrite is not None:
            if len(self.teachers) > 1:
                yield (
                    f"rewrite: the policy rewrites the traces, and teachers names {len(self.teachers)} models; keep "
                    "only the policy's starting model"
                )
            if self.prompts != "all":
                yield "rewrite is about prompts that have a trace; set prompts: all"
            (teacher,) = self.teachers.values()
            if teacher.temperature == 0 and self.rewrite.num_samples > 1:
                yield "rewrite: temperature 0 gives the same answer each time; set rewrite.num_samples: 1"
        unpriced = [name for name, teacher in self.teachers.items() if teacher.price is None]
        if self.budget is not None and self.budget.max_cost is not None and unpriced:
            yield f"budget.max_cost: teachers.{unpriced[0]}.price is missing"
        most = max(teacher.num_samples for teacher in self.teachers.values())
        if self.keep.max_per_prompt > most:
            yield (
                f"keep.max_per_prompt {self.keep.max_per_prompt} is above num_samples {most} of every teacher; lower it"
            )
