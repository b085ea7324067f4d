"""EchoSight beside its authors' code, and retrieval of entities: articles of ranked sources.

golden/echosight.json is what Go2Heart/EchoSight's test_reranker.py and answer_generator.py give, run
with made-up articles, similarities of pictures and features of its Q-Former in place of models.
"""

import json
from pathlib import Path

import pytest
from fake_llm import FakeLLM

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.evaluation.retrieval import score_articles
from mmqa_jax.papers import echosight
from mmqa_jax.retrieval.rankings import rescored
from tests.refusals import refuses

GOLDEN = json.loads((Path(__file__).parent / "golden" / "echosight.json").read_text())
ARTICLES, ASKED = GOLDEN["articles"], GOLDEN["questions"]


def made_corpus() -> Corpus:
    """The articles' sections, and each one's pictures."""
    sections = [
        Source(
            f"{one['url']}#{n}", "text", f"text {one['url'][1:]} {n}", one["title"],
            extra={"article": one["url"], "section": section},
        )
        for one in ARTICLES
        for n, section in enumerate(one["sections"])
    ]  # fmt: skip
    pictures = [
        Source(f"{one['url']} picture {n}", "image", "", extra={"article": one["url"]})
        for one in ARTICLES
        for n in range(12)
    ]
    questions = [
        Question(f"q{n}", "test", "How tall?", extra={"wikipedia_url": [asked["gold"]]})
        for n, asked in enumerate(ASKED)
    ]
    return Corpus([*sections, *pictures], questions)


class Pictures:
    """A retriever of the golden file's pictures."""

    def search(self, questions, top_k):
        return [
            Ranking(
                question.id,
                tuple(f"u{a} picture {n}" for n, a in enumerate(asked["pictures"][:top_k])),
                tuple(asked["similarities"][:top_k]),
            )
            for question, asked in zip(questions, ASKED, strict=True)
        ]


class Relevance:
    """A reranker with the golden file's similarities of sections; of none where it has none."""

    def score(self, questions, candidates):
        import numpy as np

        scores = [
            asked["relevance"].get(name, -9.0)
            for asked, given in zip(ASKED, candidates, strict=True)
            for name in given.sources
        ]
        return rescored(candidates, np.array(scores))


PARTS = {"retriever": Pictures(), "reranker": Relevance()}


def run(name: str, corpus: Corpus, llm: FakeLLM | None = None, **options) -> list:
    setting = echosight.SETTINGS[name]
    parts = {key: part for key, part in {**PARTS, "llm": llm}.items() if key in setting.parts()}
    return setting.run(corpus.questions(), corpus, parts, options)


def test_sections_are_reranked_as_by_the_authors():
    corpus = made_corpus()
    for found, asked in zip(run("echosight_rerank", corpus, pictures=12), ASKED, strict=True):
        assert list(found.sources[:10]) == asked["reranked_sections"]
        assert set(found.sources) <= asked["relevance"].keys()  # no references, no links
        ranked = corpus.articles.ranked(Ranking("", found.sources, found.source_scores))
        assert list(ranked.sources) == asked["reranked_articles"]


@pytest.mark.parametrize(
    ("setting", "figures"),
    [("echosight_retrieve", "recall"), ("echosight_rerank", "reranked_recall")],
)
def test_recall_of_articles_is_the_authors(setting, figures):
    corpus = made_corpus()
    found = run(setting, corpus, pictures=12)
    rankings = [Ranking(one.question_id, one.sources, one.source_scores) for one in found]
    scores = score_articles(corpus.articles, corpus.questions(), rankings).scores
    for k in (1, 5):
        assert scores[f"article_recall@{k}"] == pytest.approx(GOLDEN[figures][str(k)])


@pytest.mark.parametrize("generator", ["MistralAnswerGenerator", "LLaMA3AnswerGenerator"])
def test_prompts_are_the_authors(generator):
    """Byte by byte, of the section that is best for the first question, and of no section."""
    corpus, llm = made_corpus(), FakeLLM(lambda prompt: ("6 m", 0.0))
    for setting, kind in (("echosight", "section"), ("echosight_alone", "alone")):
        wanted = GOLDEN["prompts"][f"{generator}.{kind}"]
        system = wanted[0]["content"] if len(wanted) > 1 else ""
        llm.seen.clear()
        pictures = {"pictures": 12} if kind == "section" else {}
        (first, *_) = run(setting, corpus, llm, system=system, **pictures)
        query = next(query for query in llm.seen if query.id == "q0")
        said = [{"role": m.role, "content": m.text} for m in query.messages]
        assert said == wanted
        assert first.answer == "6 m"
        assert (query.decoding.temperature, query.decoding.top_p) == (0.9, 0.9)


def test_the_answer_cites_the_section_that_was_read():
    corpus = made_corpus()
    answers = run("echosight", corpus, FakeLLM(lambda prompt: ("6 m", 0.0)), pictures=12)
    for answer, asked in zip(answers, ASKED, strict=True):
        assert answer.sources == answer.read == (asked["reranked_sections"][0],)
        assert list(answer.trace["articles"]) == asked["reranked_articles"]


def test_the_oracle_reads_the_right_article():
    corpus = made_corpus()
    for answer, asked in zip(run("echosight_oracle", corpus, FakeLLM()), ASKED, strict=True):
        own = {k: s for k, s in asked["relevance"].items() if k.startswith(asked["gold"] + "#")}
        assert answer.read == (max(own, key=own.get),)


def test_a_section_is_cut_to_the_context():
    text = " ".join(f"word{n}" for n in range(200))
    source = Source("s", "text", text, "A", extra={"article": "u"})
    question = Question("q", "test", "Q?", extra={"wikipedia_url": "u"})
    corpus = Corpus([source], [question])

    class One:
        def score(self, questions, candidates):
            return list(candidates)

    setting = echosight.SETTINGS["echosight_oracle"]
    parts = {"reranker": One(), "llm": FakeLLM(lambda prompt: ("x", 0.0), length=700)}
    (answer,) = setting.run([question], corpus, parts, {})
    assert answer.answer == "x"
    assert answer.trace["cut_to_words"] == 50
    parts["llm"] = FakeLLM(lambda prompt: ("x", 0.0), length=20)
    (answer,) = setting.run([question], corpus, parts, {})
    assert answer.answer == ""
    assert answer.trace["too_long"]


def test_a_section_without_a_title_has_none_in_the_prompt():
    """reconstruct_wiki_sections writes the title of a section as it is, an empty one too."""
    source = Source("s", "text", "Text.", "References", extra={"article": "u"})
    question = Question("q", "test", "Q?", extra={"wikipedia_url": "u"})
    llm = FakeLLM(lambda prompt: ("x", 0.0))
    found = echosight.sections_of(Corpus([source]), Ranking("q", ("u",), (1.0,)))
    assert found.sources == ("s",)  # the article's title does not leave a section out
    echosight.read_best([question], Corpus([source]), [found], llm, echosight.MISTRALS, "")
    assert (
        llm.seen[0]
        .messages[0]
        .text.startswith("Context: # Wiki Article: References\n## Section Title: \nText.\n")
    )


def test_an_article_is_known_by_all_of_its_names():
    sources = [
        Source("a", "text", "x", extra={"url": "https://w/A", "wikidata": "Q1"}),
        Source("b", "image", "y", extra={"wikidata": "Q1"}),
        Source("c", "text", "z"),
    ]
    articles = Corpus(sources).articles
    assert (articles.of("a"), articles.of("b"), articles.of("c")) == ("https://w/A", "Q1", "c")
    assert list(articles.passages("Q1")) == ["a"]
    infoseek = Question("q", "val", "?", extra={"entity_id": "Q1"})
    scores = score_articles(articles, [infoseek], [Ranking("q", ("c", "a", "b"), (3.0, 2.0, 1.0))])
    assert scores.scores == {"article_recall@1": 0.0, "article_mrr": 0.5}


def test_of_two_articles_recall_is_the_part_found():
    articles = Corpus([Source(n, "text", "x", extra={"article": n}) for n in "abc"]).articles
    hops = Question("q", "test", "?", extra={"wikipedia_url": ["a", "b"]})
    lacking = Question("r", "test", "?")
    rankings = [Ranking(q.id, tuple("acbbc"[:3]), (3.0, 2.0, 1.0)) for q in (hops, lacking)]
    scores = score_articles(articles, [hops, lacking], rankings)
    assert scores.scores["article_recall@1"] == 0.5
    assert (scores.n, scores.unscored) == (1, 1)


def test_refusals():
    setting = echosight.SETTINGS["echosight"]
    refuses(r"visual_weight=1\.5", setting.check_row, {"visual_weight": 1.5}, {})
    oracle = echosight.SETTINGS["echosight_oracle"]
    with pytest.raises(UserError, match="articles of these questions are not known"):
        oracle.check_inputs([Question("q", "test", "?")], {}, {})
