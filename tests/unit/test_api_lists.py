"""Vectors, orders, scores and training over Python lists, and parts of one's own."""

import math

import numpy as np
import pytest
from document_files import picture
from word_encoder import install

import mmqa_jax as mmqa
from mmqa_jax.api.lists import _config, _corpus_of_pairs
from mmqa_jax.data.schema import Ranking
from mmqa_jax.tasks.registry import check_config, read_task
from tests.refusals import refuses

pytestmark = pytest.mark.slow
TEXTS = ["Wash the filter every week.", "The pump is on the left."]
GOLD = {"a": {"0"}, "b": ["1"]}


@pytest.fixture
def encoder(monkeypatch, fresh_cache):
    return install(monkeypatch, fresh_cache)


class OneSearch:
    """A retriever of one's own, which returns what it was made with."""

    def __init__(self, *results):
        self.results = list(results)

    def search(self, query, top_k):
        return self.results


def test_vectors_are_those_of_the_encoder(encoder):
    vectors = mmqa.embed(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(mmqa.embed([TEXTS[1]])[0], vectors[1], atol=1e-6)
    pandas = pytest.importorskip("pandas")
    np.testing.assert_array_equal(mmqa.embed(pandas.DataFrame({"text": TEXTS})), vectors)
    refuses(
        "item 1 has a picture, and the encoder minilm reads texts alone",
        mmqa.embed,
        ["a", picture()],
    )


def test_rankings_are_scored_by_hand_computed_values():
    scores = mmqa.evaluate({"a": ["1", "0"], "b": []}, GOLD, ks=(1, 2))
    assert scores.per_question["a"] == pytest.approx(
        {
            **{"recall@1": 0, "hit_any@1": 0, "hit_all@1": 0, "ndcg@1": 0},
            **{
                "recall@2": 1,
                "hit_any@2": 1,
                "hit_all@2": 1,
                "ndcg@2": 1 / math.log2(3),
                "mrr": 0.5,
            },
        }
    )
    assert (scores.means["mrr"], scores.missing) == (0.25, ())
    same = [Ranking("a", ("1", "0"), (2.0, 1.0))]
    assert mmqa.evaluate(same, GOLD, ks=(1, 2)).per_question["a"] == scores.per_question["a"]
    assert mmqa.evaluate(same, GOLD).missing == ("b",)
    low, high = scores.intervals()["mrr"]
    assert 0 <= low <= 0.25 <= high <= 0.5


def test_answers_are_scored_by_the_best_reference():
    answers = {"a": "the Two cats", "b": mmqa.Answer("a red dog", True)}
    scores = mmqa.evaluate(answers, {"a": ["dogs", "2 cats"], "b": "red cat", "c": "x"})
    assert scores.per_question == {
        "a": {"em": 1.0, "f1": 1.0}, "b": {"em": 0.0, "f1": 0.5}, "c": {"em": 0.0, "f1": 0.0}
    }  # fmt: skip
    assert scores.missing == ("c",)


def test_a_retriever_of_ones_own_is_scored_and_read_from():
    queries = {"a": "x", "b": "y"}
    assert mmqa.evaluate(OneSearch("1"), GOLD, queries=queries).means["recall@1"] == 0.5
    corpus = mmqa.open_corpus(TEXTS)
    retriever = mmqa.open_retriever(corpus, OneSearch(("1", -3.0), ("0", -9.0)))
    assert [(shown.source.id, shown.score) for shown in retriever.search("x", 1)] == [("1", -3.0)]
    asked = []

    def read(question, sources):
        asked.append((question, [shown.source.id for shown in sources]))
        return "Left [1][7]." if question != "no" else "Not found."

    reader = mmqa.open_reader(corpus, read)
    answer = mmqa.ask("Where?", retriever, reader)
    assert (answer.text, answer.found, asked) == ("Left.", True, [("Where?", ["1", "0"])])
    assert [(shown.source.id, shown.cited) for shown in answer.sources] == [("1", 1)]
    assert "there are not: 1" in answer.notes[0]
    assert not mmqa.ask("no", retriever, reader).found


def test_results_are_data_frames(encoder):
    pytest.importorskip("pandas")
    retriever = mmqa.open_retriever(mmqa.open_corpus(TEXTS), "bm25")
    assert list(mmqa.to_frame(retriever.search("pump")).id) == ["1"]
    assert list(mmqa.to_frame(retriever.search_many(["filter", "pump"])).query_number) == [0, 1]
    assert mmqa.to_frame(retriever.rank({"q": "pump"})).to_dict("records")[0]["id"] == "1"
    frame = mmqa.to_frame(mmqa.evaluate({"a": ["0"], "b": ["1"]}, GOLD))
    assert (list(frame.question), list(frame["recall@1"])) == (["a", "b"], [1.0, 1.0])
    assert list(mmqa.to_frame([mmqa.Answer("x", True)]).answer) == ["x"]


def test_pairs_become_questions_with_gold_sources_and_negatives():
    corpus, negatives = _corpus_of_pairs([("q", "a"), ("r", "b", "a"), ("q", "c", "b", "a")])
    assert [source.text for source in corpus.sources] == ["a", "b", "c"]
    rows = [
        (question.question, question.positives, question.negatives)
        for question in corpus.questions()
    ]
    assert rows == [("q", ("0", "2"), ("1",)), ("r", ("1",), ("0",))]
    assert negatives == 1
    assert corpus.fingerprint != _corpus_of_pairs([("q", "a"), ("r", "b", "c")])[0].fingerprint
    config = _config("minilm", mmqa.Tuning(vectors="token"), 1)
    check_config(config)
    assert read_task(config).batches.num_negatives == 1


def refusals():
    corpus = mmqa.open_corpus(TEXTS)
    wrong, mistyped = mmqa.UserError, TypeError
    retriever = mmqa.open_retriever(corpus, OneSearch("9"))
    return {
        "one text": (lambda: mmqa.embed("abc"), mistyped, "one text was given"),
        "no items": (lambda: mmqa.embed([]), wrong, "embed: the list is empty"),
        "a number": (lambda: mmqa.embed(["a", 7]), mistyped, r"items\[1\] is int"),
        "side": (lambda: mmqa.embed(["a"], side="query"), wrong, "use source or question"),
        "empty query": (lambda: mmqa.rerank(" ", ["a"], "x"), wrong, "the query is empty"),
        "no such reranker": (lambda: mmqa.rerank("a", ["b"], "/nowhere"), wrong, "'/nowhere': no such file or folder"),
        "top_k": (lambda: mmqa.rerank("a", ["a"], "x", top_k=-1), wrong, "top_k=-1"),
        "no references": (lambda: mmqa.evaluate({}, {}), wrong, "references are a dict"),
        "without queries": (lambda: mmqa.evaluate(OneSearch(), GOLD), mistyped, "a retriever needs `queries`"),
        "a query less": (lambda: mmqa.evaluate(OneSearch(), GOLD, queries={"a": "x"}), wrong, "'b' has no query"),
        "queries of rankings": (lambda: mmqa.evaluate({"a": []}, GOLD, queries={}), wrong, "are for a retriever"),
        "unknown question": (lambda: mmqa.evaluate({"z": []}, GOLD), wrong, "'z' has a result but no reference"),
        "mixed": (lambda: mmqa.evaluate({"a": "x", "b": ["1"]}, {"a": "x", "b": "y"}), mistyped, "'b' is no text"),
        "sources as numbers": (lambda: mmqa.evaluate({"a": [1]}, GOLD), mistyped, "a source of 'a' is int"),
        "no pairs": (lambda: mmqa.train([], "runs/x"), wrong, "there are no pairs"),
        "a text as pair": (lambda: mmqa.train(["ab"], "runs/x"), wrong, r"pairs\[0\] is 'ab'"),
        "an empty source": (lambda: mmqa.train([("a", " ")], "runs/x"), wrong, r"pairs\[0\]"),
        "no frame": (lambda: mmqa.to_frame(7), mistyped, "int was given"),
        "unknown source": (lambda: retriever.search("a"), wrong, "OneSearch.search: source '9' is not in the corpus"),
        "no source": (
            lambda: mmqa.open_retriever(corpus, OneSearch(7)).search("a"), mistyped, "result 0 is 7",
        ),
        "no answer": (
            lambda: mmqa.open_reader(corpus, lambda *_: 7).answer("a", mmqa.open_retriever(corpus, "bm25").search("pump")),
            mistyped, "the function returned int",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals())
def test_wrong_calls_say_what_to_do(name):
    call, error, message = refusals()[name]
    with pytest.raises(error, match=message):
        call()
