"""RMR: triplets in the prompt, the letter in the output, likelihoods of options."""

import dataclasses

import pytest
from cli_runs import ROOT
from fake_llm import FakeLLM
from test_shots import FakeEmbedder

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.multiple_choice import llava_choice
from mmqa_jax.papers import rmr
from mmqa_jax.papers.rmr import SETTINGS, answer_rmr, choose_rmr, fields, short_answer
from mmqa_jax.prompting.backends import Chat
from mmqa_jax.prompting.examples.library import Embedders, ExampleLibrary
from mmqa_jax.prompting.few_shot import load_template
from mmqa_jax.runs.row import read_row
from tests.refusals import refuses

TRIPLETS = [
    Question(
        f"t{n}", "train", f"triplet {n} ?", choices=("no", "yes"), answer_index=n % 2,
        rationale=f"Reason  {n}\nholds.", extra={"hint": "A hint.", "caption": "A map."},
    )
    for n in range(6)
]  # fmt: skip
QUERIES = [
    Question(f"q{n}", "test", f"query {n} ?", f"{n}.png", choices=("one", "two", "three"))
    for n in range(3)
]
PNG = b"\x89PNG\r\n\x1a\n"
CORPUS = Corpus([], QUERIES, read_picture=lambda name: PNG + name.encode())


@pytest.fixture
def library(tmp_path):
    return ExampleLibrary(TRIPLETS, Embedders(FakeEmbedder()), cache=tmp_path)


def test_the_prompt(library):
    llm = FakeLLM(lambda prompt: (" Reason. The answer is B.", -1.0))
    predictions = answer_rmr(QUERIES, CORPUS, llm, library, shots=2)
    nearest = library.select(QUERIES, 2, "bimodal")
    sent = {query.id: query.prompt for query in llm.seen}
    for query, shots in zip(QUERIES, nearest, strict=True):
        expected = ""
        for shot in shots:
            n = int(shot.question.id[1:])
            expected += (
                f"Question: triplet {n} ?\nContext: A hint. A map.\nOptions: (A) no (B) yes\n"
                f"Answer: Reason {n}\\nholds. The answer is {'AB'[n % 2]}.\n\n"
            )
        expected += (
            f"Question: {query.question}\nContext: N/A\nOptions: (A) one (B) two (C) three\nAnswer:"
        )
        assert sent[query.id] == expected
    assert [p.choice for p in predictions] == [1, 1, 1]
    assert predictions[0].answer == "Reason. The answer is B."


def test_the_lecture_in_front_of_the_solution(tmp_path):
    """ScienceQA's QCM-LEA; 60 of 74 triplets without a solution have a lecture."""
    lecture = {"hint": "", "lecture": "Maps  show\nland."}
    given = dataclasses.replace(TRIPLETS[0], extra=lecture)
    bare = dataclasses.replace(TRIPLETS[1], extra=lecture, rationale="")
    library = ExampleLibrary([given, bare], Embedders(FakeEmbedder()), cache=tmp_path)
    shown = {}
    for rationale in ("solution", "lecture_solution"):
        llm = FakeLLM(lambda prompt: (" A", -1.0))
        answer_rmr(QUERIES[:1], CORPUS, llm, library, shots=2, rationale=rationale)
        shown[rationale] = llm.seen[0].prompt
        choose = FakeLLM()
        choose_rmr(QUERIES[:1], choose, library, shots=2, rationale=rationale,
                   template="rmr.text_rationale")  # fmt: skip
        reasons = sorted(x for x in choose.seen[0].prompt.splitlines() if x.startswith("Reason:"))
        assert (
            reasons[-1]
            == {
                "solution": "Reason: Reason 0 holds.",
                "lecture_solution": "Reason: Maps show land. Reason 0 holds.",
            }[rationale]
        )
    assert "Answer: Reason 0\\nholds. The answer is A." in shown["solution"]
    assert "Answer: The answer is B." in shown["solution"]
    assert (
        "Answer: Maps show\\nland. Reason 0\\nholds. The answer is A." in shown["lecture_solution"]
    )
    assert "Answer: Maps show\\nland. The answer is B." in shown["lecture_solution"]


def test_a_rationale_that_no_prompt_shows_is_refused():
    row = load_config(f"{ROOT}/configs/scienceqa/tables.py:smollm2_k1_lecture_solution", {})
    assert read_row(row).data.questions == 500
    row.options.template = "rmr.text"
    refuses(r"options\.rationale=lecture_solution: .*rmr\.text", read_row, row)


def test_the_answer_alone(library):
    llm = FakeLLM(lambda prompt: (" C", -1.0))
    predictions = answer_rmr(QUERIES, CORPUS, llm, library, shots=1, template="rmr.answer")
    assert "Reason" not in llm.seen[0].prompt
    assert llm.seen[0].prompt.endswith("Answer: The answer is")
    assert [p.choice for p in predictions] == [2, 2, 2]


def test_a_chat_model_may_write_paragraphs(library):
    """Only a base model is stopped at an empty line, behind which it goes on with examples."""
    for chat, stop in ((True, ()), (False, ("\n\n", "\nQuestion:"))):
        llm = FakeLLM(lambda prompt: ("It is warm.\n\nThe answer is B.", -1.0))
        predictions = answer_rmr(QUERIES, CORPUS, llm, library, shots=1, chat=chat)
        assert {tuple(query.decoding.stop) for query in llm.seen} == {stop}
        assert [p.choice for p in predictions] == [1, 1, 1]


def test_a_triplet_without_a_rationale(tmp_path):
    """Spaces that follow each other become one, as in ScienceQA's code; so in training."""
    bare = [
        dataclasses.replace(
            t, rationale="", extra={"hint": "The  of  it."}, choices=("no  no", "y")
        )
        for t in TRIPLETS
    ]
    library = ExampleLibrary(bare, Embedders(FakeEmbedder()), cache=tmp_path)
    llm = FakeLLM()
    answer_rmr(QUERIES[:1], CORPUS, llm, library, shots=2)
    text = llm.seen[0].prompt
    assert text.count("Context: The of it.\nOptions: (A) no no (B) y\nAnswer: The answer is") == 2
    assert "  " not in text
    template = load_template("rmr.rationale")
    assert template.solve(fields(bare[1])) == " The answer is B."
    assert template.solve(fields(TRIPLETS[1])) == r" Reason 1\nholds. The answer is B."
    shown = template.render([fields(bare[1])], fields(QUERIES[0]))
    asked = template.render([], fields(dataclasses.replace(bare[1], answer_index=None)))
    assert shown.startswith(asked + template.solve(fields(bare[1])) + "\n\n")
    # The options that are scored are those that shots show.
    choose_rmr([dataclasses.replace(bare[0], id="q")], llm, library, shots=1)
    assert llm.seen[-1].continuations == (" no no", " y")
    assert "Answer: no no\n" in llm.seen[-1].prompt or "Answer: y\n" in llm.seen[-1].prompt


@pytest.mark.parametrize("shots", range(4))
def test_k(library, shots):
    llm = FakeLLM()
    answer_rmr(QUERIES[:1], CORPUS, llm, library, shots=shots)
    assert llm.seen[0].prompt.count("Answer: Reason") == shots


@pytest.mark.parametrize("text", ["", "I cannot say.", "The answer is D.", "A or B"])
def test_outputs_without_a_letter(library, text):
    predictions = answer_rmr(QUERIES, CORPUS, FakeLLM(lambda prompt: (text, 0.0)), library, shots=1)
    assert {p.choice for p in predictions} == {None}
    assert predictions[0].trace["outputs"] == [{"text": text, "logprob": 0.0}]


def test_pictures_go_to_a_model_that_sees(library):
    llm = FakeLLM()
    answer_rmr(QUERIES[:1], CORPUS, llm, library, shots=1, chat=True, pictures=True)
    (sent,) = llm.seen
    assert isinstance(sent, Chat)
    (message,) = sent.messages
    assert [picture.data for picture in message.pictures] == [PNG + b"0.png"]
    assert message.text.endswith("Answer:")
    answer_rmr(QUERIES[:1], CORPUS, llm, library, shots=1, pictures=True)
    assert len(llm.seen[-1].images) == 1


@pytest.mark.parametrize(("options", "spelled"), [("text", " three"), ("letter", " C")])
def test_the_likeliest_option(library, options, spelled):
    llm = FakeLLM(score=lambda prompt, option: (-1.0,) if option == spelled else (-2.0,))
    predictions = choose_rmr(QUERIES, llm, library, shots=2, options=options)
    assert {(p.choice, p.answer) for p in predictions} == {(2, "C. three")}
    assert {llava_choice(p.answer, 3) for p in predictions} == {2}


def test_calibration_removes_a_preference(library):
    """A model that always prefers `one`, but less so after the question."""

    def score(prompt: str, option: str) -> tuple[float, ...]:
        blank = "Question: N/A" in prompt
        if option == " one":
            return (-1.0,) if blank else (-2.0,)
        return (-9.0,) if blank else ((-5.0,) if option == " two" else (-6.0,))

    assert {p.choice for p in choose_rmr(QUERIES, FakeLLM(score=score), library, shots=1)} == {0}
    found = choose_rmr(QUERIES, FakeLLM(score=score), library, shots=1, calibrated=True)
    assert {p.choice for p in found} == {1}


def test_the_fields_of_a_question():
    solved = fields(TRIPLETS[1])
    assert (solved["letter"], solved["answer"], solved["rationale"]) == (
        "B",
        "yes",
        "Reason 1 holds.",
    )
    open_question = fields(QUERIES[0])
    assert (open_question["letter"], open_question["answer"]) == ("", "")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It flies. The answer is A kite.", "a kite"),
        ("a kite\nmore", "a kite"),
        ("The answer is no. The answer is yes.", "yes"),
        ("A", "a"),
        ("", ""),
    ],
)
def test_short_answers(library, text, answer):
    """What follows the last `The answer is`, else the first line; never a choice."""
    assert short_answer(text) == answer
    llm = FakeLLM(lambda prompt: (text, -1.0))
    predictions = SETTINGS["rmr_direct"].answer(QUERIES, CORPUS, llm, library, shots=1)
    assert {(p.answer, p.choice) for p in predictions} == {(answer, None)}
    assert "Options" not in llm.seen[0].prompt
    assert "The answer is " in llm.seen[0].prompt


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("A cat is red. The answer is B.", "B"),
        ("B", "B"),
        ("(C)", "C"),
        ("B.", "B"),
        ("B. because", "B"),
        ("D", "D"),  # of three choices: no letter, left to the scorer
        ("The answer is two", "The answer is two"),
        ("", ""),
    ],
)
def test_letters(library, text, answer):
    """A letter alone, which MMBench's and SEED-Bench's scorers read; never a choice."""
    llm = FakeLLM(lambda prompt: (text, -1.0))
    predictions = SETTINGS["rmr_letter"].answer(QUERIES, CORPUS, llm, library, shots=1)
    assert {(p.answer, p.choice) for p in predictions} == {(answer, None)}
    assert predictions[0].trace["outputs"][0]["text"] == text


@pytest.mark.parametrize("setting", ["rmr_choice", "rmr_letter"])
def test_questions_without_choices_are_refused(setting):
    rmr.SETTINGS[setting].check_questions(setting, QUERIES)
    rmr.SETTINGS["rmr_direct"].check_questions("rmr_direct", [Question("x", "test", "?")])
    with pytest.raises(UserError, match=rf"setting {setting}: 1 of 4 questions have no choices"):
        rmr.SETTINGS[setting].check_questions(setting, [*QUERIES, Question("x", "test", "?")])


class Home:
    """Where the library's examples have their pictures: those with an even number."""

    @staticmethod
    def picture(question):
        return None if int(question.id[1:]) % 2 else PNG + question.id.encode()


def shown(query) -> list[str]:
    """The pictures of a query in order, by the last letters of their bytes."""
    if isinstance(query, Chat):
        images = [part for part in query.messages[0].content if not isinstance(part, str)]
    else:
        images = query.images
    return [picture.data.removeprefix(PNG).decode() for picture in images]


@pytest.mark.parametrize("order", ["most_similar_first", "most_similar_last"])
@pytest.mark.parametrize("chat", [False, True])
def test_pictures_of_triplets(chat, order, tmp_path):
    """Each in front of its question, in the order of the prompt, the query's own last."""
    library = ExampleLibrary(
        TRIPLETS, Embedders(FakeEmbedder()), cache=tmp_path, read_picture=Home.picture
    )
    llm = FakeLLM(lambda prompt: ("The answer is B.", -1.0))
    options = {"shots": 4, "chat": chat, "order": order, "pictures": True, "shot_pictures": True}
    answer_rmr(QUERIES, CORPUS, llm, library, **options)
    nearest = library.select(QUERIES, 4, "bimodal")
    by_id = {query.id: query for query in llm.seen}
    for query, shots in zip(QUERIES, nearest, strict=True):
        names = [shot.question.id for shot in shots if int(shot.question.id[1:]) % 2 == 0]
        names = names if order == "most_similar_first" else names[::-1]
        asked = by_id[query.id]
        assert shown(asked) == [*names, query.image]
        if chat:
            text = "".join(p if isinstance(p, str) else "#" for p in asked.messages[0].content)
        else:
            text = asked.prompt.replace("<image>", "#")
        for name in names:
            assert f"Question: # triplet {name[1:]} ?" in text
        assert f"Question: # {query.question}" in text
        assert text.count("#") == len(names) + 1


def test_dropped_triplets_take_their_pictures_along(tmp_path):
    library = ExampleLibrary(
        TRIPLETS, Embedders(FakeEmbedder()), cache=tmp_path, read_picture=Home.picture
    )
    llm = FakeLLM(lambda prompt: ("The answer is B.", -1.0), length=330)
    options = {"shots": 6, "pictures": True, "shot_pictures": True}
    predictions = answer_rmr(QUERIES, CORPUS, llm, library, **options)
    asked = {query.id: query for query in llm.seen}
    for query, prediction in zip(QUERIES, predictions, strict=True):
        (kept,) = prediction.trace["shots"]
        assert 0 < len(kept) < 6
        names = [shot["id"] for shot in kept if int(shot["id"][1:]) % 2 == 0]
        assert shown(asked[query.id]) == [*names, query.image]
        (told,) = prediction.trace["prompts"]
        assert told.count("<image>") == len(names) + 1


def test_triplets_pictures_need_the_questions_own():
    with pytest.raises(UserError, match=r"set options\.pictures to True"):
        SETTINGS["rmr"].check_row({"shot_pictures": True}, {})
    SETTINGS["rmr"].check_row({"shot_pictures": True, "pictures": True}, {})
