"""Calls from Python that would go wrong in silence: one text where several are expected."""

import numpy as np
import pytest

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Source
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.vqa import official_accuracy, paper_accuracy, prophet_accuracy
from mmqa_jax.evaluation.webqa import accuracy, source_f1
from mmqa_jax.inference.reader import Reader
from mmqa_jax.inference.reranker import Reranker
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReranker
from mmqa_jax.retrieval.bm25.in_memory import BM25, BM25Retriever, WebQABM25
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.index import build_index
from mmqa_jax.retrieval.knowledge import KnowledgeBase
from mmqa_jax.retrieval.modality import ModalityClassifier
from tests.refusals import refuses

TEXTS = ["a red star", "the blue sea"]
CORPUS = Corpus([Source(f"s{n}", "text", text) for n, text in enumerate(TEXTS)])
EYE = np.eye(4, dtype=np.float32)


def bare(kind):
    """An object that no model was loaded for: what is refused is refused before it is asked."""
    return object.__new__(kind)


ONE_TEXT = {
    "BM25": lambda: BM25("a red star"),
    "BM25.search": lambda: BM25(TEXTS).search("red", 1),
    "WebQABM25": lambda: WebQABM25("a red star"),
    "WebQABM25.search": lambda: WebQABM25(TEXTS).search("red", 1),
    "BM25Retriever.search": lambda: BM25Retriever(CORPUS).search("red", 1),
    "DenseRetriever.search": lambda: bare(DenseRetriever).search("red", 1),
    "Embedder.embed_questions": lambda: bare(Embedder).embed_questions("red"),
    "KnowledgeBase.find": lambda: KnowledgeBase(CORPUS, BM25Retriever(CORPUS)).find("red", 1),
    "ModalityClassifier": lambda: bare(ModalityClassifier).predict("red"),
    "Tokenizer.encode_batch": lambda: minilm_tokenizer().encode_batch("red"),
    "Reader.answer": lambda: bare(Reader).answer("red", []),
    "Reranker.score": lambda: bare(Reranker).score("red", []),
    "LLMReader.answer": lambda: bare(LLMReader).answer("red", []),
    "LLMReranker.score": lambda: bare(LLMReranker).score("red", []),
    "score_rankings": lambda: score_rankings([{"s1"}], ["s1"]),
    "source F1": lambda: source_f1("s1", ["s1"], variant="official"),
    "WebQA accuracy": lambda: accuracy("red", ["red"], "color"),
    **{
        f"the accuracy of an answer ({score.__name__})": lambda score=score: score("yes", "yes")
        for score in (official_accuracy, paper_accuracy, prophet_accuracy)
    },
}


@pytest.mark.parametrize("name", ONE_TEXT)
def test_one_text_is_not_its_letters(name):
    with pytest.raises(TypeError, match=r"one text was given, '.*put it into a list") as caught:
        ONE_TEXT[name]()
    assert str(caught.value).startswith(name.partition(" (")[0])


def test_texts_are_not_questions():
    with pytest.raises(TypeError, match=r"texts were given, the first is 'red'.*Question\(id"):
        BM25Retriever(CORPUS).search(["red"], 1)


@pytest.mark.parametrize("kind", ["auto", "exact", "scann", "mesh"])
def test_an_array_is_no_embeddings(kind):
    refuses(r"ndarray was given.*Embeddings\(vectors,", build_index, EYE, kind, error=TypeError)


@pytest.mark.parametrize("allowed", [np.arange(4), [True] * 4, np.ones(4)])
def test_allowed_rows_are_a_mask(allowed):
    """The numbers of the rows would be counted as a mask of all but the first."""
    for index in (ExactIndex(Embeddings(EYE, "m", "c")), BM25(["red"] * 4)):
        asked = EYE[:1] if isinstance(index, ExactIndex) else ["red"]
        with pytest.raises(TypeError, match=r"a NumPy mask was expected; give bool\[4\]"):
            index.search(asked, 1, allowed)


def test_two_sources_with_one_id():
    refuses("corpus: source id 's0' is there twice", Corpus, [*CORPUS.sources, CORPUS.sources[0]])
