"""`mmqa judge`, the retriever that is trained on its scores, and the row that uses it."""

import pytest
from cli_runs import done, flags_with, of_engine, quietly, rows_of
from science import prepare_science
from tiny_llm import write_folder

from mmqa_jax.data.batches.retriever import read_example_scores

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

CONFIG = "scienceqa/rmr_retriever.py"
TINY = {
    "tokenizer": "corpus:120", "model.changes.hidden": 32, "model.changes.layers": 1,
    "model.changes.heads": 2, "model.changes.mlp": 32,
    "model.vision.width": 16, "model.vision.layers": 1, "model.vision.mlp_width": 16,
    "batches.length": 24, "batches.threads": 0, "inference.buckets": "(24,)",
    "train.steps": 2, "train.evaluate_every": 1, "train.checkpoint_every": 1, "train.log_every": 1,
}  # fmt: skip


def judge_flags(folder, workdir, **changes) -> list[str]:
    values = {"data.dir": folder / "data", "parts.llm.model": folder / "llm",
              "parts.library.text_model": "", "judge.similarity": "random", "judge.candidates": 3,
              "judge.questions": 6, **changes}  # fmt: skip
    return flags_with("judge", f"{CONFIG}:judge", workdir, values | of_engine())


def train_flags(folder, workdir, **changes) -> list[str]:
    values = {"data.dir": folder / "data", "data.scores": folder / "scores", **TINY, **changes}
    return flags_with("train", f"{CONFIG}:runlocal", workdir, values)


@pytest.fixture(scope="module")
def inputs(cli_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    with quietly(cli_cache):
        prepare_science(folder)
        write_folder(folder / "llm")
        judged = done(*judge_flags(folder, folder / "scores"))
        trained = done(*train_flags(folder, folder / "run"))
    assert (judged["questions"], judged["candidates"], judged["left_out"]) == (10, 30, 0)
    assert trained["best"]["metric"] == "score_of_nearest"
    return folder


def test_the_scores(inputs):
    rows = read_example_scores(inputs / "scores")
    assert len(rows) == 10
    assert all(score <= 0 for row in rows for score in (row.alone, *row.scores))
    assert len({score for row in rows for score in row.scores}) > 10


def test_a_second_run_asks_the_model_nothing(inputs, tmp_path, monkeypatch):
    before = (inputs / "scores" / "example_scores.jsonl").read_bytes()
    (inputs / "scores" / "example_scores.jsonl").unlink()
    monkeypatch.setattr(
        "mmqa_jax.prompting.backends.local_model.Engine",
        lambda *_, **__: pytest.fail("an engine is made"),
    )
    done(*judge_flags(inputs, inputs / "scores"))
    assert (inputs / "scores" / "example_scores.jsonl").read_bytes() == before


def test_the_best_step_has_the_highest_score(inputs):
    rows = [row for row in rows_of(inputs / "run" / "metrics.jsonl") if "eval/recall@1" in row]
    assert [row["step"] for row in rows] == [1, 2]
    scores = read_example_scores(inputs / "scores")[6:]
    low, high = (sum(of(row.scores) for row in scores) / 4 for of in (min, max))
    assert all(low - 1e-6 <= row["eval/score_of_nearest"] <= high + 1e-6 for row in rows)


def test_a_row_retrieves_with_the_run(inputs, tmp_path):
    values = {"data.dir": inputs / "data", "parts.llm.model": inputs / "llm", "options.shots": 1,
              "parts.library.text_model": inputs / "run" / "best"}  # fmt: skip
    config = "scienceqa/tables.py:smollm2_trained_retriever_k3"
    done(*flags_with("run", config, tmp_path / "row", values | of_engine()), "--limit=2")
    for trace in rows_of(tmp_path / "row" / "trace.jsonl"):
        (shots,) = trace["shots"]
        assert len(shots) == 1
        assert -1 <= shots[0]["similarity"] <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge.candidates": 1}, r"judge\.candidates=1: at least 2 were expected"),
        ({"judge.template": "rmr.none"}, r"template=rmr\.none: no such prompt template"),
        ({"data.splits": "('train','none')"}, r"data\.splits=\('train', 'none'\): .* split none"),
        ({"judge.score": "best"}, r"judge\.score='best'"),
        ({"parts.llm.model": "nowhere"}, r"config key parts.llm.model=nowhere: no such file"),
    ],
)
def test_what_cannot_be_judged_leaves_nothing(inputs, tmp_path, refused, changes, message):
    refused(*judge_flags(inputs, tmp_path / "scores", **changes), message=message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.scores": "nowhere"}, r"nowhere: no such file"),
        ({"batches.candidates": 4}, r"batches\.candidates=4: no judged question has so many"),
        ({"data.split": "test"}, r"holds no question of split test"),
        ({"validate.split": "test"}, r"holds no question of split test"),
        ({"data.text": "title"}, r"data\.text='title'"),
        ({"batches.length": 10_000}, r"batches\.length: 10000 tokens, but the text tower reads"),
        ({"target_temperature": 0.0}, r"target_temperature=0\.0: at least"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing(inputs, tmp_path, refused, changes, message):
    refused(*train_flags(inputs, tmp_path / "run", **changes), message=message)
