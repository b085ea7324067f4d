"""`mmqa run`: what a row writes, and that it is what the stage verbs find."""

import html
import math
import re
from pathlib import Path

import numpy as np
import pytest
from cli_runs import ROOT, TEST, done, rows_of, succeeded, tree
from row_runs import ROWS, row_flags

from mmqa_jax.core.config import load_config
from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import source_text
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.inference.reader import Reader
from mmqa_jax.inference.reranker import Reranker
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever, WebQABM25Retriever, words
from mmqa_jax.retrieval.dense import DenseRetriever

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

IDS = [row["id"] for row in TEST]
GOLD = {row["id"]: row["positives"] for row in TEST}
ANSWERING = ("question_only", "constant", "oracle", "restricted", "full_scale", "retrieved")


@pytest.fixture(scope="module")
def flags_of(data, models, index):
    return lambda name, workdir: row_flags(name, workdir, data, models, index)


@pytest.fixture(scope="module")
def ran(flags_of, tmp_path_factory):
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp("rows") / name.replace(":", "_")
            result = done(*flags_of(name, folder))
            assert result == read_json(folder / "scores.json")
            folders[name] = folder
        return folders[name]

    return run


def served(folder: Path):
    """Each model of a row's config, and where it runs; a batch is that of its training's config."""
    sizes = {"contrastive": 64, "rerank": 8, "answer": 4}  # the first is chosen
    for name, spec in read_json(folder / "config.json")["config"]["parts"].items():
        for key, model in {"": spec, "similarity.": spec.get("similarity") or {}}.items():
            if path := model.get("model"):
                one = {"devices": 1, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}}
                yield f"{name}.{key}model", {**one, "batch_size": sizes[Path(path).name]}


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_writes(name, ran):
    paper, row = name.split(":")
    folder = ran(name)
    scores = read_json(folder / "scores.json")
    assert scores["dataset"] == paper
    assert (scores["row"], scores["split"], scores["setting"]) == (row, "test", ROWS[name])
    assert (scores["limit"], scores["questions"]) == (None, 5)
    assert scores.get("serving", {}) == dict(served(folder))
    assert scores["scores"]
    assert all(0 <= value <= 1 for value in scores["scores"].values())
    answers = ROWS[name] in ANSWERING
    assert ("webqa_acc/no_lemma" in scores["scores"]) == answers
    assert scores["n"] == (5 if answers else 4)  # test4 has no gold sources
    # Sources are scored where the system finds them itself.
    own = ROWS[name] not in ("question_only", "constant", "oracle")
    assert ("source_f1/official" in scores["scores"]) == own
    assert ("recall@2" in scores["scores"]) == own
    assert ("lost" in scores) == (own and answers)
    if "lost" in scores:
        stages = scores["lost"]["stages"].values()
        assert sum(stage["questions"] for stage in stages) == 4
        assert 0 <= sum(stage["lost"] for stage in stages) <= 1
    if answers:
        assert {"text", "color"} <= scores["by_category"].keys()
    predictions = rows_of(folder / "predictions.jsonl")
    assert [row["question_id"] for row in predictions] == IDS
    assert all("limit" not in row for row in predictions)
    rows = rows_of(folder / "per_question.jsonl")
    for row, prediction in zip(rows, predictions, strict=True):
        timed = {"seconds"} if ROWS[name] != "constant" else set()  # of its parts
        assert row.keys() == {"question_id", "scores", "answer", "sources", *timed}
        assert row["question_id"] == prediction["question_id"]
        assert row["answer"] == prediction["answer"]
        assert row["sources"] == prediction["sources"]
        assert all(0 < row[key] < 600 for key in timed)
    report = html.unescape((folder / "report.html").read_text())
    assert f"{paper}, test: {name.partition(':')[2]}" in report
    assert "(first " not in report


@pytest.mark.parametrize("name", ROWS)
def test_the_scores_are_the_means_of_the_questions(name, ran):
    folder = ran(name)
    scores, rows = read_json(folder / "scores.json"), rows_of(folder / "per_question.jsonl")
    assert {scorer for row in rows for scorer in row["scores"]} == scores["scores"].keys()
    for scorer, mean in scores["scores"].items():
        values = [row["scores"][scorer] for row in rows if scorer in row["scores"]]
        assert len(values) == scores["n_by_scorer"][scorer]
        assert sum(values) / len(values) == pytest.approx(mean)
        low, high = scores["intervals"][scorer]
        assert low <= mean <= high
    for category, found in scores["by_category"].items():
        ids = [row["id"] for row in TEST if row["category"] == category]
        for scorer, mean in found.items():
            values = [
                row["scores"][scorer]
                for row in rows
                if row["question_id"] in ids and scorer in row["scores"]
            ]
            assert sum(values) / len(values) == pytest.approx(mean)


# With and without answers and sources of its own, of each kind of candidates.
EVALUATED = (
    *("atlas:question_only", "atlas:full", "atlas:restricted_vlp", "atlas:rrf"),
    *("webqa:vlp", "webqa:clip20_vlp", "webqa:bm25_known"),
)


@pytest.mark.parametrize("name", EVALUATED)
def test_the_scores_are_those_of_evaluate(name, ran, data):
    folder = ran(name)
    flags = (f"--references={data}", "--lemmatizer=none")
    again = done(
        *("evaluate", name.partition(":")[0], *flags),
        f"--predictions={folder / 'predictions.jsonl'}",
    )
    scores = read_json(folder / "scores.json")
    # Recall is of all candidates; evaluate sees the cited sources alone.
    cited = {k: v for k, v in scores["scores"].items() if not k.startswith(("recall", "mrr"))}
    assert cited == {k: pytest.approx(again["scores"][k]) for k in cited}
    for category, found in again["by_category"].items():
        for scorer, value in found.items():
            if scorer in cited:
                assert scores["by_category"][category][scorer] == pytest.approx(value)
    for name in ("relevance", "candidates"):
        path = folder / "retrieval" / f"{name}.jsonl"
        if path.exists():
            ranked = done("evaluate", "corpus", f"--references={data}", f"--predictions={path}")
            recall = {k: v for k, v in scores["scores"].items() if k not in cited}
            assert recall == {k: pytest.approx(ranked["scores"][k]) for k in recall}
            break


def same_predictions(run: Path, verb: Path) -> None:
    for one, other in zip(rows_of(run), rows_of(verb), strict=True):
        assert (one["question_id"], one["answer"]) == (other["question_id"], other["answer"])
        assert one["sources"] == other["sources"]
        np.testing.assert_allclose(one["source_scores"], other["source_scores"], rtol=1e-5)
        assert [text for text, _ in one["beams"]] == [text for text, _ in other["beams"]]
        np.testing.assert_allclose(
            [score for _, score in one["beams"]], [s for _, s in other["beams"]], rtol=1e-5
        )


def same_rankings(run: Path, verb: Path) -> None:
    for one, other in zip(rows_of(run), rows_of(verb), strict=True):
        assert (one["question_id"], one["sources"]) == (other["question_id"], other["sources"])
        np.testing.assert_allclose(one["scores"], other["scores"], rtol=1e-5)


@pytest.mark.parametrize("name", ["question_only", "oracle"])
def test_a_reader_alone_as_answer(name, ran, data, models, tmp_path):
    out = tmp_path / "predictions.jsonl"
    sources = {"question_only": "none", "oracle": "oracle"}[name]
    done(
        "answer", f"--data={data}", f"--model={models / 'answer'}", f"--sources={sources}",
        f"--out={out}",
    )  # fmt: skip
    same_predictions(ran(f"atlas:{name}") / "predictions.jsonl", out)
    cited = {row["question_id"]: row["sources"] for row in rows_of(out)}
    assert cited == (GOLD if name == "oracle" else {name: [] for name in IDS})


# Row -> flags of `search` (None: each question's own candidates), `rerank`, `answer`.
STAGES = {
    "webqa:vlp": (None, ["--cap=webqa"], ["--threshold=0.2", "--select=above"]),
    "webqa:clip20_vlp": (
        ["--method=dense", "--modality=known", "--top_k=20"],
        ["--top_k=20"],
        ["--threshold=0.2", "--select=best"],
    ),
    "atlas:restricted": (None, ["--similarity_weight=160"], ["--threshold=0.05"]),
    "atlas:full": (
        ["--method=dense", "--second_hop", "--top_k=20"],
        ["--top_k=20", "--similarity_weight=160"],
        ["--threshold=0.05"],
    ),
    "atlas:restricted_vlp": (None, ["--similarity_weight=0"], ["--threshold=0.15"]),
    "atlas:full_one_hop": (
        ["--method=dense", "--top_k=20"],
        ["--top_k=20", "--similarity_weight=160"],
        ["--threshold=0.05"],
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_row_as_its_stages(name, ran, data, models, index, tmp_path):
    search, rerank, answer = STAGES[name]
    folder, corpus = ran(name), f"--data={data}"
    paths = [tmp_path / f"{verb}.jsonl" for verb in ("search", "rerank", "answer")]
    dense = [f"--model={models / 'contrastive'}", f"--index={index}"]
    candidates = "restricted"
    if search is not None:
        found = done("search", corpus, *dense, *search, f"--out={paths[0]}")
        assert (
            found.items() >= read_json(folder / "scores.json")["serving"]["retriever.model"].items()
        )
        same_rankings(folder / "retrieval" / "candidates.jsonl", paths[0])
        candidates = paths[0]
    if name.startswith("atlas"):
        rerank = [*rerank, f"--retriever={models / 'contrastive'}", f"--index={index}"]
    flags = (f"--model={models / 'rerank'}", f"--candidates={candidates}")
    done("rerank", corpus, *flags, *rerank, f"--out={paths[1]}")
    same_rankings(folder / "retrieval" / "relevance.jsonl", paths[1])
    flags = (f"--model={models / 'answer'}", f"--sources={paths[1]}")
    done("answer", corpus, *flags, *answer, f"--out={paths[2]}")
    if ROWS[name] in ANSWERING:
        same_predictions(folder / "predictions.jsonl", paths[2])
    else:
        for one, other in zip(
            rows_of(folder / "predictions.jsonl"), rows_of(paths[2]), strict=True
        ):
            assert (one["answer"], one["sources"]) == ("", other["sources"])


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("webqa:clip2_vlp", ["--method=dense", "--modality=known"]),
        ("webqa:clip2", ["--method=dense", "--modality=known"]),
        ("webqa:clip2_unknown", ["--method=dense"]),
        ("webqa:bm25_full", ["--method=bm25", "--webqa_compat"]),
        ("webqa:bm25_known", ["--method=bm25", "--webqa_compat", "--modality=known"]),
        ("atlas:bm25", ["--method=bm25"]),
        ("atlas:rrf", ["--method=rrf"]),
        ("atlas:fused", ["--method=fused", "--fusion_weight=0.9"]),
        ("atlas:fused_second_hop", ["--method=fused", "--fusion_weight=0.9", "--second_hop"]),
        ("atlas:restricted_bm25", ["--method=bm25", "--candidates=restricted"]),
        ("atlas:restricted_dense", ["--method=dense", "--second_hop", "--candidates=restricted"]),
    ],
)
def test_what_a_retriever_ranks_first_is_cited(name, flags, ran, data, models, index, tmp_path):
    if "--method=bm25" not in flags:
        flags = [*flags, f"--model={models / 'contrastive'}", f"--index={index}"]
    found = tmp_path / "found.jsonl"
    done("search", f"--data={data}", *flags, "--top_k=2", f"--out={found}")
    for one, other in zip(rows_of(ran(name) / "predictions.jsonl"), rows_of(found), strict=True):
        assert (one["question_id"], one["sources"]) == (other["question_id"], other["sources"])
        np.testing.assert_allclose(one["source_scores"], other["scores"], rtol=1e-5)
        assert len(one["sources"]) <= 2


def test_the_candidates_of_a_run_are_kept_for_recall(ran, data):
    """A hundred are ranked although two are cited: here all that share a word with the question."""
    rows = rows_of(ran("atlas:bm25") / "retrieval" / "candidates.jsonl")
    corpus = open_corpus(data)
    asked = {question.id: set(words(question.question)) for question in corpus.questions("test")}
    for row in rows:
        alike = [
            s.id for s in corpus.sources if asked[row["question_id"]] & {*words(source_text(s))}
        ]
        assert sorted(row["sources"]) == sorted(alike)
    assert max(len(row["sources"]) for row in rows) > 2
    assert read_json(ran("atlas:bm25") / "scores.json")["scores"]["recall@1"] == 1.0


def test_the_first_questions_of_a_split(flags_of, ran, data, tmp_path):
    """--limit says so in all that is written, and changes nothing else."""
    name, folder = "webqa:vlp", tmp_path / "run"
    ended = succeeded(*flags_of(name, folder), "--limit=2")
    assert "webqa, test: vlp (first 2 questions)" in ended.out
    scores = read_json(folder / "scores.json")
    assert (scores["limit"], scores["n"], scores["questions"]) == (2, 2, 2)
    assert read_json(folder / "config.json")["config"]["limit"] == 2
    report = html.unescape((folder / "report.html").read_text())
    assert "vlp (first 2 questions)" in report
    assert [row["question"] in report for row in TEST] == [True, True, False, False, False]
    whole = ran(name)
    for file in ("predictions.jsonl", "per_question.jsonl"):
        rows, all_rows = rows_of(folder / file), rows_of(whole / file)
        assert [row["question_id"] for row in rows] == IDS[:2]
        for row, other in zip(rows, all_rows[:2], strict=True):
            assert row.pop("limit") == 2
            for key in ("answer", "sources", "scores"):
                assert row.get(key) == other.get(key)
    flags = (f"--references={data}", "--lemmatizer=none", "--only_given")
    again = done("evaluate", "webqa", *flags, f"--predictions={folder / 'predictions.jsonl'}")
    assert again["n"] == 2
    accuracy = "webqa_acc/no_lemma"
    assert again["scores"][accuracy] == pytest.approx(scores["scores"][accuracy])


def test_a_limit_above_the_number_of_questions(flags_of, tmp_path):
    result = done(*flags_of("atlas:bm25", tmp_path / "run"), "--limit=50")
    assert (result["limit"], result["questions"]) == (50, 5)


def test_a_split_whose_gold_is_hidden(flags_of, tmp_path):
    """Sources are found, but which are gold is not known (val of the tiny corpus)."""
    flags = flags_of("webqa:vlp", tmp_path / "run")
    result = done(*flags, "--split=val")
    assert (result["split"], result["questions"]) == ("val", 3)
    assert result["scores"].keys() == {"webqa_acc/no_lemma", "exact_match/no_lemma"}
    rows = rows_of(tmp_path / "run" / "predictions.jsonl")
    assert [row["question_id"] for row in rows] == ["val0", "val1", "val2"]
    (note,) = [note for note in result["notes"] if note.startswith("cap=webqa: 3 of 3 questions")]
    assert html.escape(note) in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("name", ["webqa:vlp", "webqa:clip20_vlp", "webqa:bm25_full"])
def test_rows_on_the_hidden_test_split(name, bare_data, models, index, tmp_path):
    """Predictions for the leaderboard, from the row as it is; bare_data hides all that is gold."""
    flags = row_flags(name, tmp_path / "run", bare_data, models, index)
    if "clip20" in name:  # an index of this corpus, and no gold sources to tell the modality
        done("embed", f"--data={bare_data}", f"--model={models / 'contrastive'}",
             f"--out={tmp_path / 'index'}")  # fmt: skip
        done("index", f"--embeddings={tmp_path / 'index'}", "--kind=exact")
        flags.append(f"--config.parts.retriever.index={tmp_path / 'index'}")
    result = done(*flags)
    assert (result["scores"], result["split"]) == ({}, "test")
    assert result["notes"][0] == "gold answers and sources of this split are not published"
    assert len(result["notes"]) == 1 + (name == "webqa:vlp")  # of the cap
    assert len(rows_of(tmp_path / "run" / "predictions.jsonl")) == 8


def test_questions_evenly_over_the_split(flags_of, tmp_path):
    flags = (*flags_of("atlas:bm25", tmp_path / "run"), "--config.data.questions=2")
    result = done(*flags)
    assert (result["questions"], result["sample"]) == (2, 2)
    rows = rows_of(tmp_path / "run" / "predictions.jsonl")
    assert [row["question_id"] for row in rows] == [IDS[0], IDS[2]]


def test_questions_of_one_modality(flags_of, tmp_path):
    flags = (*flags_of("atlas:bm25", tmp_path / "run"), "--config.data.modality=image")
    done(*flags)
    rows = rows_of(tmp_path / "run" / "predictions.jsonl")
    assert [row["question_id"] for row in rows] == ["test3"]  # of the flag


def test_a_split_of_which_nothing_is_known(bare_data, models, index, tmp_path):
    """As WebQA's test split: predictions for the leaderboard, no scores."""
    result = done(*row_flags("atlas:question_only", tmp_path / "run", bare_data, models, index))
    assert (result["scores"], result["n"], result["questions"]) == ({}, 0, 8)
    assert result["notes"] == ["gold answers and sources of this split are not published"]
    rows = rows_of(tmp_path / "run" / "per_question.jsonl")
    assert [row["scores"] for row in rows] == [{}] * 8
    assert result["notes"][0] in (tmp_path / "run" / "report.html").read_text()


def test_empty_answers_are_scored(flags_of, monkeypatch, tmp_path):
    """A reader that says nothing is wrong; it is no retriever."""
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: "")
    result = done(*flags_of("atlas:oracle", tmp_path / "run"))
    assert {row["answer"] for row in rows_of(tmp_path / "run" / "predictions.jsonl")} == {""}
    assert result["scores"]["webqa_acc/no_lemma"] == 0


@pytest.mark.parametrize("name", ["atlas:full", "webqa:clip20_vlp", "webqa:bm25_full"])
def test_a_second_start_repeats_nothing(name, ran, flags_of, monkeypatch):
    folder = ran(name)
    journals = tree(folder / "journals")
    assert journals
    before = {
        file.name: file.read_bytes()
        for file in (*folder.glob("*.jsonl"), *folder.glob("retrieval/*"), folder / "scores.json")
    }

    def again(*_, **__):
        raise AssertionError("this was computed before")

    monkeypatch.setattr(Reader, "answer_batches", again)
    monkeypatch.setattr(Reranker, "score_batches", again)
    for retriever in (DenseRetriever, BM25Retriever, WebQABM25Retriever):
        for method in ("search", "search_within"):
            if hasattr(retriever, method):
                monkeypatch.setattr(retriever, method, again)
    result = done(*flags_of(name, folder))
    assert result == read_json(folder / "scores.json")
    assert tree(folder / "journals") == journals
    for file in (*folder.glob("*.jsonl"), *folder.glob("retrieval/*"), folder / "scores.json"):
        assert file.read_bytes() == before.pop(file.name), file
    assert before == {}


def test_what_the_report_shows(ran, data):
    folder = ran("webqa:clip20_vlp")
    report = html.unescape((folder / "report.html").read_text())
    assert "webqa, test: clip20_vlp" in report
    assert "Where answers are lost" in report
    for row in TEST:
        assert row["question"] in report
    scores = read_json(folder / "scores.json")["scores"]
    shown = [float(number) for number in re.findall(r"\d\.\d{3}", report)]
    for scorer in ("webqa_acc/no_lemma", "source_f1/official"):
        assert scorer in report
        assert any(math.isclose(scores[scorer], number, abs_tol=6e-4) for number in shown)


def test_the_config_of_a_row_is_recorded(ran, data, models):
    recorded = read_json(ran("webqa:vlp") / "config.json")
    config = recorded["config"]
    assert config["row"] == "vlp"
    assert config["parts"]["reader"]["model"] == str(models / "answer")
    assert config["data"]["dir"] == str(data)
    assert config["data"]["split"] == "test"
    assert {"versions", "started", "host"} <= recorded.keys()
    assert open_corpus(data).fingerprint[:16] in (ran("webqa:vlp") / "report.html").read_text()


def test_the_tables_show_what_was_measured(ran):
    for name in ("webqa:vlp", "atlas:restricted"):
        paper, row = name.split(":")
        scores = read_json(ran(name) / "scores.json")["scores"]
        figures = [
            figure
            for figure in done("tables", paper, f"--workdir={ran(name)}")["rows"]
            if figure["config_row"] == row and figure["scorer"] in scores
        ]
        assert figures
        for figure in figures:
            if figure["column"] not in ("source_f1_image", "source_f1_text"):
                assert figure["measured"] == scores[figure["scorer"]]
            # WebQA's figures are judged on the row's own split, val, alone.
            judged = {"webqa": ("partial",), "atlas": ("pass", "fail")}
            assert figure["status"] in judged[paper]
            near = abs(figure["measured"] - figure["published"]) <= figure["tolerance"]
            assert paper == "webqa" or (figure["status"] == "pass") == near


def test_runs_compared(ran):
    vlp, clip, clip2 = (ran(f"webqa:{row}") for row in ("vlp", "clip20_vlp", "clip2"))
    found = done("compare", vlp, clip)
    scores = [
        read_json(folder / "scores.json")["scores"][found["metric"]] for folder in (vlp, clip)
    ]
    assert [run["score"] for run in found["runs"]] == pytest.approx(scores)
    assert [run["n"] for run in found["runs"]] == [5, 5]
    assert found["pairs"][0]["difference"] == pytest.approx(scores[0] - scores[1])
    found = done("compare", vlp, clip, clip2, "--metric=recall@1")
    assert [run["n"] for run in found["runs"]] == [4, 4, 4]  # with gold sources
    assert len(found["pairs"]) == 3
    # Without --metric the first that all have.
    assert done("compare", vlp, clip2)["metric"] == "source_f1/official"


def test_the_rows_of_the_test_cover_every_setting():
    from mmqa_jax.papers import webqa

    assert set(ROWS.values()) == set(webqa.SETTINGS)
    for name, setting in ROWS.items():
        paper, row = name.split(":")
        assert load_config(f"{ROOT}/configs/{paper}/tables.py:{row}").setting == setting
