"""PICa on WebQA: sources in brackets, shots similar in sources, captions from side files."""

import json

import numpy as np
import pytest
from fake_llm import FakeLLM
from test_shots import FakeEmbedder

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import EncodedPicture
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.papers import pica
from mmqa_jax.papers.pica import answer_promptcap, answer_with_sources, answer_without_sources
from mmqa_jax.prompting.examples.library import Embedders, ExampleLibrary
from mmqa_jax.prompting.examples.side_files import Captions, open_captions
from tests.refusals import refuses

SOURCES = [
    *(Source(f"t{n}", "text", f"Snippet {n}\nof two lines.") for n in range(4)),
    *(Source(str(n), "image", f"Picture {n}", image=f"{n}.png") for n in range(4)),
]
GOLD = {"e0": ("t0",), "e1": ("t0", "t1"), "e2": ("2",), "e3": ("2", "3"), "e4": ("t3", "1", "0")}
EXAMPLES = [
    Question(name, "train", f"ask {name} ?", answers=(f"It is {name}.", "other"), positives=gold)
    for name, gold in GOLD.items()
]
QUERIES = [
    Question("q0", "val", "query 0 ?", positives=("t1", "3")),
    Question("q1", "val", "query 1 ?", positives=("1",)),
    Question("q2", "val", "query 2 ?"),
]
CORPUS = Corpus(SOURCES, [*EXAMPLES, *QUERIES])
CAPTIONS = Captions({"3": "a red  door"}, {"3": ("door", "wall")})


def shown(question: Question) -> list[str | EncodedPicture]:
    """A snippet's text, and as a picture's pixels its number; picture 0 cannot be decoded."""
    return [
        source.text if source.modality == "text" else picture(source)
        for source in (CORPUS.sources[row] for row in CORPUS.positive_rows(question))
    ]


def picture(source: Source) -> EncodedPicture:
    pixels = np.full((1, 1, 3), int(source.id), np.uint8) if source.id != "0" else None
    return EncodedPicture(source.id.encode(), lambda: pixels, source.text)


@pytest.fixture
def fake():
    return FakeEmbedder()


@pytest.fixture
def library(fake, tmp_path):
    return ExampleLibrary(EXAMPLES, Embedders(fake, fake, sources=shown), cache=tmp_path)


def pairwise(one: Question, other: Question) -> float:
    """The mean of the cosines of all pairs of sources."""
    fake = FakeEmbedder()

    def vector(source) -> np.ndarray:
        pixels = None if isinstance(source, str) else source.decode()
        if pixels is None:
            return fake.embed_questions([getattr(source, "caption", source)])[0]
        return fake.embed_pictures([pixels])[0]

    pairs = [float(vector(a) @ vector(b)) for a in shown(one) for b in shown(other)]
    return sum(pairs) / len(pairs) if pairs else 0.0


def test_shots_are_similar_in_question_and_sources(library):
    fake = FakeEmbedder()
    for query, shots in zip(
        QUERIES, library.select(QUERIES, 5, "question_and_sources"), strict=True
    ):
        asked = fake.embed_questions([query.question])[0]
        expected = {
            e.id: float(asked @ fake.embed_questions([e.question])[0]) + pairwise(query, e)
            for e in EXAMPLES
        }
        order = sorted(expected, key=lambda name: -expected[name])
        assert [shot.question.id for shot in shots] == order
        np.testing.assert_allclose(
            [shot.similarity for shot in shots], [expected[name] for name in order], atol=1e-6
        )


def test_a_shared_source_is_embedded_once(library, fake):
    library.select(QUERIES[:1], 2, "question_and_sources")
    assert fake.computed == (5 + 7) + (1 + 2)  # questions and sources: examples, query


def test_sources_in_brackets(library):
    llm = FakeLLM(lambda prompt: (" A door. ", -1.0))
    predictions = answer_with_sources(QUERIES, CORPUS, llm, library, CAPTIONS, shots=1)
    prompts = {query.id: query.prompt for query in llm.seen}
    (shot,) = library.select(QUERIES[:1], 1, "question_and_sources")[0]
    name = shot.question.id
    assert prompts["q0"].endswith(
        f"<Question>ask {name} ?</Question>\n<Answer>It is {name}.</Answer>\n\n"
        "<Text>Snippet 1 of two lines.</Text>\n"
        "<Description>Picture 3</Description><Caption>a red door</Caption><Tags>door, wall</Tags>\n"
        "<Question>query 0 ?</Question>\n<Answer>"
    )
    assert prompts["q1"].endswith(
        "</Answer>\n\n<Description>Picture 1</Description>\n<Question>query 1 ?</Question>\n<Answer>"
    )
    assert prompts["q2"].endswith("</Answer>\n\n<Question>query 2 ?</Question>\n<Answer>")
    assert [(p.answer, p.sources) for p in predictions] == [
        ("A door.", ("t1", "3")), ("A door.", ("1",)), ("A door.", ()),
    ]  # fmt: skip
    decoding = llm.seen[0].decoding
    assert (decoding.stop, decoding.temperature) == (("</Answer>", "\n"), 0.0)


def test_fewer_shots_until_the_prompt_fits(library):
    whole = FakeLLM()
    answer_with_sources(QUERIES[:1], CORPUS, whole, library, shots=5)
    short = FakeLLM(length=len(whole.seen[0].prompt) - 1)
    (prediction,) = answer_with_sources(QUERIES[:1], CORPUS, short, library, shots=5)
    assert (len(prediction.trace["shots"][0]), prediction.trace["dropped_shots"]) == (4, 1)


def test_question_only(library):
    llm = FakeLLM(lambda prompt: ("x", -1.0), fail=["q1"])
    predictions = answer_without_sources(QUERIES, llm, library, shots=2)
    assert not any("Snippet" in query.prompt or "Picture" in query.prompt for query in llm.seen)
    assert llm.seen[0].prompt.count("<Question>") == 3
    assert [(p.answer, p.sources) for p in predictions] == [("x", ()), ("", ()), ("x", ())]
    assert predictions[1].trace["failed"] == ["timed out"]


def test_hidden_sources_are_refused():
    hidden = [Question("x", "test", "?")]
    pica.SETTINGS["pica_question_only"].check_questions("pica_question_only", hidden)
    with pytest.raises(UserError, match="gold sources of all 1 questions of this split are hidden"):
        pica.SETTINGS["pica_oracle"].check_questions("pica_oracle", hidden)


CAPTIONED = Question(
    "7", "val", "What is it?", answers=("a", "b", "b"),
    extra={"caption": "a cat.", "tags": [{"class": "cat", "conf": 1.0}, {"class": "mat", "conf": 1}]},
)  # fmt: skip


def test_promptcap(tmp_path):
    """`{caption} {tags}`, the majority's answer, the most similar shot last, 20 tokens."""
    examples = [
        Question(f"e{n}", "train", f"ask {n} ?", answers=("a", "b", "b"), extra={"caption": "own"})
        for n in range(3)
    ]
    library = ExampleLibrary(examples, Embedders(FakeEmbedder()), cache=tmp_path)
    llm, stand_in = FakeLLM(lambda prompt: (" The Cat.", -1.0)), FakeLLM()
    captions = Captions({"7": "a cat that sleeps", "e0": "for e0"})
    options = {"shots": 3, "similarity": "question"}
    (prediction,) = answer_promptcap([CAPTIONED], llm, library, captions, **options)
    answer_promptcap([CAPTIONED], stand_in, library, **options)
    nearest = [shot.question.id for shot in library.select([CAPTIONED], 3, "question")[0]]
    expected = "Please answer the question according to the above context.\n===\n"
    for name in reversed(nearest):
        context = "for e0" if name == "e0" else "own"
        expected += f"Context: {context}\n===\nQ: ask {name[1]} ?\nA: b\n\n===\n"
    expected += "Context: a cat that sleeps cat, mat\n===\nQ: What is it?\nA:"
    assert llm.seen[0].prompt == expected
    assert stand_in.seen[0].prompt.endswith("Context: a cat. cat, mat\n===\nQ: What is it?\nA:")
    assert (prediction.answer, llm.seen[0].decoding.max_new_tokens) == ("cat", 20)


def test_captions_of_files(tmp_path):
    tsv, tags = tmp_path / "captions.tsv", tmp_path / "tags.tsv"
    tsv.write_text('3\t[{"caption": "low", "conf": 0.1}, {"caption": "high", "conf": 0.9}]\n')
    tags.write_text('3\t[{"class": "door", "conf": 0.9}, {"class": "wall", "conf": 0.2}]\n')
    found = open_captions(str(tsv), str(tags))
    assert found.of_source(SOURCES[7]) == ("high", ("door", "wall"))
    assert found.of_source(SOURCES[6]) == ("", ())
    own = tmp_path / "promptcap.json"
    own.write_text(json.dumps({"7": {"pred_captions": ["one", "two"]}, "8": "three"}))
    assert open_captions(str(own)).of_question(CAPTIONED) == "one"
    assert open_captions(str(own)).of_question(QUERIES[0]) is None


def test_captions_by_picture(tmp_path):
    """Of Prophet's authors; question 12 has the number of another question's picture."""
    asked = [
        Question(name, "test", "What?", extra={"image_id": image_id})
        for name, image_id in (("10", 1), ("12", 1), ("120", 12), ("130", 13))
    ]
    path = tmp_path / "captions_okvqa.json"
    path.write_text(json.dumps({"1": "one", "12": "twelve"}))
    found = open_captions(str(path), questions=asked)
    assert [found.of_question(question) for question in asked] == ["one", "one", "twelve", None]
    path.write_text(json.dumps({"10": "a", "12": "b", "130": "c"}))  # PromptCap's, not of all
    found = open_captions(str(path), questions=asked)
    assert [found.of_question(question) for question in asked] == ["a", "b", None, "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected an object"),
        ('{"7": {"captions": []}}', "captions.json, 7: holds no caption"),
        ('{"7": {"pred_captions": []}}', "captions.json, 7: holds no caption"),
    ],
)
def test_bad_captions(tmp_path, content, message):
    path = tmp_path / "captions.json"
    path.write_text(content)
    refuses(message, open_captions, str(path))
