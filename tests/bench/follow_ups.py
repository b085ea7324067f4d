"""`python -m tests.bench follow_ups --data=ATLAS`: how follow-up questions find their passages.

Pairs of Atlas's questions on one country, the second with `it` in the country's place, and as many
whose second question is on another country, which it names. A way is good where both kinds find
their gold passage among the five that a reader reads. `--only=val` chooses, `--only=test` reports.
"""

from __future__ import annotations

import collections
import random
from typing import Any

from mmqa_jax.core.host import cache_dir, device_name
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.backends import Message
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.runs.ask_folder import AskOptions, FolderAnswerer
from mmqa_jax.runs.parts import LLMSpec, open_llm
from mmqa_jax.serve import follow_up
from tests.bench import Options

ROWS = ("val", "test")
_PAIRS = 60  # of each kind
_TEXTS = ("history", "government", "geography", "economy", "transport", "name", "people")


def run(options: Options) -> dict[str, Any]:
    """Shares of second questions whose gold passage is among the best five, by way and kind."""
    corpus = AskedCorpus(open_corpus(options.data))
    answerer = FolderAnswerer(corpus, None, AskOptions(least_similarity=-1.0))
    llm = open_llm(LLMSpec("smollm2", "engine", thinking="off"), cache_dir() / "responses", "")
    rows = []
    for split in options.chosen(ROWS):
        pairs = {kind: _pairs(corpus, split, same=kind == "same") for kind in ("same", "another")}
        for way in follow_up.WAYS:
            shares = {kind: _share(answerer, asked, way, llm) for kind, asked in pairs.items()}
            for kind, (share, written) in shares.items():
                rows.append(
                    {
                        "name": f"{split}, {way}, {kind} country",
                        "ours": round(share, 3),
                        "peer": None,
                        "ratio": None,
                        "unit": f"of {len(pairs[kind])} found",
                        "floor": None,
                        "examples": written[:3],
                    }
                )
    llm.close()
    return {"bench": "follow_ups", "device": device_name(), "rows": rows}


def _share(
    answerer: FolderAnswerer, pairs: list[tuple[Question, Question, str]], way: str, llm: Any
) -> tuple[float, list[str]]:
    histories = [
        (Message("user", (first.question,)), Message("assistant", (first.answers[0],)))
        for first, _, _ in pairs
    ]
    asked = [(text, history) for (_, _, text), history in zip(pairs, histories, strict=True)]
    if way == "rewritten":
        queries = [
            follow_up.rewriting(n, *pair, is_chat=llm.takes_messages)
            for n, pair in enumerate(asked)
        ]
        written = {answer.id: answer.text or "" for answer in llm.answer(queries)}
        texts = [[follow_up.rewritten(written[n], *pair)] for n, pair in enumerate(asked)]
    else:
        texts = [follow_up.searches(*pair, way, None) for pair in asked]
    results = iter(answerer.find([Question("", "", text) for some in texts for text in some]))
    ranked = [follow_up.merged([next(results) for _ in some]) for some in texts]
    hits = sum(
        bool(set(second.positives) & set(to_read.passages.sources))
        for (_, second, _), to_read in zip(pairs, ranked, strict=True)
    )
    changed = [f"{text} -> {' | '.join(new)}" for (text, _), new in zip(asked, texts, strict=True)]
    return hits / len(pairs), changed


def _pairs(corpus: Corpus, split: str, *, same: bool) -> list[tuple[Question, Question, str]]:
    """First and second questions, and the second one's text."""
    by_country = collections.defaultdict(list)
    for question in corpus.questions(split):
        entities = question.extra["entities"]
        if question.extra["topic"] in _TEXTS and entities and entities[0] in question.question:
            by_country[entities[0]].append(question)
    draws = random.Random(0)
    countries = sorted(name for name, asked in by_country.items() if len(asked) > 1)
    pairs = []
    for number in range(_PAIRS):
        country = countries[number % len(countries)]
        first, second = draws.sample(by_country[country], 2)
        text = second.question.replace(country, "it")
        if not same:
            other = draws.choice([name for name in countries if name != country])
            second = draws.choice(by_country[other])
            text = second.question
        pairs.append((first, second, text))
    return pairs
