"""Dyn-VQA, MMSearch, FactualVQA and LiveVQA: their files, and scores that the authors' code gives."""

import json

import pytest
from cli_runs import png

from mmqa_jax.benchmarks import dynvqa, fvqa, livevqa, mmsearch
from mmqa_jax.data.schema import Prediction
from mmqa_jax.evaluation.vqa import squad_contained, squad_exact_match, squad_f1
from tests.refusals import refuses

PICTURE = png((9, 8, 7))
# (language, answers, prediction) -> compute_acc of OmniSearch's evaluate.py, of a prediction that
# its lines before have normalized.
RECALLS = [
    ("en", ["保时捷 944", "Porsche 944."], "It is a Porsche, model 944", 1.0),
    ("en", ["Porsche 944."], "Porsche", 0.5),
    ("en", ["It was sold at Christie's instead of Sotheby's."], "Christie's sold it", 0.4),
    ("en", ["No. It was added later."], "no, it was not", 3 / 5),
    ("en", ["2", "two"], "two", 1.0),
    ("en", ["the"], "the", 0.0),
    ("en", [","], "x", 0.0),
    ("zh", ["扬科维奇", "Jankovic"], "教练是扬科维奇。", 1.0),
    ("zh", ["边疆航空并未收购精神航空"], "边疆航空", 1 / 3),
    ("zh", ["16"], "16 个国家", 1.0),
]
# (prediction, answers) -> MMSearch's get_f1_score, the most of all answers; MMSearch-R1's em_check
# and subem_check.
SQUAD = [
    ("The Eiffel Tower, in Paris.", ["Eiffel tower"], 2 / 3, 0, 1),
    ("an Eiffel tower", ["the Eiffel-Tower", "Eiffel tower!"], 1, 1, 1),
    ("Rome", ["Paris", "Lyon"], 0, 0, 0),
    ("the", ["a"], 1, 1, 1),
    ("Rome", ["-"], 0, 0, 1),
]


@pytest.mark.parametrize(("language", "answers", "prediction", "recall"), RECALLS)
def test_recall_is_the_authors(language, answers, prediction, recall):
    pytest.importorskip("jieba")
    pytest.importorskip("punkt")
    assert dynvqa.word_recall(prediction, answers, language) == pytest.approx(recall, abs=1e-9)


@pytest.mark.parametrize(("prediction", "answers", "f1", "exact", "contained"), SQUAD)
def test_squads_scores_are_the_authors(prediction, answers, f1, exact, contained):
    assert squad_f1(prediction, answers) == pytest.approx(f1, abs=1e-9)
    assert squad_exact_match(prediction, answers) == exact
    assert squad_contained(prediction, answers) == contained


def means(evaluation, scorer):
    (scores,) = evaluation.scored
    by_group = {name: values[scorer] for name, values in scores.by_category.items()}
    return {"": scores.scores[scorer], **by_group}


ENGLISH = {
    "image_url": "https://example.org/1.jpeg", "question": "Who coaches this team?",
    "question_id": "en1", "answer": ["Jankovic", 2], "gloden_query": "coach of China",
}  # fmt: skip


def write_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_newest_dyn_vqa(tmp_path):
    write_lines(tmp_path / "DynVQA_en/DynVQA_en.202412.jsonl", {**ENGLISH, "question": "Old?"})
    newest = tmp_path / "DynVQA_en/DynVQA_en.202502.jsonl"
    write_lines(newest, ENGLISH)
    write_lines(tmp_path / "DynVQA_zh.202412.jsonl", {**ENGLISH, "question_id": "zh1"})
    (tmp_path / "images").mkdir()
    (tmp_path / "images/en1.png").write_bytes(PICTURE)
    files = dynvqa.read_dynvqa(tmp_path)
    english, chinese = files.questions
    assert (english.question, english.image) == ("Who coaches this team?", "en1")
    assert (english.answers, english.category) == (("Jankovic", "2"), "en")
    assert english.extra == {
        "image_url": "https://example.org/1.jpeg", "golden_query": "coach of China"
    }  # fmt: skip
    assert (chinese.id, chinese.image, files.counts["zh questions"]) == ("zh1", None, 1)
    results = tmp_path / "results.jsonl"
    dynvqa.write_dynvqa_results(files.questions, [Prediction("en1", "Jankovic")], results)
    assert dynvqa.BENCHMARK.read_predictions(results, files.questions) == [
        Prediction("en1", "Jankovic"), Prediction("zh1", ""),
    ]  # fmt: skip
    for answer in ("Jankovic", [], [["x"]]):
        write_lines(newest, {**ENGLISH, "answer": answer})
        refuses("line 1: answer is", dynvqa.read_dynvqa, tmp_path)


@pytest.mark.parametrize("name", ["dynvqa", "mmsearch", "fvqa", "livevqa"])
def test_a_folder_without_questions(name, tmp_path):
    module = {"dynvqa": dynvqa, "mmsearch": mmsearch, "fvqa": fvqa, "livevqa": livevqa}[name]
    refuses("holds no", module.BENCHMARK.read, tmp_path)


def write_table(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


SEARCH = {
    "sample_id": "news_1", "query": "Who won?", "query_image": {"bytes": PICTURE, "path": None},
    "area": "news", "subfield": "sports", "gt_requery": "winner of the cup", "gt_answer": "Spain",
    "alternative_gt_answers": ["the team of Spain"], "timestamp": "2024-07",
}  # fmt: skip


def test_mmsearch(tmp_path):
    worded = {**SEARCH, "sample_id": "k_2", "query_image": None, "area": "knowledge"}
    table = tmp_path / "end2end.parquet"
    write_table(table, [SEARCH, worded])
    files = mmsearch.read_mmsearch(tmp_path)
    first, second = files.questions
    assert (first.answers, first.image) == (("Spain", "the team of Spain"), "news_1/query_image")
    assert files.read_picture(first.image) == PICTURE
    assert second.image is None
    predictions = [Prediction("news_1", "Team Spain won")]
    assert means(mmsearch.score_mmsearch(files.questions, predictions), mmsearch.SCORER) == {
        "": pytest.approx(1 / 3), "news": pytest.approx(2 / 3), "knowledge": 0,
        "subfield: sports": pytest.approx(1 / 3),
    }  # fmt: skip
    write_table(table, [{**SEARCH, "area": "other"}])
    refuses("area is 'other'; news or knowledge", mmsearch.read_mmsearch, tmp_path)


FACT = {
    "data_id": "fvqa_test_1", "prompt": [{"role": "user", "content": "Whose is this?"}],
    "images": [{"bytes": PICTURE, "path": None}], "data_source": "mmsearch_r1/manual",
    "reward_model": {"candidate_answers": '["Spain", "ES"]', "ground_truth": "Kingdom of Spain",
                     "style": "rule"},
    "category": "search_required",
}  # fmt: skip


def test_factual_vqa(tmp_path):
    table = tmp_path / "fvqa_test.parquet"
    write_table(table, [FACT, {**FACT, "data_id": "2", "category": "search_free"}])
    files = fvqa.read_fvqa(tmp_path)
    assert files.questions[0].answers == ("Kingdom of Spain", "Spain", "ES")
    assert files.read_picture(files.questions[0].image) == PICTURE
    answers = [
        Prediction("fvqa_test_1", "<answer>Italy</answer> no: <answer> Spain. </answer>"),
        Prediction("2", "<answer>It is Spain's"),
    ]
    evaluation = fvqa.score_fvqa(files.questions, answers)
    assert means(evaluation, fvqa.EXACT) == {"": 0.5, "search_free": 0, "search_required": 1}
    assert means(evaluation, fvqa.CONTAINED)[""] == 1
    for key, value in (
        ("prompt", [{"role": "system", "content": "x"}]),
        ("reward_model", {**FACT["reward_model"], "candidate_answers": "Spain"}),
    ):
        write_table(table, [{**FACT, key: value}])
        refuses(
            rf"row 0: {'candidate_answers' if key != 'prompt' else key} is",
            fvqa.read_fvqa,
            tmp_path,
        )


ASKED = {
    "question": "Which event is this?", "question_type": "event", "options": ["A. X", "B. Y"],
    "Ground_Truth": "B", "Ground_Truth_List": ["Y", "the Y debate"], "img_path": "cnn_1.png",
}  # fmt: skip
NEWS = {
    "id": "0_2025", "img_path": "cnn_1.png", "level1_qa": ASKED, "source": "CNN",
    "level2_qa": {**ASKED, "question": "How many?", "question_type": "count"}, "time": "2024-10-02",
}  # fmt: skip


def test_live_vqa(tmp_path):
    folder = tmp_path / "liveVQA_benchmarks/News"
    (folder / "News_imgs").mkdir(parents=True)
    (folder / "News_imgs/cnn_1.png").write_bytes(PICTURE)
    (folder / "benchmark.json").write_text(json.dumps([NEWS]))
    files = livevqa.read_livevqa(tmp_path)
    first, second = files.questions
    assert (first.id, second.id) == ("News/0_2025/1", "News/0_2025/2")
    assert files.read_picture(second.image) == PICTURE
    assert first.extra == {
        "level": 1, "question_type": "event", "options": ["A. X", "B. Y"], "time": "2024-10-02",
    }  # fmt: skip
    evaluation = livevqa.score_livevqa(files.questions, [Prediction(first.id, "It was Y.")])
    assert means(evaluation, livevqa.CONTAINED) == {
        "": 0.5, "News": 0.5, "level 1": 1, "level 2": 0, "type: count": 0, "type: event": 1,
    }  # fmt: skip
    assert means(evaluation, livevqa.EXACT)[""] == 0
    (folder / "benchmark.json").write_text(json.dumps([NEWS, NEWS]))
    refuses("entry 2: id '0_2025' is there twice", livevqa.read_livevqa, tmp_path)
    broken = {**NEWS, "level1_qa": {**ASKED, "Ground_Truth_List": []}}
    (folder / "benchmark.json").write_text(json.dumps([broken]))
    refuses("Ground_Truth_List is", livevqa.read_livevqa, tmp_path)
