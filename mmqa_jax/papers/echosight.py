"""EchoSight (Yan and Xie, Findings of EMNLP 2024): entity by picture, then its best section.

The articles whose pictures look most like the question's are candidates; all of their sections are
reranked by question and picture together, and a language model reads the best one (original:
Go2Heart/EchoSight, test/test_reranker.py).

  retriever.search(questions, pictures)   -> pictures of articles, by the question's picture alone
  reranker.score(questions, candidates)   -> the same sections by relevance
  llm.answer(queries)                     -> an answer

The authors retrieve with EVA-CLIP and rerank with a Q-Former that they fine-tuned; any image
encoder and any reranker take their places here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.articles import SECTION, Articles, answering_articles
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking, Source
from mmqa_jax.decoding.requests import TooLong, Unanswerable
from mmqa_jax.evaluation.retrieval import ARTICLES, know_articles
from mmqa_jax.papers.setting import Setting
from mmqa_jax.papers.webqa import Reranker
from mmqa_jax.prompting.backends import Backend, Chat, Decoding, Message
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.prompting.few_shot import load_template
from mmqa_jax.prompting.llm_reader import READER, shortened
from mmqa_jax.retrieval.rankings import Retriever, by_score

# How the authors' Mistral-7B-Instruct decodes, the default of all settings.
MISTRALS = Decoding(max_new_tokens=128, temperature=0.9, top_p=0.9)
# Sections whose titles hold one of these words are not read (reconstruct_wiki_sections).
_LEFT_OUT = ("external links", "references")


def retrieve_entities(
    questions: Sequence[Question], retriever: Retriever, *, pictures: int = 20
) -> list[Ranking]:
    """Section 3.2, visual-only search: finds the `pictures` most like the question's, with their
    articles, of which there are fewer where several are of one."""
    return retriever.search(questions, pictures)


def rerank_sections(
    questions: Sequence[Question],
    corpus: Corpus,
    retriever: Retriever,
    reranker: Reranker,
    *,
    pictures: int = 20,
    visual_weight: float = 0.5,
) -> list[Ranking]:
    """Section 3.3: all sections of the articles found, by both similarities.

    score(section) = visual_weight * (similarity of its article's nearest picture)
                     + (1 - visual_weight) * (relevance of the section)
    """
    nearest = retrieve_entities(questions, retriever, pictures=pictures)
    articles = [corpus.articles.ranked(ranking) for ranking in nearest]
    relevance = reranker.score(questions, [sections_of(corpus, article) for article in articles])
    return [
        combined(corpus.articles, *both, visual_weight)
        for both in zip(articles, relevance, strict=True)
    ]


def answer_echosight(
    questions: Sequence[Question],
    corpus: Corpus,
    retriever: Retriever,
    reranker: Reranker,
    llm: Backend,
    *,
    pictures: int = 20,
    visual_weight: float = 0.5,
    system: str = "",
    temperature: float = MISTRALS.temperature,
    top_p: float = MISTRALS.top_p,
    max_new_tokens: int = MISTRALS.max_new_tokens,
) -> list[Prediction]:
    """Section 3.4: the language model reads the best section, by sampling (a temperature of 0 is
    greedy), behind a system's message if there is one."""
    ranked = rerank_sections(
        questions, corpus, retriever, reranker, pictures=pictures, visual_weight=visual_weight
    )
    decoding = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    return read_best(questions, corpus, ranked, llm, decoding, system)


def answer_oracle(
    questions: Sequence[Question],
    corpus: Corpus,
    reranker: Reranker,
    llm: Backend,
    *,
    system: str = "",
    temperature: float = MISTRALS.temperature,
    top_p: float = MISTRALS.top_p,
    max_new_tokens: int = MISTRALS.max_new_tokens,
) -> list[Prediction]:
    """Answers from the right article; the reranker chooses its section."""
    sections = []
    for question in questions:
        names = tuple(answering_articles(question))
        sections.append(sections_of(corpus, Ranking(question.id, names, (1.0,) * len(names))))
    ranked = reranker.score(questions, sections)
    decoding = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    return read_best(questions, corpus, ranked, llm, decoding, system)


def answer_alone(
    questions: Sequence[Question],
    corpus: Corpus,
    llm: Backend,
    *,
    system: str = "",
    temperature: float = MISTRALS.temperature,
    top_p: float = MISTRALS.top_p,
    max_new_tokens: int = MISTRALS.max_new_tokens,
) -> list[Prediction]:
    """The vanilla setting: the words of the question and nothing else."""
    nothing = [Ranking(question.id, (), ()) for question in questions]
    decoding = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    return read_best(questions, corpus, nothing, llm, decoding, system)


def sections_of(corpus: Corpus, articles: Ranking) -> Ranking:
    """The sections of ranked articles that may be read, each with its article's score."""
    scores = {
        name: score
        for article, score in zip(articles.sources, articles.scores, strict=True)
        for name in corpus.articles.passages(article)
        if not _is_left_out(corpus.sources[corpus.row[name]])
    }
    return Ranking(articles.question_id, tuple(scores), tuple(scores.values()))


def combined(
    articles: Articles, visual: Ranking, relevance: Ranking, visual_weight: float
) -> Ranking:
    """Ranks sections by their relevance and by the similarity of their article's nearest picture
    (`visual` has articles); ties keep the first's order."""
    similarity = dict(zip(visual.sources, visual.scores, strict=True))
    scores = {
        name: visual_weight * similarity[articles.of(name)] + (1 - visual_weight) * relevant
        for name, relevant in zip(relevance.sources, relevance.scores, strict=True)
    }
    return by_score(relevance.question_id, scores)


def read_best(
    questions: Sequence[Question],
    corpus: Corpus,
    ranked: Sequence[Ranking],
    llm: Backend,
    decoding: Decoding,
    system: str,
) -> list[Prediction]:
    """An answer from the first section of each ranking, which it cites; without one, from none."""
    queries, traces = [], {}
    for question, ranking in zip(questions, ranked, strict=True):
        best = corpus.sources[corpus.row[ranking.sources[0]]] if ranking.sources else None
        query, trace = _query(question, best, llm, decoding, system)
        articles: dict[str, str] = {}
        for name in ranking.sources:
            articles.setdefault(corpus.articles.of(name), name)
        origin = {ARTICLES: articles, READER: 1} if articles else {}
        traces[question.id] = {**origin, **trace}
        queries += [] if query is None else [query]
    answers = answer_all(llm, queries, checked=True)
    predictions = []
    for question, ranking in zip(questions, ranked, strict=True):
        trace, cited = traces[question.id], ranking.sources[:1]
        if question.id in answers.failed:
            trace["failed"] = [answers.failed[question.id]]
        if question.id not in answers.by_id:
            predictions.append(Prediction(question.id, read=cited, trace=trace))
            continue
        answer = (answers.by_id[question.id].candidates[0].text or "").strip()
        trace["outputs"] = [{"text": answer}]
        predictions.append(
            Prediction(question.id, answer, cited, ranking.scores[:1], read=cited, trace=trace)
        )
    return predictions


def _query(
    question: Question, section: Source | None, llm: Backend, decoding: Decoding, system: str
) -> tuple[Chat | None, dict[str, Any]]:
    """The messages with as much of the section as the model takes, and what a trace says."""
    before = (Message("system", (system,)),) if system else ()
    reason = ""
    for quoted, left_out in shortened([] if section is None else [section.text]):
        text = _prompt(question, section, quoted)
        query = Chat(question.id, (*before, Message("user", (text,))), decoding)
        try:
            llm.check(query)
        except TooLong as error:
            reason = str(error)
        except Unanswerable as error:
            return None, {"prompts": [text], "failed": [str(error)]}
        else:
            return query, {"prompts": [text], **left_out}
    return None, {"prompts": [], "too_long": [reason]}


def _prompt(question: Question, section: Source | None, quoted: Sequence[str]) -> str:
    """A user's message; `quoted` is the section's text, or its beginning."""
    fields = {"question": question.question}
    if section is None:
        return load_template("echosight.alone").render([], fields)
    fields |= {"title": section.title, "section": section_title(section), "text": quoted[0]}
    return load_template("echosight.section").render([], fields)


def section_title(source: Source) -> str:
    """The heading of a section; "" where it has none, as of an article's beginning."""
    return str(source.extra.get(SECTION, ""))


def _is_left_out(source: Source) -> bool:
    title = section_title(source).lower()
    return any(word in title for word in _LEFT_OUT)


def _check_weight(options: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    weight = options["visual_weight"]
    if not 0 <= weight <= 1:
        raise UserError(
            f"config key options.visual_weight={weight}: 0 (relevance alone) to 1 (similarity of "
            "pictures alone) was expected."
        )


def _check_articles(questions: Sequence[Question], options: Mapping[str, Any]) -> None:
    if not know_articles(questions):
        raise UserError(
            "oracle article: the articles of these questions are not known; ask those of a split "
            "that tells them (infoseek_val_withkb.jsonl for infoseek)."
        )


SETTINGS = {
    "echosight": Setting(answer_echosight, rule_of_row=_check_weight),
    "echosight_retrieve": Setting(retrieve_entities),
    "echosight_rerank": Setting(rerank_sections, rule_of_row=_check_weight),
    "echosight_oracle": Setting(answer_oracle, rule_of_inputs=_check_articles),
    "echosight_alone": Setting(answer_alone),
}
