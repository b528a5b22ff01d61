"""Which of `rl.teachers` scores a row, and what rows need of it before the ranks learn from them.

`kind: served`: scores from vLLM servers. The stage's process queries the servers right before the trainer learns from
the rows, so API keys stay in that process and the ranks find the scores in the rows. Scores are not journalled: a step
repeated after a kill is scored again. Any `vllm serve` will do: it returns the log-probabilities of the prompt
(`prompt_logprobs`), which vLLM computes from the unscaled logits (temperature 1). Nothing is sampled.

`kind: self`: the prompts that a policy is shown as its own teacher, the problem with a solution, or with what the row
was shown while it was sampled.
"""

import asyncio
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from luffy.config.execution import ServerConfig
from luffy.config.starts import fill_slots
from luffy.config.training import RLTeacher, SelfTeacher, ServedTeacher
from luffy.data.templates import decode, render_prompts
from luffy.errors import ClusterError, ConfigError, DataError
from luffy.http_client import HTTPClient, LoopThread, NoAnswer
from luffy.rl.group_starts import GroupStart
from luffy.rl.rows import RolloutTask
from luffy.types import NO_TEACHER, Group, Message, Prompt, Source, Trajectory

_NUM_TEXTS = 16
"""Number of prompts on which the two tokenizers are compared."""
_COMPLETIONS, _TOKENIZE, _MODELS = "/v1/completions", "/tokenize", "/v1/models"
_KEY_REFUSED = (401, 403)
_MIN_SAMPLED = 1
"""vLLM samples at least one token after the prompt that it scores."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A sequence whose end is to be scored."""

    token_ids: tuple[int, ...]
    first: int
    """Number of tokens at the start that are not scored, at least one."""


Place = tuple[Group, int]
"""A group, and the index of one of its rows (`Group.learned`)."""
_ScoringServer = tuple[HTTPClient, asyncio.Semaphore]
"""The semaphore limits the concurrent requests."""


class ServedScorer:
    """Scores sequences on all servers of `config`, which serve the same model; errors name the section `setting`."""

    def __init__(self, config: ServerConfig, model: str, setting: str) -> None:
        self._loop = LoopThread()
        self._servers: list[_ScoringServer] = [
            (HTTPClient.to_server(url, config, setting), asyncio.Semaphore(config.concurrency)) for url in config.roots
        ]
        self._model = model
        self._setting = setting
        self._config = config

    @classmethod
    def connect(
        cls, config: ServerConfig, model: str, *, longest: int, known: Mapping[str, Sequence[int]], setting: str
    ) -> "ServedScorer":
        """A scorer of sequences up to `longest` tokens; `known` are texts with their token ids.

        Raises ConfigError for a server that cannot be reached, refuses the API key, does not serve `model`, has too
        short a context, or tokenizes one of the texts differently.
        """
        scorer = cls(config, model, setting)
        try:
            for client, _ in scorer._servers:
                scorer._loop.run(scorer._check(client, longest, known))
        except BaseException:
            scorer.close()
            raise
        return scorer

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        """For each request the log-probabilities of its tokens from `first` on, in nats, in order.

        Raises LostError where a server is gone after all retries, and ClusterError for an answer without
        log-probabilities.
        """
        return self._loop.run(self._score_all(requests))

    def taught(self, places: Sequence[Place]) -> list[Trajectory]:
        """The rows, each with the log-probabilities of its learnable tokens."""
        rows = [group.learned[index] for group, index in places]
        requests = [ScoreRequest(row.prompt_ids + row.response_ids, first=len(row.prompt_ids)) for row in rows]
        scored = []
        for row, logprobs in zip(rows, self.score(requests), strict=True):
            pairs = zip(logprobs, row.source, strict=True)
            learnable = tuple(logp for logp, source in pairs if source is not Source.ENVIRONMENT)
            scored.append(replace(row, teacher_logprobs=learnable))
        return scored

    def close(self) -> None:
        """Close the connections; may be called twice."""
        if not self._loop.is_closed:
            for client, _ in self._servers:
                self._loop.run(client.close())
            self._loop.close()

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        load, tasks = [0] * len(self._servers), dict[int, asyncio.Task[tuple[float, ...]]]()
        # Longest first, each to the server with the fewest tokens so far.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].token_ids))
        try:
            async with asyncio.TaskGroup() as group:
                for i in order:
                    place = min(range(len(load)), key=load.__getitem__)
                    load[place] += len(requests[i].token_ids)
                    tasks[i] = group.create_task(self._score(self._servers[place], requests[i]))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [tasks[i].result() for i in range(len(requests))]

    async def _score(self, server: _ScoringServer, request: ScoreRequest) -> tuple[float, ...]:
        client, places = server
        body = {
            "model": self._model,
            "prompt": list(request.token_ids),
            "max_tokens": _MIN_SAMPLED,
            # The token itself alone, without the most probable ones.
            "prompt_logprobs": 0,
        }
        async with places:
            # Scoring changes nothing, so that a request may be repeated.
            answer = await client.post_with_retries(_COMPLETIONS, body)
        try:
            given = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(request.token_ids[request.first :], given[request.first :], strict=True)
            found = tuple(float(entry[str(token)]["logprob"]) for token, entry in pairs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ClusterError(
                f"{client.url}{_COMPLETIONS}: the answer has no log-probability for every token of the prompt "
                f"({type(error).__name__}); {self._setting} needs vLLM servers"
            ) from None
        for value in found:
            if not math.isfinite(value):
                raise ClusterError(
                    f"{client.url}: the log-probability of a token is {value}; the model is broken there"
                )
        return found

    async def _check(self, client: HTTPClient, longest: int, known: Mapping[str, Sequence[int]]) -> None:
        url = client.url
        try:
            models = await client.ask(_MODELS)
        except NoAnswer as error:
            raise ConfigError(f"{self._setting}.urls: {error}; start the server or correct the URL") from error
        if models.status in _KEY_REFUSED:
            raise ConfigError(
                f"{url}: the server refuses the API key; it is read from the environment variable "
                f"{self._config.api_key_variable} ({self._setting}.api_key_variable), which "
                f"{'holds a wrong one' if client.has_key else 'is not set'}"
            )
        if not models.ok:
            raise ConfigError(f"{self._setting}.urls: {url}{_MODELS}: {models.complaint}; is this a vLLM server?")
        served = models.body.get("data")
        found = [each for each in served if isinstance(each, dict)] if isinstance(served, list) else []
        contexts = {str(each.get("id")): each.get("max_model_len") for each in found}
        if self._model not in contexts:
            raise ConfigError(f"{url}: serves {', '.join(contexts) or 'no model'}, and not {self._model}")
        context = contexts[self._model]
        if not isinstance(context, int):
            raise ConfigError(
                f"{url}: is not a vLLM server ({_MODELS} names no max_model_len); other servers cannot score prompts"
            )
        if context < longest + _MIN_SAMPLED:
            raise ConfigError(
                f"{url}: the longest prompt with its response has {longest} tokens, so this server needs "
                f"--max-model-len {longest + _MIN_SAMPLED} (it has {context})"
            )
        for text, ids in known.items():
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            if (await client.post(_TOKENIZE, body)).get("tokens") != list(ids):
                raise ConfigError(
                    f"{url}: the tokenizer of {self._model} is not the policy's, so it cannot score the policy's "
                    "tokens; take a teacher of the same family, or let it write traces instead (sample.teachers)"
                )


def connect_teacher(
    teacher: ServedTeacher,
    config: ServerConfig,
    setting: str,
    tasks: Sequence[RolloutTask],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> ServedScorer:
    """Connect to the servers of the section `setting`, which have to take rows of `longest` tokens; raises ConfigError
    for unusable ones."""
    texts = [decode(tokenizer, task.prompt_ids) for task in tasks[:_NUM_TEXTS]]
    known = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    return ServedScorer.connect(config, teacher.name, longest=longest, known=known, setting=setting)


class TeacherPrompts:
    """What the policy is shown as its own teacher of a row: its problem with the first trace or with a right response,
    or what a start showed.

    `prompts` are those of its rows, `reply` is the text of a response, and `starts` are those of the groups. Raises
    DataError, which names the teacher, where traces are shown and a prompt has none. A right response with which a row
    would have more than `limit` tokens is not shown (None: the model has no limit).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        config: SelfTeacher,
        reply: Callable[[Sequence[int]], str],
        limit: int | None,
        name: str,
        starts: Sequence[GroupStart] = (),
    ) -> None:
        self._tokenizer, self._config, self._reply, self._limit = tokenizer, config, reply, limit
        self._name, self._starts = name, {start.name: start for start in starts}
        self._prompts = {prompt.uid: prompt for prompt in prompts}
        self._traced = self._with_traces(prompts) if config.shows == "trace" else {}

    def _with_traces(self, prompts: Sequence[Prompt]) -> dict[str, "array[int]"]:
        bare = sum(not prompt.traces for prompt in prompts)
        if bare:
            raise DataError(
                f"rl.teachers.{self._name}.kind: self shows the teacher a trace, but {bare} of {len(prompts)} training "
                "prompts have none; take data with a trace for each, add sample.teachers, or use kind: model"
            )
        rendered = render_prompts(
            self._tokenizer, [self._conversation(prompt, prompt.traces[0].text) for prompt in prompts]
        )
        # Four bytes a token: there may be tens of thousands of long traces.
        return {prompt.uid: array("i", ids) for prompt, ids in zip(prompts, rendered, strict=True)}

    def _conversation(self, prompt: Prompt, solution: str) -> tuple[Message, ...]:
        *before, last = prompt.messages
        text = fill_slots(self._config.prompt, {"problem": last.content, "trace": solution})
        return (*before, Message(last.role, text))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with a trace; 0 where others are shown."""
        return max(map(len, self._traced.values()), default=0)

    def taught(self, places: Sequence[Place]) -> list[Trajectory]:
        """The rows, each with the prompt that its teacher sees; one for which there is nothing to show has no
        teacher."""
        found, of_group = [], dict[int, Mapping[int, tuple[int, ...]]]()
        for group, index in places:
            row = group.learned[index]
            if self._config.shows == "trace":
                shown = tuple(self._traced[group.uid])
            elif self._config.shows == "start":
                shown = self._as_sampled(row, self._prompts[group.uid])
            else:
                if id(group) not in of_group:
                    of_group[id(group)] = self._peers(group)
                shown = next((ids for peer, ids in of_group[id(group)].items() if peer != index), ())
                if self._limit is not None and len(shown) + len(row.response_ids) > self._limit:
                    shown = ()
            found.append(replace(row, teacher_prompt_ids=shown, taught_by=row.taught_by if shown else NO_TEACHER))
        return found

    def _as_sampled(self, row: Trajectory, prompt: Prompt) -> tuple[int, ...]:
        """The prompt that the row was sampled with; empty where it is learned under that one."""
        if row.start is None or row.start.shown is None:
            return ()
        shown = self._starts[row.start.name].prompt_ids(prompt.messages, row.start.shown)
        return () if shown == row.prompt_ids else shown

    def _peers(self, group: Group) -> Mapping[int, tuple[int, ...]]:
        """The prompts that show a right row, by its index: the first shows the others a solution, and the second shows
        the first one."""
        right = [index for index, row in enumerate(group.trajectories) if row.is_correct][:2]
        replies = [self._reply(group.trajectories[index].response_ids) for index in right]
        conversations = [self._conversation(self._prompts[group.uid], reply) for reply in replies]
        return dict(zip(right, map(tuple, render_prompts(self._tokenizer, conversations)), strict=True))


RowTeacher = ServedScorer | TeacherPrompts
"""Adds to rows what the training ranks need of their teacher and cannot compute themselves."""


class Teaching:
    """Gives each row its teacher: the first of `rl.teachers` whose `rows` holds.

    Raises DataError for a teacher that no row of these tasks can come to.
    """

    def __init__(self, teachers: Mapping[str, RLTeacher], tasks: Sequence[RolloutTask]) -> None:
        self._names = tuple(teachers)
        named = {start for each in teachers.values() if each.rows is not None for start in each.rows.start or ()}
        kinds = [(right, start) for right in (False, True) for start in (None, *sorted(named))]
        self._routes = {task.uid: {kind: _route(teachers, task, *kind) for kind in kinds} for task in tasks}
        """Index of the teacher of a prompt's rows, by whether they are right and, where a teacher asks for it, by their
        start."""
        self._helpers: dict[int, RowTeacher] = {}
        for index, (name, teacher) in enumerate(teachers.items()):
            if any(index in routes.values() for routes in self._routes.values()):
                continue
            if not any(_takes(teacher, task, *kind) for task in tasks for kind in kinds):
                sources = ", ".join(sorted({task.problem.data_source for task in tasks}))
                columns = ", ".join(sorted({column for task in tasks for column in task.problem.extra_info}))
                rates = [task.pass_rate for task in tasks if task.pass_rate is not None]
                measured = f", their highest pass rate {max(rates):g}" if rates else ""
                raise DataError(
                    f"rl.teachers.{name}.rows matches no row of the {len(tasks)} training prompts "
                    f"({teacher.rows_in_words}); their data sources are {sources}, their columns "
                    f"{columns or 'none'}{measured}: correct it"
                )
            raise DataError(
                f"rl.teachers.{name} would never be asked: those before it take all of its rows "
                f"({teacher.rows_in_words}); move it before them, or remove it"
            )

    def prompts_of(self, index: int, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of which rows may have this teacher."""
        return [prompt for prompt in prompts if index in self._routes[prompt.uid].values()]

    def helped_by(self, index: int, helper: RowTeacher) -> None:
        """Rows of this teacher need what `helper` adds."""
        self._helpers[index] = helper

    def taught(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, each row with its teacher and what the ranks need of it."""
        rows = [[replace(row, taught_by=self._teacher_of(group.uid, row)) for row in group.learned] for group in groups]
        routed = [_with_rows(group, of_group) for group, of_group in zip(groups, rows, strict=True)]
        for teacher, helper in self._helpers.items():
            places = [
                (g, index) for g, of_group in enumerate(rows) for index, row in enumerate(of_group)
                if row.taught_by == teacher
            ]  # fmt: skip
            found = helper.taught([(routed[g], index) for g, index in places])
            for (g, index), row in zip(places, found, strict=True):
                rows[g][index] = row
        return [_with_rows(group, of_group) for group, of_group in zip(groups, rows, strict=True)]

    def _teacher_of(self, uid: str, row: Trajectory) -> int:
        routes, start = self._routes[uid], None if row.start is None else row.start.name
        return routes.get((row.is_correct, start), routes[row.is_correct, None])

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """`batch/taught_share` of the rows and, of several teachers, the share of each; empty without rows."""
        teachers = [row.taught_by for group in groups for row in group.learned]
        if not teachers:
            return {}
        found = {"batch/taught_share": sum(index != NO_TEACHER for index in teachers) / len(teachers)}
        for index, name in enumerate(self._names if len(self._names) > 1 else ()):
            found[f"batch/taught_share_{name}"] = teachers.count(index) / len(teachers)
        return found


def _with_rows(group: Group, learned: Sequence[Trajectory]) -> Group:
    count = len(group.trajectories)
    return replace(group, trajectories=tuple(learned[:count]), beside=tuple(learned[count:]))


def _route(teachers: Mapping[str, RLTeacher], task: RolloutTask, is_correct: bool, start: str | None) -> int:
    """Index of the teacher of such rows; `NO_TEACHER` for none."""
    found = (index for index, teacher in enumerate(teachers.values()) if _takes(teacher, task, is_correct, start))
    return next(found, NO_TEACHER)


def _takes(teacher: RLTeacher, task: RolloutTask, is_correct: bool, start: str | None) -> bool:
    rows = teacher.rows
    if rows is None:
        return True
    problem, least = task.problem, rows.pass_rate_at_least
    return (
        (rows.data_source is None or problem.data_source in rows.data_source)
        and all(problem.extra_info.get(column) == value for column, value in rows.columns.items())
        and (rows.outcome is None or is_correct == (rows.outcome == "correct"))
        and (rows.start is None or start in rows.start)
        and (least is None or (task.pass_rate is not None and task.pass_rate >= least))
    )
