"""Knowledge bases: what they find, how passages stand in prompts, what is counted."""

import numpy as np
import pytest
from fake_llm import FakeLLM
from test_shots import FakeEmbedder

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Question, Source, source_text
from mmqa_jax.papers.pica import answer_pica
from mmqa_jax.papers.rmr import choose_rmr
from mmqa_jax.prompting.backends import Completion
from mmqa_jax.prompting.examples.library import Embedders, ExampleLibrary, Shot
from mmqa_jax.prompting.few_shot import PromptTemplate, few_shot, prompts_record
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.retrieval.knowledge import KnowledgeBase, Passage, RandomRetriever, passages_of
from mmqa_jax.runs import parts as parts_module
from mmqa_jax.runs.parts import KnowledgeSpec, open_knowledge
from mmqa_jax.runs.traces import trace_counts

CORPUS = Corpus(
    [
        Source("stars1", "text", "A star shines because hydrogen fuses in its core.", "Stars"),
        Source("stars2", "text", "The sun is a star of middle age", "Stars"),
        Source("cells", "text", "Every cell has a membrane around it.", "Cells"),
        Source("flag", "image", "A flag with a star.", "Flags", image="flag.png"),
    ]
)
QUESTIONS = [
    Question("q0", "test", "Why does a star shine?", extra={"section": "Cells", "caption": "Sky"},
             choices=("fusion", "magic")),
    Question("q1", "test", "What is around a cell?", extra={"section": "Cells"},
             choices=("membrane", "moon")),
    Question("q2", "test", "Zzz?", extra={"section": "Nowhere"}, choices=("a", "b")),
]  # fmt: skip


def base(**settings) -> KnowledgeBase:
    return KnowledgeBase(CORPUS, BM25Retriever(CORPUS), **settings)


def ids(found: list[list[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in own] for own in found]


def test_passages_of_texts():
    """As the retriever ranks them, without what shares no word; with texts and titles."""
    texts = [q.question for q in QUESTIONS]
    found = base().find(texts, 3)
    ranked = BM25Retriever(CORPUS).search(QUESTIONS, 3)
    expected = [[s for s, x in zip(r.sources, r.scores, strict=True) if x > 0] for r in ranked]
    assert ids(found) == expected
    assert found[1][0][:3] == ("cells", "Cells", "Every cell has a membrane around it.")
    assert [passage.score for passage in found[0]] == sorted(
        (passage.score for passage in found[0]), reverse=True
    )
    assert found[2] == []
    assert len(base().find(texts, 99)[0]) == 3  # all that have a word in common


def test_the_settings_of_a_knowledge_base():
    found = base(top_k=2, max_words=3).of_questions(QUESTIONS)
    assert [len(own) for own in found] == [2, 1, 0]
    assert found[1][0].text == "Every cell has"
    asked = base(text_of=lambda q: " ".join(q.choices)).of_questions(QUESTIONS)
    assert ids(asked) == [[], ["cells"], []]
    assert passages_of(None, QUESTIONS) == [None] * 3


def test_a_question_s_own_section():
    """Only its sources are found, and nothing for a title that no source has."""
    found = base(top_k=2, section_key="section").of_questions(QUESTIONS)
    assert ids(found) == [[], ["cells"], []]


def test_random_passages():
    """By the text alone, whatever the other questions; different ones, and not in one order."""
    retriever = RandomRetriever(CORPUS)
    drawn = retriever.search(QUESTIONS, 3)
    assert [r.sources for r in drawn] == [retriever.search([q], 3)[0].sources for q in QUESTIONS]
    assert all(len(set(r.sources)) == 3 and min(r.scores) > 0 for r in drawn)
    (passages,) = KnowledgeBase(CORPUS, retriever).find(["a star"], 99)  # more than there are
    assert sorted(p.id for p in passages) == sorted(CORPUS.ids)
    many = [Question(str(n), "test", f"question {n}") for n in range(60)]
    firsts = [r.sources[0] for r in retriever.search(many, 1)]
    assert {firsts.count(source.id) > 5 for source in CORPUS.sources} == {True}


TEMPLATE = PromptTemplate("", "[$question|$context]\n", "<$question|$context>")
FOUND = [Passage(f"p{n}", "", f"Fact {n}.", 1.0) for n in range(2)]


def prompt_of(length: int, context: str = "N/A", passages=FOUND):
    llm = FakeLLM(length=length)
    shots = [Shot(Question(f"s{n}", "train", f"shot {n}"), 1.0) for n in range(2)]

    def fields(question: Question) -> dict[str, str]:
        return {"question": question.question, "context": context}

    def make(text: str):
        return Completion("q", text)

    return few_shot(TEMPLATE, QUESTIONS[2], shots, fields, make, llm.check, passages=passages)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("N/A", "<Zzz?|Fact 0. Fact 1.>"),
        ("", "<Zzz?|Fact 0. Fact 1.>"),
        ("a cat", "<Zzz?|a cat. Fact 0. Fact 1.>"),
        ("A hint!", "<Zzz?|A hint! Fact 0. Fact 1.>"),
    ],
)
def test_passages_follow_the_context(context, expected):
    made = prompt_of(10**6, context)
    assert made.text == f"[shot 0|{context}]\n[shot 1|{context}]\n{expected}"


def test_passages_are_dropped_before_shots():
    whole = prompt_of(10**6)
    lengths = {}
    for length in range(len(whole.text), 0, -1):
        made = prompt_of(length)
        kept = None if made.query is None else (len(made.passages), len(made.shots))
        lengths.setdefault(kept, (made.dropped_passages, made.dropped))
    assert lengths == {
        (2, 2): (0, 0), (1, 2): (1, 0), (0, 2): (2, 0), (0, 1): (2, 1), (0, 0): (2, 2),
        None: (2, 2),
    }  # fmt: skip


def test_what_a_trace_keeps():
    record = prompts_record([prompt_of(10**6), prompt_of(30)])
    assert record["knowledge"] == [[{"id": "p0", "score": 1.0}, {"id": "p1", "score": 1.0}], []]
    assert record["dropped_passages"] == 2
    assert "knowledge" not in prompts_record([prompt_of(10**6, passages=None)])


@pytest.fixture
def library(tmp_path):
    examples = [
        Question(f"e{n}", "train", f"ask {n}", answers=("yes",), choices=("yes", "no"),
                 answer_index=0, extra={"caption": "A scene"})
        for n in range(3)
    ]  # fmt: skip
    return ExampleLibrary(examples, Embedders(FakeEmbedder()), cache=tmp_path)


def test_pica_with_knowledge(library):
    """In the query's context alone; without hits the prompt is as without a knowledge base."""
    llm, without = FakeLLM(), FakeLLM()
    options = {"shots": 1, "similarity": "question", "ensemble": 2}
    predictions = answer_pica(QUESTIONS, llm, library, base(top_k=1), **options)
    answer_pica(QUESTIONS, without, library, **options)
    prompts = {query.id: query.prompt for query in llm.seen}
    plain = {query.id: query.prompt for query in without.seen}
    (passage,) = base(top_k=1).of_questions(QUESTIONS[:1])[0]
    for r in range(2):
        expected = plain["q0", r].replace("Context: Sky", f"Context: Sky. {passage.text}")
        assert prompts["q0", r] == expected != plain["q0", r]
        assert prompts["q2", r] == plain["q2", r]
    counts = trace_counts(QUESTIONS, predictions)
    assert (counts["questions_without_passages"], counts["dropped_passages"]) == (1, 0)


def test_rmr_with_knowledge(library):
    llm = FakeLLM(score=lambda prompt, option: (-float(len(option)),))
    choose_rmr(QUESTIONS, llm, library, base(top_k=1), shots=1, similarity="question")
    by_id = {query.id: query.prompt for query in llm.seen}
    assert by_id["q1"].endswith(
        "Question: What is around a cell?\nContext: Every cell has a membrane around it.\nAnswer:"
    )
    assert by_id["q2"].endswith("Question: Zzz?\nContext: N/A\nAnswer:")
    assert sum(prompt.count("membrane") for prompt in by_id.values()) == 1


class TextEmbedder(FakeEmbedder):
    """As an Embedder: sources by their text, questions with no picture."""

    image_size, text_of = 0, staticmethod(source_text)

    def embed_questions(self, texts, pictures=None):
        assert pictures is None or set(pictures) == {None}
        return super().embed_questions(texts)

    embed_passages = embed_questions


@pytest.fixture
def embedder(monkeypatch, tmp_path):
    """In place of MiniLM."""
    made = TextEmbedder()
    store = PictureStore(CORPUS, size=1)
    monkeypatch.setattr(parts_module, "open_text_embedder", lambda model, corpus: (made, store))
    monkeypatch.setenv("MMQA_CACHE", str(tmp_path))
    return made


@pytest.mark.parametrize("modality", ["", "text"])
def test_dense_knowledge(embedder, modality):
    """The nearest texts of the modality; the collection is embedded once."""
    spec = KnowledgeSpec(retriever="dense", top_k=2, modality=modality)
    knowledge = open_knowledge(CORPUS, spec)
    assert embedder.computed == len(CORPUS)
    found = knowledge.of_questions(QUESTIONS)
    kept = [s for s in CORPUS.sources if modality in ("", s.modality)]
    vectors = FakeEmbedder().embed_questions([source_text(source) for source in kept])
    asked = FakeEmbedder().embed_questions([question.question for question in QUESTIONS])
    for own, scores in zip(found, asked @ vectors.T, strict=True):
        expected = [kept[i].id for i in np.argsort(-scores)[:2] if scores[i] > 0]
        assert [passage.id for passage in own] == expected
    before, told = embedder.computed, {}
    open_knowledge(CORPUS, spec, told.__setitem__)
    assert embedder.computed == before
    assert told == {"text_model": embedder}


@pytest.mark.parametrize("retriever", ["bm25", "fused", "rrf", "random"])
def test_every_retriever(embedder, retriever):
    spec = KnowledgeSpec(retriever=retriever, top_k=1, modality="image")
    found = open_knowledge(CORPUS, spec).of_questions(QUESTIONS[:1])
    assert ids(found) == [["flag"]]
