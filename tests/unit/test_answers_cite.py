"""Every answer cites its sources: each setting that is given sources says which, and which it read.

The settings are those of runs/row.py, so that a new one fails here until it cites.
"""

import dataclasses
import importlib

import pytest
from fake_llm import FakeLLM

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.prompting.examples.library import ExampleLibrary
from mmqa_jax.prompting.examples.side_files import AnswerHeuristics
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReranker
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.retrieval.knowledge import KnowledgeBase
from mmqa_jax.runs.row import BUILT_IN

SOURCES = [
    Source(name, "text", f"{name} is the capital of {land}.", land, extra={"article": land})
    for name, land in (("Pelot", "Arvania"), ("Szohod", "Borduria"), ("Vermil", "Cinnabar"))
]
QUESTIONS = [
    Question(
        f"q{n}", "test", f"What is the capital of {one.title} ?", None, (one.id,), one.id,
        positives=(one.id,), negatives=tuple({s.id for s in SOURCES} - {one.id}),
        choices=tuple(s.id for s in SOURCES), answer_index=n,
        extra={"caption": one.title, "wikipedia_url": [one.title], "retrieved": [one.id]},
    )
    for n, one in enumerate(SOURCES)
]  # fmt: skip
EXAMPLES = [
    dataclasses.replace(q, id=f"e{n}", split="train", question=f"Is it {n} ?")
    for n, q in enumerate(QUESTIONS)
]
CORPUS = Corpus(SOURCES, QUESTIONS)
PICTURED = Corpus(
    [dataclasses.replace(one, modality="image", image=one.id) for one in SOURCES],
    QUESTIONS,
    read_picture=str.encode,
)
# Settings without a part that has sources, and those that are asked without any on purpose.
NONE_TO_CITE = {
    "webqa": {"question_only", "constant"},
    "pica": {"pica_promptcap", "pica_question_only", "copy_nearest", "vote_of_nearest"},
    "prophet": {"prophet", "prophet_choice", "prophet_candidate"},
    # Of equal answers the shortest plan is taken: none here (test_mavl_planner.py has others).
    "mavl": {"mavl_draws", "mavl_one_plan"},
    "llava": {"llava"},
    "kat": {"kat"},
    "mmcot": {"mmcot"},
    "echosight": {"echosight_alone"},
    "mmmu": {"mmmu"},
    "mragbench": {"alone"},
    "mathvista": {"mathvista", "extracted"},
}
SYSTEMS = {name: importlib.import_module(module) for name, module in BUILT_IN.items()}
SETTINGS = [(name, setting) for name, system in SYSTEMS.items() for setting in system.SETTINGS]


class PassageReader:
    """Answers from passages with the first of them."""

    def read(self, questions, passages):
        return [Prediction(q.id, own[0]) for q, own in zip(questions, passages, strict=True)]


class Writer:
    """Writes the same of every question."""

    def write(self, questions, texts, max_new_tokens):
        return ["The answer is (A)."] * len(questions)


class Facts:
    """KAT's knowledge: a question's own words."""

    def passages(self, question, entities):
        return [question.question] * entities


def made_parts(llm: FakeLLM) -> dict:
    names = [q.id for q in (*QUESTIONS, *EXAMPLES)]
    return {
        "retriever": BM25Retriever(CORPUS),
        "reranker": LLMReranker(CORPUS, llm),
        "reader": LLMReader(CORPUS, llm),
        "llm": llm,
        "library": ExampleLibrary(EXAMPLES),
        "knowledge": KnowledgeBase(CORPUS, BM25Retriever(CORPUS)),
        "facts": Facts(),
        "fusion_reader": PassageReader(),
        "rationale_model": Writer(),
        "answer_model": Writer(),
        "heuristics": AnswerHeuristics(
            {name: [("Pelot", 0.9)] for name in names},
            {q.id: [e.id for e in EXAMPLES] for q in QUESTIONS},
        ),
    }


def answers_of(system: str, name: str, said: str, **options: object) -> list[Prediction]:
    """By a model that answers with `said`, plans all tools, and thinks every source helps."""

    def say(prompt: str) -> tuple[str, float]:
        if system == "tool_search":
            calls = not prompt.startswith("<tool_response>")
            return ('<tool_call>{"name": "search_texts", "arguments": {"query": "capital"}}'
                    if calls else said), -1.0  # fmt: skip
        if system == "opensearch_vl":
            call = '<tool_call>{"name": "text_search", "arguments": {"q": "capital"}}</tool_call>'
            return (f"<response>{said}</response>" if "<observation>" in prompt else call), -1.0
        if system == "search_r1":
            tag = "search" if name == "search_r1" else "text_search"
            return f"<{tag}>capital</{tag}>", -1.0
        return ("Action_1, Action_2, Action_3" if " planner" in prompt else said), -1.0

    llm = FakeLLM(say, lambda prompt, option: (-0.1 if option.strip() == "Yes" else -3.0,))
    if name in ("mmsearch_r1", "opensearch_vl"):
        llm.takes_pictures = None  # a server, which does not say
    setting, parts = SYSTEMS[system].SETTINGS[name], made_parts(llm)
    changes = {"similarity": "random", "shots": 1} if "library" in setting.parts() else {}
    options |= {key: value for key, value in changes.items() if key in setting.options({})}
    if "finished" in setting.parts():
        every_plan = {"plans": "oracle"} if name == "mavl_one_plan" else {}
        finished = answers_of(system, system, said, **every_plan)
        parts["finished"] = {
            p.question_id: {"question_id": p.question_id, **p.trace} for p in finished
        }
    corpus = PICTURED if system == "mragbench" else CORPUS
    return setting.run(QUESTIONS, corpus, parts, options)


@pytest.mark.parametrize(("system", "name"), SETTINGS)
def test_every_answer_cites_its_sources(system, name):
    predictions = answers_of(system, name, "Pelot [1].")
    assert [p.question_id for p in predictions] == [q.id for q in QUESTIONS]
    is_without = name in NONE_TO_CITE.get(system, ())
    for prediction in predictions:
        assert bool(prediction.sources) != is_without, prediction
        assert len(prediction.source_scores) == len(prediction.sources)
        assert set(prediction.sources) <= {source.id for source in SOURCES}
        if prediction.answer:  # others find sources alone
            assert set(prediction.sources) <= set(prediction.read)


def test_the_exceptions_are_settings_of_these_systems():
    for system, names in NONE_TO_CITE.items():
        assert names <= SYSTEMS[system].SETTINGS.keys()
        for name in names - {"question_only"}:  # whose reader can read sources
            taken = SYSTEMS[system].SETTINGS[name].parts()
            assert not {"retriever", "reranker", "knowledge"} & taken.keys()


@pytest.mark.parametrize(
    ("system", "name"),
    [("pica", "pica"), ("pica", "pica_choice"), ("rmr", "rmr"), ("rmr", "rmr_choice")],
)
def test_passages_of_the_prompt_are_cited(system, name):
    for question, prediction in zip(QUESTIONS, answers_of(system, name, "Pelot"), strict=True):
        assert prediction.sources == prediction.read == question.positives
        ((found,),) = prediction.trace["knowledge"]
        assert found == {
            "id": question.positives[0], "score": round(prediction.source_scores[0], 6)
        }  # fmt: skip


def test_an_empty_answer_cites_nothing():
    for prediction in answers_of("pica", "pica", ""):
        assert (prediction.answer, prediction.sources) == ("", ())
        assert len(prediction.read) == 1


def test_mavl_cites_what_an_agent_of_the_elected_answer_was_shown():
    """Tool_2 is the senior's and the manager's; the junior alone was shown no passage."""

    def by_role(senior: str, manager: str) -> list[Prediction]:
        def say(prompt: str) -> tuple[str, float]:
            if " planner" in prompt:
                role = prompt.split("You are ")[1].split()[0]
                return {"junior": "Action_1", "senior": "Action_2"}.get(role, "Action_3"), -1.0
            if prompt.endswith("LLM_Knowledge:"):
                return "known", -1.0
            asked = prompt.rpartition("Context:")[2]
            if "KBs_knowledge" in asked:
                return senior, -1.0
            return (manager if "LLM_Knowledge" in asked else "junior's"), -1.0

        parts = made_parts(FakeLLM(say))
        setting = SYSTEMS["mavl"].SETTINGS["mavl"]
        return setting.run(QUESTIONS, CORPUS, parts, {"shots": 0})

    for question, prediction in zip(QUESTIONS, by_role("ours", "ours"), strict=True):
        assert prediction.answer == "ours"
        assert prediction.sources == prediction.read == question.positives
    for question, prediction in zip(QUESTIONS, by_role("senior's", "manager's"), strict=True):
        assert prediction.answer == "manager's"  # by more votes
        assert prediction.sources == ()
        assert prediction.read == question.positives
