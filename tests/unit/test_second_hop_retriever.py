"""Search with a second hop."""

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.extensions.second_hop import SecondHopRetriever

# The answer to "q" is the source "seven", which only the title "Peru" finds.
SOURCES = [
    Source(name, "text", "", title)
    for name, title in (("zero", ""), ("one", "Peru"), ("two", "Peru"), ("three", "Chile"))
] + [Source(name, "text", "", "x") for name in ("four", "five", "six", "seven")]
FOUND = {
    "q": ("zero", "one", "two", "three"),
    "q Peru": ("seven", "one", "six", "five"),
    "titled": ("three", "one", "zero", "two"),
    "titled Chile": ("three", "four", "five", "six"),
    "untitled": ("zero",) * 1,
}


class Scripted:
    """A retriever that finds what FOUND lists, and notes the questions."""

    def __init__(self):
        self.asked: list[list[Question]] = []

    def search(self, questions, top_k):
        self.asked.append(list(questions))
        return [
            Ranking(q.id, FOUND[q.question][:top_k], (1.0,) * len(FOUND[q.question][:top_k]))
            for q in questions
        ]


def test_a_second_hop_searches_with_the_first_title_and_interleaves():
    retriever = Scripted()
    hop = SecondHopRetriever(retriever, Corpus(SOURCES))
    asked = [Question("1", "", "q", image="shown"), Question("2", "", "titled")]
    first, second = hop.search(asked, 4)
    # "zero" has no title, so that the next one's is taken; the picture is not asked about again.
    assert [q.question for q in retriever.asked[1]] == ["q Peru", "titled Chile"]
    assert [q.image for q in retriever.asked[1]] == [None, None]
    assert first.sources == ("zero", "seven", "one", "two")  # zero | seven, one | (one), two | six
    assert first.scores == (1, 1 / 2, 1 / 3, 1 / 4)
    assert second.sources == ("three", "one", "four", "zero")


def test_without_any_title_the_question_is_asked_again():
    retriever = Scripted()
    (found,) = SecondHopRetriever(retriever, Corpus(SOURCES)).search(
        [Question("1", "", "untitled")], 4
    )
    assert [q.question for q in retriever.asked[1]] == ["untitled"]
    assert found.sources == ("zero",)
