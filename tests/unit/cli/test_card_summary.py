import json

from luffy.cli.run_view import CARD_HEADER, card_rows

SOURCE = {
    "kind": "file", "rows_in": 10, "rows_out": 6, "quarantined": 1, "malformed": {"reward_model": 1},
    "rejected": {"wrong": 2, "too_long": 1}, "folded": 0, "traces_out": 7,
    "prompt_tokens": {"min": 3, "p50": 5, "max": 9}, "golds": {}, "gold_findings": [],
}  # fmt: skip


def test_the_summary_counts_and_names_no_row(tmp_path):
    golds = {"golds": {"meets_itself": 5, "fails": 1}, "gold_findings": [{"uid": "secret", "finding": "fails"}]}
    suite = {**SOURCE, "quarantined": 0, "malformed": {}, "rejected": {}, "prompt_tokens": {}, **golds}
    card = {
        "sources": {"train": SOURCE, "suites.hard": suite},
        "benchmarks": {"checked": {"suites.hard": 6}, "not_checked": ["aime24"]},
    }
    (tmp_path / "card.json").write_text(json.dumps(card))
    rows, notes = card_rows(tmp_path)
    assert rows[0] == ["train", "file", "10", "6", "3", "0", "1", "7", "3 to 9, median 5"]
    assert [len(row) for row in rows] == [len(CARD_HEADER)] * 2
    assert notes == [
        "Malformed in train, by field: reward_model 1",
        f"Each malformed row: {tmp_path / 'quarantine.jsonl'}",
        "Rejected of train: wrong 2, too_long 1",
        "Reference answers of suites.hard: meets itself 5, fails 1",
        "Training data was checked against: suites.hard; not available: aime24",
        f"The whole card: {tmp_path / 'card.md'}",
    ]
    assert "secret" not in str((rows, notes))
