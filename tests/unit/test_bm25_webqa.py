"""WebQA's BM25 against gensim 3.8's formula, restated text by text over doc2bow lists."""

import math

import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.retrieval.bm25.in_memory import WebQABM25, WebQABM25Retriever
from tests.refusals import refuses

WORDS = ["the", "The", "flag", "star", "red,", "blue", "river", "island", "king.", "sea", "old"]


def random_texts(count, seed=0):
    """Short texts with repeated words; `the` stands in most, so that its idf is negative."""
    rng = np.random.default_rng(seed)
    return ["the " + " ".join(rng.choice(WORDS, rng.integers(0, 9))) for _ in range(count)]


def bags(texts):
    """gensim's corpora.Dictionary and doc2bow: ids in order of appearance, sorted in a text."""
    ids = {}
    for text in texts:
        for word in sorted(set(text.split())):
            ids.setdefault(word, len(ids))

    def doc2bow(text):
        tokens = [ids[word] for word in text.split() if word in ids]
        return sorted((token, tokens.count(token)) for token in set(tokens))

    return doc2bow


def gensim_scores(corpus, query, k1=1.5, b=0.75, epsilon=0.25):
    """gensim 3.8.3 summarization/bm25.py: `_initialize` and `get_scores`."""
    frequencies = [{word: document.count(word) for word in document} for document in corpus]
    mean_length = sum(map(len, corpus)) / len(corpus)
    documents_with = {}
    for frequency in frequencies:
        for word in frequency:
            documents_with[word] = documents_with.get(word, 0) + 1
    idf = {
        word: math.log(len(corpus) - n + 0.5) - math.log(n + 0.5)
        for word, n in documents_with.items()
    }
    floor = epsilon * sum(idf.values()) / len(idf)
    idf = {word: value if value >= 0 else floor for word, value in idf.items()}
    scores = []
    for document, frequency in zip(corpus, frequencies, strict=True):
        score = 0.0
        for word in query:
            if word in frequency:
                f = frequency[word]
                norm = k1 * (1 - b + b * len(document) / mean_length)
                score += idf[word] * f * (k1 + 1) / (f + norm)
        scores.append(score)
    return scores


@pytest.mark.parametrize("options", [{}, {"k1": 0.9, "b": 0.4, "epsilon": 0.1}])
def test_scores_equal_gensim(options):
    texts = [*random_texts(120), "", "river river", "alone"]
    index, doc2bow = WebQABM25(texts, **options), bags(texts)
    corpus = [doc2bow(text) for text in texts]
    for query in ["the red, star", 'The "old" sea sea river', "river river unheard", "alone"]:
        expected = gensim_scores(corpus, doc2bow(query.replace('"', "")), **options)
        np.testing.assert_allclose(index.scores(query), expected, rtol=1e-12)
        rows, scores = index.search([query], 2)
        # The baseline's own line; the last of them is the best.
        best = sorted(range(len(expected)), key=lambda i: expected[i])[-2:][::-1]
        assert rows[0].tolist() == best
        np.testing.assert_allclose(scores[0], np.array(expected)[best], rtol=1e-6)


def test_a_word_is_found_only_with_its_count():
    index = WebQABM25(["river flag", "river river sea", "king star", "old blue"])
    once, twice = index.scores("river"), index.scores("river river")
    assert [score > 0 for score in once] == [True, False, False, False]
    assert [score > 0 for score in twice] == [False, True, False, False]


def test_words_in_most_texts_get_a_share_of_the_mean_idf():
    texts = ["the flag", "the star", "the king", "sea"]
    idf = [math.log(1.5) - math.log(3.5), *[math.log(3.5) - math.log(1.5)] * 4]
    floor = 0.25 * sum(idf) / 5
    norm = 1.5 * (0.25 + 0.75 * 2 / (7 / 4))
    expected = floor * 2.5 / (1 + norm)
    np.testing.assert_allclose(WebQABM25(texts).scores("the"), [expected] * 3 + [0], rtol=1e-12)


def test_ties_go_to_the_later_row():
    index = WebQABM25(["red star"] * 3 + ["blue sea"] * 9)
    assert index.search(["red"], 4)[0].tolist() == [[2, 1, 0, 11]]
    assert index.search(["unheard"], 3)[0].tolist() == [[11, 10, 9]]
    # Candidates are a corpus of their own; the later in the list wins.
    rows, scores = index.search_within("red", [1, 5, 0, 7, 8, 4], 3)
    assert rows.tolist() == [0, 1, 4]
    assert scores[0] == scores[1] > scores[2] == 0
    assert index.search_within("red", [], 3)[0].tolist() == []


def corpus():
    """Ids are sorted as `prepare` sorts them: pictures first."""
    sources = [
        Source("30000001", "image", "red flag", title="star", image="1"),
        Source("30000002", "image", "blue flag", image="2"),
        Source("a_0", "text", "red flag"),
        Source("a_1", "text", "old king"),
        *(Source(f"b_{i}", "text", word) for i, word in enumerate(["sea", "river", "island"])),
    ]
    question = Question(
        "q", "test", 'a "red" flag', positives=("a_1",), negatives=("30000001", "a_0")
    )
    return Corpus(sources, [question])


def test_snippets_stand_before_pictures_and_titles_are_not_read():
    retriever, questions = WebQABM25Retriever(corpus()), corpus().questions()
    # a_0 and 30000001 tie: the picture stands later.
    assert retriever.search(questions, 10)[0].sources[:3] == ("30000001", "a_0", "30000002")
    star = Question("s", "test", "star")
    assert set(retriever.search([star], 7)[0].scores) == {0.0}


def within(retriever, question):
    """The ranking of a question's own candidates, which are given sorted by id."""
    given = Ranking(question.id, tuple(sorted(question.positives + question.negatives)), ())
    return retriever.search_within([question], [given])[0]


def test_restricted_candidates_stand_gold_first():
    retriever = WebQABM25Retriever(corpus())
    ranking = within(retriever, corpus().questions()[0])
    assert ranking.sources == ("30000001", "a_0", "a_1")
    unheard = Question("u", "test", "unheard", positives=("30000002",), negatives=("a_0", "a_1"))
    # All tie: the last listed first, gold last.
    assert within(retriever, unheard).sources == ("a_1", "a_0", "30000002")
    assert within(retriever, Question("n", "test", "red")).sources == ()


def test_bad_input():
    refuses("corpus is empty", WebQABM25, [])
    refuses("contains a word", WebQABM25, ["", "  "])
    with pytest.raises(UserError, match="top_k=3 is out of range"):
        WebQABM25(["red", "blue"]).search(["red"], 3)
