"""Stages of `placed_kills.py` that pay for answers: a model behind an endpoint with a judge, and a teacher.

No answer may be paid for twice, but for those that were under way at the kill.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_points import Fault, Shim
from fault_subjects import SAMPLED, SMOKE, StageSubject, make_chain, subject_of

from luffy.config import load_experiment
from luffy.config.derived import evaluation_of
from luffy.data.parquet import read_prompts
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace

sys.path.append(str(Path(__file__).resolve().parents[1]))
from synthetic.endpoint import CHAT, Endpoint, Reply, by_seed, completion

PAYING_KINDS = ("evaluate_paid", "synthesize_paid")
_AT_ONCE = 4
_JUDGE = "judge"


@dataclass
class PayingSubject:
    """A stage and the endpoint that it asks."""

    kind: str
    stage: StageSubject
    endpoint: Endpoint

    @property
    def log(self) -> Path:
        return self.stage.log

    def reset(self) -> None:
        self.stage.reset()
        self.endpoint.asked.clear()

    def run(self, shim: Shim, fault: Fault | None) -> int:
        return self.stage.run(shim, fault)

    def state(self) -> str:
        return f"{self.stage.state()}, {len(self.endpoint.asked)} paid"

    def problems(self) -> list[str]:
        asked = Counter(json.dumps(body, sort_keys=True) for _, body in self.endpoint.asked)
        twice = Counter[str]()
        for body, number in asked.items():
            twice[json.loads(body)["model"]] += number - 1
        paid = [
            f"{model}: {number} answers were paid for again" for model, number in twice.items() if number > _AT_ONCE
        ]
        return self.stage.problems() + paid

    def has_repeated(self, found: str) -> bool:
        return self.stage.has_repeated(found.partition(",")[0])

    def end_orphans(self) -> int:
        return self.stage.end_orphans()


def paying_subjects(root: Path, kept: Path, kinds: Sequence[str], shim: Shim) -> Iterator[PayingSubject]:
    """The subjects of these kinds, after what they need has been made in the workspace `root`."""
    log = kept / "log.txt"
    os.environ[WORKSPACE_VARIABLE] = str(root)
    if "evaluate_paid" in kinds:
        yield _evaluated(root, log, shim)
    if "synthesize_paid" in kinds:
        yield _taught(root, log, shim)


def _evaluated(root: Path, log: Path, shim: Shim) -> PayingSubject:
    endpoint = Endpoint(_answer_or_verdict, (CHAT,))
    judge = f"kind: judge, url: '{endpoint.url}/v1', model: {_JUDGE}, parallel: {_AT_ONCE}"
    asking = f"execution.server={{concurrency: {_AT_ONCE}}}"
    own = load_experiment(SMOKE, [f"grading.kind={{{judge}}}", asking, "execution.grader_workers=1"])
    config = evaluation_of(own, "api:org/model", urls=[endpoint.url])
    experiment = open_experiment(config, Workspace(root))
    make_chain(experiment, shim, log, last="evaluate")
    return PayingSubject("evaluate_paid", subject_of("evaluate", experiment, log), endpoint)


def _answer_or_verdict(path: str, body: dict) -> Reply:
    if body["model"] != _JUDGE:
        return by_seed(path, body)
    is_right = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()[0] % 2
    return completion(f"VERDICT: {'CORRECT' if is_right else 'INCORRECT'}")


def _taught(root: Path, log: Path, shim: Shim) -> PayingSubject:
    truths: dict[str, str] = {}

    def answer(path: str, body: dict) -> Reply:
        truth = truths[body["messages"][-1]["content"]]
        # Every third question gets a wrong answer to its first sample, so that another one is asked for.
        said = "100" if int(truth) % 3 == 0 and body["seed"] % 2 else truth
        return completion(f"{said} \\boxed{{{said}}}", prompt_tokens=5)

    endpoint = Endpoint(answer, (CHAT,))
    teacher = "big: {endpoint: {name: org/big}, max_response_tokens: 40, num_samples: 2}"
    served = f"big: {{urls: ['{endpoint.url}'], concurrency: {_AT_ONCE}}}"
    changes = [*SAMPLED, "chain=sft", "stages=[prepare_data, base, synthesize, sft]"]
    changes += [f"synthesize={{prompts: all, teachers: {{{teacher}}}}}", f"execution.teachers={{{served}}}"]
    experiment = open_experiment(load_experiment(SMOKE, changes), Workspace(root))
    make_chain(experiment, shim, log, last="base")
    data = experiment.plan_node("prepare_data").directory
    truths |= {prompt.messages[-1].content: prompt.ground_truth for prompt in read_prompts(data / "train.parquet")}
    make_chain(experiment, shim, log, last="synthesize")
    return PayingSubject("synthesize_paid", subject_of("synthesize", experiment, log), endpoint)
