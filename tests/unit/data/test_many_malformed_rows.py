"""A small file may hold any number of malformed rows: all are counted, and the first thousand are kept."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from support.stages import execute, opened


def test_malformed_rows_are_counted_and_the_first_thousand_kept(tmp_path):
    file, rows = tmp_path / "rows.parquet", 30_000
    texts = pa.array(["1 + 1 ="] * 3 + [None] * rows, pa.string())
    pq.write_table(pa.table({"prompt": texts, "answer": pa.array(["2"] * (rows + 3))}), file)
    experiment = opened(tmp_path / "work", "smoke.yaml", f"data.suites.more={{kind: file, path: {file}}}")
    execute(experiment, "prepare_data")
    out = experiment.plan_node("prepare_data").directory
    card = json.loads((out / "card.json").read_text())["sources"]["suites.more"]
    assert (card["rows_in"], card["quarantined"], card["malformed"]) == (rows + 3, rows, {"prompt": rows})
    kept = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [each["row"] for each in kept if each["source"] == "suites.more"] == list(range(4, 1004))
