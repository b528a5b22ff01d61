"""What verl's trainer dumps (`rollout_data_dir`) is graded: prompts that its template has written, and no uid."""

import json

from luffy.config.grading import GradingConfig
from luffy.evaluation.regrading import read_responses


def test_a_dump_of_rollouts_is_read(tmp_path):
    rows = [
        {"input": f"<|im_start|>user\n{n} + 1?<|im_end|>\n<|im_start|>assistant\n", "output": said, "gts": str(n + 1)}
        | {"score": 0.0, "step": 10}
        for n in range(2)
        for said in (r"\boxed{1}", r"\boxed{2}")
    ]
    (tmp_path / "10.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = read_responses([tmp_path / "10.jsonl"], GradingConfig())
    assert [(problem.prompt.ground_truth, problem.is_rendered) for problem in problems] == [("1", True), ("2", True)]
    assert all(problem.responses == [r"\boxed{1}", r"\boxed{2}"] for problem in problems)
