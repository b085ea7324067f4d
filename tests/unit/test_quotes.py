"""The sentence of the passages that stands before an unsure reader's words."""

import pytest
from document_files import pdf
from word_encoder import WordEncoder, install

from mmqa_jax.data.schema import Prediction, Source
from mmqa_jax.decoding.sizes import parameter_count
from mmqa_jax.models.llama.config import smollm2_135m
from mmqa_jax.prompting.quotes import CONFIDENCE, SMALL, best_quote, quote_below
from mmqa_jax.runs.ask_folder import AskOptions, FolderAnswerer, open_folder

TEXT = "The pump is on the left. Wash the filter every week in water. Filter."


def test_the_nearest_sentence_is_quoted_with_the_next():
    sources = [Source("a", "text", "No more about it here."), Source("b", "text", TEXT)]
    quote = best_quote("When to wash the filter?", sources, WordEncoder())
    assert (quote.place, TEXT[quote.start : quote.end]) == (
        1,
        "Wash the filter every week in water.",
    )
    more = f"{TEXT} Then dry it well outside."
    quote = best_quote("When to wash the filter?", [Source("b", "text", more)], WordEncoder())
    assert more[quote.start : quote.end].startswith("Wash the filter")
    assert more[quote.start : quote.end].endswith("Filter. Then dry it well outside.")


def test_words_and_the_order_of_sources_decide_between_sentences():
    text = "The fee of it is four. The weight of it is nine."
    sources = [Source("a", "text", text), Source("b", "text", text)]
    quote = best_quote("What of it?", sources, WordEncoder(), words="The weight is nine.")
    assert (quote.place, text[quote.start : quote.end]) == (0, "The weight of it is nine.")


def test_a_row_of_a_table_is_quoted():
    row = [Source("t", "text", "item | fee | of | what\npump | 3 | a | b\nfilter | 4 | c | d")]
    quote = best_quote("The fee of a filter?", row, WordEncoder())
    assert row[0].text[quote.start : quote.end] == "item | fee | of | what\npump | 3 | a | b"
    assert best_quote("What?", [Source("c", "text", "Too short.")], WordEncoder()) is None


def test_parameters_are_counted():
    """SmolLM2-135M's, of its card's safetensors, less the weights of 61 norms."""
    assert parameter_count(smollm2_135m()) == 134_515_008 - 61 * 576


class Reader:
    def __init__(self, confidence):
        self.trace = {} if confidence is None else {CONFIDENCE: confidence}

    def answer(self, questions, cited):
        return [
            Prediction(q.id, "Monday.", read=r.sources, trace=self.trace)
            for q, r in zip(questions, cited, strict=True)
        ]


@pytest.mark.parametrize(
    ("confidence", "below", "parameters", "is_quoted"),
    [
        (0.1, 0.7, None, True), (0.99, 0.7, None, False), (None, 0.7, None, False),
        (0.1, None, 134_515_008, True), (0.91, None, 134_515_008, False),
        (0.1, None, SMALL, False), (0.1, None, None, False), (0.1, 0.0, 134_515_008, False),
    ],
)  # fmt: skip
def test_an_unsure_reader_is_quoted_first(
    tmp_path, monkeypatch, confidence, below, parameters, is_quoted
):
    """Below an option, or without one where the reader is small."""
    install(monkeypatch, tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(pdf([[(10, 700, TEXT)]]))
    corpus = open_folder(folder)
    options = AskOptions(least_similarity=-1.0, quote_below=below)
    reader = Reader(confidence)
    reader.quote_below = quote_below(parameters)
    answer = FolderAnswerer(corpus, reader, options).answer("When to wash the filter?")
    quoted = answer.quoted(corpus)
    assert (answer.text, quoted is not None) == ("Monday.", is_quoted)
    if is_quoted:
        assert (quoted["file"], quoted["page"], quoted["number"]) == ("a.pdf", 1, 1)
        assert quoted["text"] == "Wash the filter every week in water."
        assert quoted["passage"] == TEXT
        assert len(quoted["boxes"]) == 1
