"""The page of `mmqa search --matches`: what of the best page each question matched."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.decode import decode
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.report import picture_uri
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.page_embedder import PageTokenEmbedder
from mmqa_jax.retrieval.page_matches import page_matches
from mmqa_jax.runs.reports.row import MATCHES

_MOST = 20  # questions on a page
_PIXELS = 900  # of a page's longer side
_STYLE = """body{font:16px/1.4 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
img{max-width:100%;border:1px solid #999}td,th{padding:.1rem .8rem .1rem 0;text-align:left}"""


def check_matches(embedder: Embedder) -> PageTokenEmbedder:
    """The embedder; UserError for one whose matches have no places."""
    if not isinstance(embedder, PageTokenEmbedder):
        raise UserError(
            "--matches: needs a retriever of pages with a vector for each token, such as ColPali; "
            "leave it out, or name one as --model."
        )
    return embedder


def write_matches(
    out: Path,
    title: str,
    questions: Sequence[Question],
    ranked: Sequence[Ranking],
    *,
    corpus: Corpus,
    embedder: PageTokenEmbedder,
    pictures: PictureStore,
) -> list[dict[str, Any]]:
    """Writes the page; returns its rows for JSON.

    Args:
      out: a file of HTML.
      title: of the page.
      questions: of which the first are shown.
      ranked: their rankings; the best source that is a picture is shown.
      corpus: of the sources.
      embedder: that ranked them.
      pictures: pixels of the corpus, for the embedder.
    """
    rows, sections = [], []
    for question, ranking in zip(questions[:_MOST], ranked[:_MOST], strict=True):
        at = [corpus.row[name] for name in ranking.sources]
        pixels = next(((row, p) for row in at if (p := pictures.pixels(row)) is not None), None)
        if pixels is None:
            continue
        source = corpus.sources[pixels[0]]
        matches = page_matches(embedder, question.question, pixels[1])
        tokens = matches.rows()
        rows.append({"question": question.id, "source": source.id, "tokens": tokens})
        picture = decode(corpus.read_picture(source.image) or b"", source.id)
        picture.thumbnail((_PIXELS, _PIXELS))
        encoded = io.BytesIO()
        matches.drawn_on(picture).save(encoded, "PNG")
        sections.append(_section(question, source.id, tokens, encoded.getvalue()))
    name = html.escape(f"What the questions matched: {title}")
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{name}</title><style>{_STYLE}</style><h1>{name}</h1>"
        "<p>The redder a place of the page, the better it matches a word of the question. "
        "A frame is a word's best place.</p>" + "".join(sections) + "</html>\n"
    )
    with atomic_write(out) as file:
        file.write(page)
    return rows


def write_row_matches(
    folder: Path,
    title: str,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    candidates: Sequence[Ranking],
    parts: Sequence[Any],
) -> None:
    """Writes MATCHES into a row's workdir if one of its open parts retrieves pages by the vectors
    of their tokens.

    Args:
      candidates: of the row's retriever; empty: the sources of its predictions are those.
      parts: retrievers, alone or fused with BM25, and others.
    """
    for part in parts:
        retriever = getattr(part, "dense", part)
        if isinstance(getattr(retriever, "embedder", None), PageTokenEmbedder):
            ranked = candidates or [
                Ranking(prediction.question_id, prediction.sources, prediction.source_scores)
                for prediction in predictions
            ]
            seen = {"embedder": retriever.embedder, "pictures": retriever.pictures}
            out = folder / MATCHES
            write_matches(out, title, questions, ranked, corpus=retriever.corpus, **seen)
            return


def _section(
    question: Question, source: str, tokens: Sequence[dict[str, Any]], picture: bytes
) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(row['token'])}</td><td>{row['similarity']:.3f}</td>"
        f"<td>{', '.join(f'{100 * side:.0f}' for side in row['box'])}</td></tr>"
        for row in tokens
    )
    return (
        f"<h2>{html.escape(question.question)}</h2><p>{html.escape(source)}</p>"
        f'<img alt="{html.escape(source)}" src="{picture_uri(picture, _PIXELS)}">'
        "<table><tr><th>Token</th><th>Similarity</th>"
        f"<th>Left, top, right, bottom, in percent</th></tr>{cells}</table>"
    )
