"""The authors' harnesses score our models as we do: MTEB, lm-eval and lmms-eval."""

import io
import types

import numpy as np
import pytest
from PIL import Image

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.requests import Candidate, Result, Score, Scores, TooLong
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.harness import MTEBModel, lm_eval_model, lmms_eval_model
from mmqa_jax.prompting.backends import Choices, Completion, Decoding, Usage

pytestmark = pytest.mark.slow

TOPICS = ("volcanoes", "the heart", "glaciers", "bees", "copper", "the moon", "rivers", "steam")
DOCUMENTS = [
    {"id": f"d{row}", "title": topic if row % 2 else "", "text": f"{text} {topic}"}
    for row, (topic, text) in enumerate(
        (topic, text) for topic in TOPICS for text in ("What is known about", "A history of")
    )
]
QUERIES = [{"id": f"q{row}", "text": f"How do {topic} work?"} for row, topic in enumerate(TOPICS)]
RELEVANT = {f"q{row}": {f"d{2 * row}": 2, f"d{2 * row + 1}": 1} for row in range(len(TOPICS))}


@pytest.fixture(scope="module")
def minilm():
    return MTEBModel("minilm")


def test_mteb_scores_a_retriever_as_we_do(minilm, tmp_path):
    mteb = pytest.importorskip("mteb")
    import datasets
    from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class Topics(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="Topics", description="", reference=None, type="Retrieval", category="t2t",
            modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="ndcg_at_10", dataset={"path": "none/none", "revision": "none"}, date=None,
            domains=None, task_subtypes=None, license=None, annotations_creators=None, dialect=None,
            sample_creation=None, bibtex_citation="",
        )  # fmt: skip

        def load_data(self, **_):
            split = {
                "corpus": datasets.Dataset.from_list(DOCUMENTS),
                "queries": datasets.Dataset.from_list(QUERIES),
                "relevant_docs": RELEVANT,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    result = mteb.evaluate(minilm, Topics(), cache=None)
    (theirs,) = result.task_results[0].scores["test"]
    found = minilm.search(QUERIES, top_k=100)
    ranked = [tuple(found[query["id"]]) for query in QUERIES]
    ours = score_rankings([RELEVANT[query["id"]] for query in QUERIES], ranked, (3, 10))
    assert 0.2 < ours.scores["ndcg@3"] < 1  # the comparison is of numbers that matter
    each = calculate_retrieval_scores(found, RELEVANT, (3, 10)).all_scores
    for k in (3, 10):
        for name in ("ndcg", "recall"):
            mean = ours.scores[f"{name}@{k}"]
            assert theirs[f"{name}_at_{k}"] == pytest.approx(mean, abs=5e-6)  # theirs is rounded
            key = f"ndcg_cut_{k}" if name == "ndcg" else f"recall_{k}"
            unrounded = [each[query["id"]][key] for query in QUERIES]
            np.testing.assert_allclose(ours.per_question[f"{name}@{k}"], unrounded, atol=1e-9)


def test_candidates_alone_are_ranked_again(minilm):
    minilm.index(DOCUMENTS)
    whole = minilm.search(QUERIES[:1], top_k=100)["q0"]
    again = minilm.search(QUERIES[:1], top_k=5, top_ranked={"q0": ["d9", "d0", "d3"]})["q0"]
    assert [*again] == [name for name in whole if name in again]
    assert again == pytest.approx({name: whole[name] for name in ("d9", "d0", "d3")}, abs=1e-6)


def test_vectors_of_texts(minilm):
    vectors = minilm.encode([{"text": ["one bee", "two bees"]}, {"text": ["a volcano"]}])
    np.testing.assert_allclose(minilm.similarity_pairwise(vectors, vectors), 1, atol=1e-6)
    cosines = minilm.similarity(vectors, vectors)
    assert cosines[0, 1] > cosines[0, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: MTEBModel("minilm").search(QUERIES, top_k=1), "no documents were indexed"),
        (lambda model: model.encode([{"image": []}]), "the task gives image"),
        (
            lambda model: model.index(DOCUMENTS) or model.search(
                [{"id": "q", "text": "", "image": Image.new("RGB", (2, 2))}], top_k=1),
            "query q has a picture",
        ),
    ],
)  # fmt: skip
def test_refusals(minilm, call, message):
    with pytest.raises(UserError, match=message):
        call(minilm)


CHOICES = (" red", " blue", " a long road", " no")


class Marks:
    """A language model that prefers short continuations and repeats what it was asked."""

    takes_messages = True

    def __init__(self):
        self.usage, self.failures, self.asked = Usage(), [], []

    def rates(self):
        return {}

    def check(self, query):
        if "too long" in str(query):
            raise TooLong(query.id, 9, 1, 4)

    def answer(self, queries):
        for query in queries:
            self.asked.append(query)
            if isinstance(query, Choices):
                scores = [
                    Score(-float(len(text)), (-1.0,), len(text) < 4) for text in query.continuations
                ]
                yield Scores(query.id, tuple(scores))
            else:
                text = query.prompt if isinstance(query, Completion) else query.messages[0].text
                yield Result(query.id, (Candidate(f"({text})", (), 0.0, None, "end"),), 1, 0)


def request(kind, *arguments):
    return types.SimpleNamespace(request_type=kind, args=arguments)


def test_lm_eval_takes_scores_and_answers():
    pytest.importorskip("lm_eval")
    backend = Marks()
    model = lm_eval_model(backend)
    pairs = [(context, choice) for context in ("Q1", "Q2") for choice in CHOICES]
    scored = model.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    assert scored == [(-float(len(choice)), len(choice) < 4) for _, choice in pairs]
    assert len(backend.asked) == 2  # continuations of one text are scored together
    options = {"until": ["\n"], "max_gen_toks": 7, "do_sample": False}
    assert model.generate_until([request("generate_until", "Say it", options)]) == ["(Say it)"]
    assert backend.asked[-1].decoding == Decoding(7, stop=("\n",))
    for refused, message in (
        (lambda: model.loglikelihood_rolling([]), "tasks of perplexity"),
        (lambda: model.generate_until([request("", "too long", {})]), "request 0 has no answer"),
    ):
        with pytest.raises(UserError, match=message):
            refused()


def test_lmms_eval_shows_pictures():
    pytest.importorskip("lmms_eval.api.model")
    backend = Marks()
    model = lmms_eval_model(backend)
    red = Image.new("RGB", (4, 4), "red")
    model.task_dict = {"task": {"test": [{"image": red, "target": " red"}]}}
    place = (lambda document: [document["image"]], 0, "task", "test")
    assert model.generate_until([request("", "Which?", {}, *place)]) == ["(Which?)"]
    (picture,) = backend.asked[-1].messages[0].pictures
    assert Image.open(io.BytesIO(picture.data)).getpixel((0, 0)) == (255, 0, 0)

    def target(document):  # a task may give a function
        return document["target"]

    assert model.loglikelihood([request("", "Which?", target, *place)]) == [(-4.0, False)]
