"""Where passages and quotes stand: beside pdfium's own boxes of characters, and counted lines."""

import numpy as np
import pypdfium2
import pytest
from document_files import pdf, picture

from mmqa_jax.data.boxed_documents import text
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.documents.chunks import ChunkOptions
from mmqa_jax.data.documents.document import cited_place, place_of, quote_of, shown_place
from mmqa_jax.data.folder import FolderOptions, read_folder
from mmqa_jax.data.schema import Prediction
from mmqa_jax.runs.run import evidence

LINES = [
    "The pump stands on the left side of the tank.",
    "Wash the filter every week in warm water.",
]


def sources_of(tmp_path, **files):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("_", ".")).write_bytes(data)
    options = FolderOptions(chunk=ChunkOptions(words=12, overlap=0))
    return read_folder(folder, tmp_path / "cache", options).sources


def test_a_quotes_box_is_that_of_its_characters(tmp_path):
    data = pdf([[(10, 700 - 14 * n, line) for n, line in enumerate(LINES)]])
    sources = sources_of(tmp_path, a_pdf=data)
    source = next(source for source in sources if "filter" in source.text)
    place = cited_place(source.text, source.extra, "filter every week")
    assert place["quote"]["text"] == "filter every week"
    (box,) = place["quote"]["boxes"]
    page = pypdfium2.PdfDocument(data)[0].get_textpage()
    begin = page.get_text_range().index("filter every week")
    edges = np.array([page.get_charbox(begin + n, loose=True) for n in range(17)])
    left, bottom, right, top = *edges[:, :2].min(0), *edges[:, 2:].max(0)
    theirs = np.array([left, 792 - top, right, 792 - bottom])
    assert np.abs(np.array(box) - theirs).max() < 6  # as if letters were equally wide
    assert (source.extra["page"], place["lines"], place["cells"]) == (1, None, [])
    whole = place_of(source.extra)["boxes"]
    assert any(b[0] <= box[0] and box[2] <= b[2] and b[1] == box[1] for b in whole)


MARKDOWN = """# Care

First line of a paragraph that goes on
in **bold** [words](http://example.org/a/b) here.

- wash it
- dry &amp; oil it

The pump is *quiet*.
"""


@pytest.mark.parametrize(
    ("name", "content", "words", "lines"),
    [
        ("a_txt", "One.\r\n\r\nTwo and\r\nthree.\r\n", "Two and three", [3, 4]),
        ("a_md", MARKDOWN, "words here", [4, 4]),
        ("a_md", MARKDOWN, "dry & oil", [7, 7]),
        ("a_md", MARKDOWN, "pump is quiet", [9, 9]),
        ("a_rst", "Care\n====\n\nDry ``it``\nwell.\n", "Dry it well", [4, 5]),
        ("a_jsonl", '{"part": "pump"}\n{"part": "filter"}\n', "filter", [2, 2]),
    ],
)
def test_texts_have_the_lines_of_their_file(tmp_path, name, content, words, lines):
    sources = sources_of(tmp_path, **{name: content})
    source = next(source for source in sources if words in source.text)
    start = source.text.index(words)
    place = place_of(source.extra, start, start + len(words))
    assert (place["lines"], place["boxes"]) == (lines, [])


def test_sheets_have_cells(tmp_path):
    (source,) = sources_of(tmp_path, fees_csv="item,fee\npump,3\nfilter,4\n")
    start = source.text.index("filter")
    assert place_of(source.extra, start)["cells"] == ["A3:B3"]
    assert shown_place(source.extra) == "fees.csv, A2:B2 to A3:B3"


@pytest.mark.parametrize(
    ("answer", "quoted"),
    [
        ("Every WEEK", "every week"),
        ("You should wash the filter every week in tap water.", "Wash the filter every week in"),
        ("the filter is old", None),
        ("opera", None),
        ("", None),
    ],
)
def test_an_answer_quotes_what_stands_there_word_by_word(answer, quoted):
    stretch = quote_of(LINES[1], answer)
    assert (stretch and LINES[1][slice(*stretch)]) == quoted


def test_a_picture_of_a_pdf_has_its_region(tmp_path):
    data = pdf([[(10, 700, "Text.")]], pictures={0: (500, picture(form="JPEG"))})
    content, _ = text(data, ".pdf", 1)
    ((*_, box),) = content["figures"]
    assert box == pytest.approx((72, 142, 272, 292))  # 200 x 150 points, 500 above the foot


def test_a_prediction_says_where_its_sources_stand(tmp_path):
    corpus = Corpus(sources_of(tmp_path, a_txt="Oil it.\n\nWash the filter weekly.\n"))
    cited = next(source.id for source in corpus.sources if "filter" in source.text)
    (row,) = evidence(corpus, Prediction("q", "weekly", sources=(cited,)))["evidence"]
    assert (row["file"], row["quote"]["lines"]) == ("a.txt", [3, 3])
    assert row["quote"]["text"] == "weekly"
    assert evidence(corpus, Prediction("q", "weekly")) == {}
