"""Key words, and Tool_2's passages of each in the layout of MAVL's figure 5."""

import pytest
from mavl_figures import FIGURE_5
from mavl_team import FULL, heuristics, library, prompts_of, team_llm

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.papers.mavl import answer_mavl, key_words_of
from mmqa_jax.prompting.few_shot import load_template
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.retrieval.knowledge import KnowledgeBase

CONTEXT = "A snowboarder making a run down a powdery slope on a sunny day."
QUESTION = "What is this man on?"
OTHERS = ("A fire hydrant is a connection to the water main.", "A giraffe is the tallest animal.")

# The prompt with them: figure 5's line under Tool_2's name.
SHOWN = f"""Please answer the question according to the context and KBs_knowledge.
=====
Context: {CONTEXT}
Question: {QUESTION}
KBs_knowledge: {" ".join(FIGURE_5)}
Answer:"""


def knowledge(blocks=FIGURE_5) -> KnowledgeBase:
    texts = (*OTHERS, *blocks)
    corpus = Corpus([Source(f"s{n}", "text", text) for n, text in enumerate(texts)])
    return KnowledgeBase(corpus, BM25Retriever(corpus))


def prompts_with(base: KnowledgeBase, question: str = QUESTION, **options) -> list[str]:
    """The prompts for an answer of a team that plans Action_2 alone; the trace's passages."""
    asked = [Question("q0", "val", question, extra={"caption": CONTEXT})]
    llm = team_llm({**FULL, "senior": "Action_2"})
    options = {"agents": ("senior",), "votes": (3.0,), "shots": 0, **options}
    (prediction,) = answer_mavl(asked, llm, library(), heuristics(), base, **options)
    (prompt,) = prompts_of(llm)["answers"]
    return [prompt, *(one["id"] for one in prediction.trace["passages"])]


def test_the_key_words_of_figure_5():
    texts = (CONTEXT, QUESTION)
    assert key_words_of(texts, 3) == ["snowboarder", "powdery slope", "sunny day"]
    assert key_words_of(texts, 9) == ["snowboarder", "run", "powdery slope", "sunny day", "man"]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("A cat, a dog and the cat.", "Which dog?"), ["cat", "dog"]),  # each once
        (("Red fire hydrants don't leak", ""), ["red fire hydrants don't leak"]),
        (("A well-known tower; height 300 m", "How?"), ["well-known tower", "height 300 m"]),
        (("This is it.", "What is that?"), []),
    ],
)
def test_key_words(texts, found):
    assert key_words_of(texts, 5) == found


def test_scores_are_of_rake():
    """The degree of a word over its frequency: `deep` 2/1, `sea` (2 + 1 + 1)/3, `salt` 1."""
    texts = ("The deep sea, the sea and the sea of salt",)
    assert key_words_of(texts, 1) == ["deep sea"]
    assert key_words_of(texts, 2) == ["deep sea", "sea"]


def test_a_block_for_each_key_word_as_figure_5_shows_them():
    """Byte for byte; and the same blocks are the first example of the prompt for Tool_3."""
    prompt, *found = prompts_with(knowledge(), key_words=3)
    assert prompt == SHOWN
    assert found == ["s2", "s3", "s4"]
    figure = f"Question: {QUESTION}\nLLM_Knowledge: {' '.join(FIGURE_5)}\n====="
    assert figure in load_template("mavl.knowledge").head


def test_searched_once_without_key_words():
    prompt, *found = prompts_with(knowledge())
    assert len(found) == 1
    assert prompt.count("\n") == SHOWN.count("\n")
    assert sum(block in prompt for block in FIGURE_5) == 1


def test_blocks_share_the_words():
    """12 words of three passages are 4 of each; a passage of two key words is shown once."""
    prompt, *_ = prompts_with(knowledge(), key_words=3, knowledge_words=12)
    blocks = " ".join(" ".join(block.split()[:4]) for block in FIGURE_5)
    assert f"KBs_knowledge: {blocks}\nAnswer:" in prompt
    one = ("A snowboarder on a powdery slope on a sunny day.",)
    prompt, *found = prompts_with(knowledge(one), key_words=3, knowledge_words=12)
    assert f"KBs_knowledge: {one[0]}\nAnswer:" in prompt
    assert found == ["s2"]
