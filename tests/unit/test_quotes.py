"""The sentence of the passages that stands before an unsure reader's words."""

import pytest
from document_files import pdf
from word_encoder import WordEncoder, install

from mmqa_jax.data.schema import Prediction, Source
from mmqa_jax.prompting.quotes import CONFIDENCE, best_quote
from mmqa_jax.runs.ask_folder import AskOptions, FolderAnswerer, open_folder

TEXT = "The pump is on the left. Wash the filter every week in water. Filter."


def test_the_nearest_sentence_is_quoted():
    sources = [Source("a", "text", "No more about it here."), Source("b", "text", TEXT)]
    quote = best_quote("When to wash the filter?", sources, WordEncoder())
    assert (quote.place, TEXT[quote.start : quote.end]) == (
        1,
        "Wash the filter every week in water.",
    )
    row = [Source("t", "text", "item | fee | of | what\npump | 3 | a | b\nfilter | 4 | c | d")]
    quote = best_quote("The fee of a filter?", row, WordEncoder())
    assert row[0].text[quote.start : quote.end] == "item | fee | of | what"
    assert best_quote("What?", [Source("c", "text", "Too short.")], WordEncoder()) is None


class Reader:
    def __init__(self, confidence):
        self.trace = {} if confidence is None else {CONFIDENCE: confidence}

    def answer(self, questions, cited):
        return [
            Prediction(q.id, "Monday.", read=r.sources, trace=self.trace)
            for q, r in zip(questions, cited, strict=True)
        ]


@pytest.mark.parametrize(("confidence", "is_quoted"), [(0.1, True), (0.99, False), (None, False)])
def test_an_unsure_reader_is_quoted_first(tmp_path, monkeypatch, confidence, is_quoted):
    install(monkeypatch, tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(pdf([[(10, 700, TEXT)]]))
    corpus = open_folder(folder)
    options = AskOptions(least_similarity=-1.0, quote_below=0.7)
    answer = FolderAnswerer(corpus, Reader(confidence), options).answer("When to wash the filter?")
    quoted = answer.quoted(corpus)
    assert (answer.text, quoted is not None) == ("Monday.", is_quoted)
    if is_quoted:
        assert (quoted["file"], quoted["page"], quoted["number"]) == ("a.pdf", 1, 1)
        assert quoted["text"] == "Wash the filter every week in water."
        assert len(quoted["boxes"]) == 1
