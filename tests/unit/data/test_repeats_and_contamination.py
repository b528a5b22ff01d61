"""Near duplicates, and benchmark problems in training data."""

import random

import numpy as np
import pytest
from support.installed import DATASETS, needs_datasets

from luffy.config.data import FieldsConfig, FileSource
from luffy.data.overlap import NUM_HASHES, BenchmarkIndex, Hit, near_duplicate_clusters, signature, similarity, words
from luffy.data.schema import problem_text
from luffy.types import Message, Prompt
from tests.synthetic.loaded_source import load_source

LONG = "Let n be a positive integer such that the sum of its digits is 17 and the product of them is as large as can be"


def prompt(text: str) -> Prompt:
    return Prompt("u", "t", (Message("user", text),), "1")


def index_of(*texts: str) -> BenchmarkIndex:
    index = BenchmarkIndex(ngram=13, overlap=0.5)
    index.add("bench", [prompt(text) for text in texts])
    return index.finish()


def read(name: str, problem: str = "problem") -> list[Prompt]:
    fields = FieldsConfig.model_validate({"data_source": "d", "problem": problem, "answer": {"column": problem}})
    path = next((DATASETS / name).glob("*.jsonl")) if (DATASETS / name).is_dir() else DATASETS / name
    return load_source(FileSource(kind="file", path=str(path), fields=fields), "train", 0).prompts


def triples(text: str) -> set[tuple[str, ...]]:
    found = words(text)
    return set(zip(found, found[1:], found[2:], strict=False))


def test_the_estimate_is_as_good_as_its_formula_says() -> None:
    rng = random.Random(0)
    errors, spread = [], []
    for _ in range(300):
        text = [str(rng.randrange(10**6)) for _ in range(60)]
        other = [word if rng.random() > rng.random() * 0.2 else "x" + word for word in text]
        one, two = triples(" ".join(text)), triples(" ".join(other))
        true = len(one & two) / len(one | two)
        errors.append(similarity(signature(" ".join(text)), signature(" ".join(other))) - true)
        spread.append(true * (1 - true) / NUM_HASHES)
    assert abs(np.mean(errors)) < 0.01
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.sqrt(np.mean(spread)), rel=0.25)


def test_near_duplicates_name_the_first_of_their_cluster() -> None:
    rng = random.Random(1)
    texts = [" ".join(str(rng.randrange(10**6)) for _ in range(80)) for _ in range(200)]
    texts[150] = texts[20] + " 7"
    texts[170] = "8 " + texts[150]
    first = near_duplicate_clusters(np.array([signature(text) for text in texts]), 0.8)
    assert {row: int(first[row]) for row in np.flatnonzero(first != np.arange(200))} == {150: 20, 170: 20}


def test_empty_and_one_word_texts_have_signatures() -> None:
    assert signature("").shape == signature("one").shape == (NUM_HASHES,)
    assert near_duplicate_clusters(np.zeros((0, NUM_HASHES), dtype=np.uint16), 0.9).tolist() == []


SHORT = "What is the sum of all whole numbers from 1 up to 100 that are odd + 3"
WHOLE, HALF = Hit("bench", 1, 1.0), len(LONG) // 2


@pytest.mark.parametrize(
    ("problem", "texts", "hits"),
    [
        (LONG, [f"I recall: {LONG.upper()}. So", LONG[:HALF], "nothing", ""], [WHOLE, None, None, None]),
        (LONG, [LONG[:HALF], LONG[HALF:]], [None, None]),  # no run crosses from one text into the next
        (SHORT, [f"so: {SHORT} now", SHORT.replace("+ 3", "- 3")], [WHOLE, None]),  # a short one must be quoted whole
    ],
)
def test_a_quotation_is_found_and_a_shared_sentence_is_not(problem: str, texts: list[str], hits: list) -> None:
    assert index_of(problem).find(texts) == hits


def test_equal_problems_match_at_any_length() -> None:
    assert index_of("1  + 1").equal(prompt("1 + 1")) == Hit("bench", 1, 1.0)
    assert index_of("1 + 1").equal(prompt("1 + 2")) is None


@needs_datasets
def test_known_contamination_is_found() -> None:
    index = BenchmarkIndex(ngram=13, overlap=0.5)
    index.add("math500", read("math500"))
    index.finish()
    test_split = read("math_test5000")
    equal = {hit.row for hit in map(index.equal, test_split) if hit}
    near = {hit.row for hit in index.find([problem_text(p.messages) for p in test_split]) if hit}
    assert len(equal | near) == 500
    old_aime = read("aime_1983_2023")
    assert sum(index.equal(p) is not None for p in old_aime) >= 1
    held = index.find([problem_text(p.messages) for p in old_aime])
    assert sum(hit is not None for hit in held) >= 6
    clean = index.find([problem_text(p.messages) for p in read("gsm8k/train.jsonl", "question")])
    assert sum(hit is not None for hit in clean) == 0


@needs_datasets
def test_real_traces_of_test_questions_are_found_by_their_questions() -> None:
    asked = read("reasoning_traces/gsm8k_qwq32b.parquet", "question")
    index = BenchmarkIndex(ngram=13, overlap=0.5)
    index.add("gsm8k_test", read("gsm8k/test.jsonl", "question"))
    index.finish()
    assert all(index.equal(p) for p in asked)
