"""WebQA's protocol where gold sources are hidden, and table 7's F1 as the authors' notebook has it."""

import numpy as np

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking, Source
from mmqa_jax.evaluation.webqa import SELECTIONS, score_sources, select_sources
from mmqa_jax.papers import webqa
from tests.refusals import refuses

COUNT = 20  # candidates of each modality, above the cap of 16
CORPUS = Corpus(
    [
        Source(f"{modality[0]}{number:02d}", modality, f"{modality} {number}")
        for modality in ("text", "image")
        for number in range(COUNT)
    ]
)
ALL = tuple(sorted(source.id for source in CORPUS.sources))


def question(name: str, positives: tuple[str, ...] = (), split: str = "val") -> Question:
    negatives = tuple(name for name in ALL if name not in positives)
    return Question(name, split, "what?", positives=positives, negatives=negatives)


class Scored:
    """A reranker that notes its candidates and prefers later ids."""

    def score(self, questions, candidates):
        self.candidates = list(candidates)
        return [
            Ranking(c.question_id, c.sources[::-1], tuple(np.linspace(0.9, 0.1, len(c.sources))))
            for c in candidates
        ]


def test_a_cap_keeps_the_gold_sources_and_drops_none_where_they_are_hidden():
    """The last candidates are gold: a cap that does not know it would drop them."""
    gold = (f"i{COUNT - 1}", f"t{COUNT - 1}")
    known, hidden = question("known", gold), question("hidden", split="test")
    capped, whole = webqa.restricted_candidates([known, hidden], CORPUS, 16)
    assert len(capped.sources) == 32
    assert set(gold) < set(capped.sources)
    assert whole.sources == ALL
    reranker = Scored()
    for setting in (webqa.select_restricted, webqa.answer_restricted):
        parts = (reranker,) if setting is webqa.select_restricted else (reranker, Said())
        setting([hidden], CORPUS, *parts, cap="webqa")
        assert reranker.candidates[0].sources == ALL


class Said:
    def answer(self, questions, cited):
        return [Prediction(q.id, "", c.sources) for q, c in zip(questions, cited, strict=True)]


def test_a_cap_that_was_not_applied_is_noted():
    known, hidden = question("known", ("t00",)), question("hidden", split="test")
    note = webqa.cap_note([known, hidden], "webqa")
    assert "cap=webqa: 1 of 2 questions hide their gold sources, so all of" in note
    assert webqa.cap_note([known], "webqa") is None
    assert webqa.cap_note([hidden], "none") is None
    # A row that does not name the cap has the setting's own, which is WebQA's.
    assert webqa.SETTINGS["restricted"].notes([hidden], {}) == [webqa.cap_note([hidden], "webqa")]
    assert webqa.SETTINGS["restricted"].notes([hidden], {"cap": "none"}) == []
    assert webqa.SETTINGS["full_scale"].notes([hidden], {}) == []


def test_oracle_sources_need_a_split_that_has_them():
    hidden = [question("a", split="test"), question("b", split="test")]
    message = r"the gold sources of all 2 questions of this split are hidden; choose .* val"
    refuses(message, webqa.SETTINGS["oracle"].check_questions, "oracle", hidden)
    webqa.SETTINGS["question_only"].check_questions("question_only", hidden)
    # A question without any among others has none to show.
    (first, second) = webqa.answer_oracle([question("c", ("t00",)), hidden[0]], Said())
    assert (first.sources, second.sources) == (("t00",), ())
    # Nor has one that is in a chunk of its own: the whole split was looked at before.
    (alone,) = webqa.answer_oracle(hidden[:1], Said())
    assert alone.sources == ()


def notebook_f1(scores: np.ndarray, gold: set[int], threshold: float) -> float:
    """CLIP_encodings.ipynb, cells 29 and 43, restated: two slots, -1 where one is not used."""
    slots = np.full(2, -1)
    for slot, choice in enumerate(np.argsort(scores)[-2:]):
        if slot == 1 or scores[choice] >= threshold:
            slots[slot] = choice
    found = set(slots.tolist())
    common = len(found & gold)
    recall, precision = common / len(gold), common / len(found)
    return 2 * precision * recall / (precision + recall + 1e-5)


def test_clip_20_vlp_is_scored_as_its_notebook_does():
    """Selection and F1 together, on probabilities of which some equal the threshold."""
    rng = np.random.default_rng(0)
    questions, relevance, expected = [], [], []
    for number in range(200):
        scores = rng.uniform(0, 0.15, 20)
        first, second = rng.choice(20, 2, replace=False)
        scores[first], scores[second] = rng.uniform(0.05, 0.9), rng.choice([0.1, 0.2, 0.3])
        order = np.argsort(-scores)
        gold = set(rng.choice(order[:5], rng.integers(1, 4), replace=False).tolist())
        name = f"q{number}"
        questions.append(Question(name, "val", "?", positives=tuple(map(str, gold))))
        relevance.append(Ranking(name, tuple(map(str, order)), tuple(scores[order])))
        expected.append(notebook_f1(scores, gold, 0.2))
    cited = select_sources(relevance, 0.2, SELECTIONS["best"])
    scored = score_sources(questions, [Prediction(c.question_id, "", c.sources) for c in cited])
    found = scored.per_question["source_f1/clip_notebook"]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    # One source alone is right at a precision of one half, which the true F1 does not say.
    single = np.array([len(c.sources) == 1 for c in cited]) & (found > 0)
    assert single.any()
    assert (scored.per_question["source_f1/official"][single] > found[single] + 0.09).all()
    # With two cited sources it is the notebooks' ordinary F1.
    both = np.array([len(c.sources) == 2 for c in cited])
    ordinary = scored.per_question["source_f1/notebook"]
    np.testing.assert_array_equal(found[both], ordinary[both])
    exactly = [r for r in relevance if r.scores[1] == 0.2]
    assert exactly
    assert all(len(c.sources) == 2 for c in select_sources(exactly, 0.2))
    assert all(0.2 not in c.scores for c in select_sources(exactly, 0.2, SELECTIONS["above"]))
