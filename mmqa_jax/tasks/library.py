"""A library of solved questions, whose examples stand in prompts (RMR, Prophet, PICa)."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import OnModel, ignored
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.formats.official import HAS_PICTURE
from mmqa_jax.data.pictures.store import EncodedPicture, PictureStore
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.examples.library import (
    SIMILARITIES,
    TEXTS,
    Embedders,
    ExampleLibrary,
    PublishedVectors,
)


@dataclasses.dataclass(frozen=True)
class LibrarySpec:
    """The source of in-context examples, and how they are compared with questions."""

    # What a part of a row says of itself (runs.parts.Part).
    turn: ClassVar = "model"
    ranks: ClassVar = ""
    answers: ClassVar = False
    materials: ClassVar = ()

    data: str = ""  # folder of `mmqa prepare`; "" is the row's own
    split: str = "train"  # of the examples
    more_splits: tuple[str, ...] = ()  # others whose questions are examples, too
    folds: int = at_least(1, 1)  # see ExampleLibrary; 2 makes one split both library and queries
    # `minilm`, a published encoder of texts (folder or ORG/NAME), a CLIP or SigLIP or a contrastive
    # run; "": no embeddings (random shots).
    text_model: str = "minilm"
    # A CLIP or SigLIP or a contrastive run that embeds the questions' pictures; "": none.
    image_model: str = ""
    # What is embedded: the question, or the question with hint and choices.
    text: Literal["question", "question_and_choices"] = "question"
    # Only examples with a picture (`image`), without one (`text`), or all (RMR, table 4).
    modality: Literal["", "text", "image"] = ""
    # Folder of the vectors that PICa's authors published (OK-VQA), which are compared in place of
    # embeddings by `text_model` and `image_model`; "": none.
    vectors: str = ""
    # How the nearest examples are found: `exact`, by the products with all of them, or `scann`, by
    # the retrieval room's ScaNN index.
    index_kind: Literal["exact", "scann"] = "exact"

    def paths(self) -> list[str]:
        """The files, folders and names of installed models that it reads."""
        return [self.data, self.text_model, self.image_model, self.vectors]

    def open(self, row: Any) -> ExampleLibrary:
        """The library of a row (runs.part.OpenedParts)."""
        return open_library(row.corpus, self, on_model=row.on_model("library"))


def check_similarity(
    similarity: str,
    library: LibrarySpec,
    *,
    key: str = "options.similarity",
    section: str = "parts.library",
) -> None:
    """Refuses a similarity that a library's models cannot give; `key` and `section` are the
    config's.
    """
    if similarity == "random":
        return
    spec, place = library, f"config key {key}={similarity}"
    if spec.vectors:
        if similarity not in SIMILARITIES or spec.index_kind != "exact":
            raise UserError(
                f"{place}: {section}.vectors compares questions and pictures, and exactly; set it "
                f"to one of {', '.join(SIMILARITIES)} and {section}.index_kind to exact, or leave "
                "the vectors out."
            )
        return
    if not spec.text_model:
        raise UserError(
            f"{place}: the library has no embedder; set {section}.text_model, or {key} to random."
        )
    if similarity in ("image", "question_and_image") and not spec.image_model:
        raise UserError(
            f"{place}: needs an encoder of pictures; set {section}.image_model to a CLIP or SigLIP "
            "or a contrastive run."
        )
    one_space = not spec.image_model or Path(spec.image_model) == Path(spec.text_model)
    added = ("bimodal", "bimodal_unnormalized", "question_and_sources")
    if similarity in added and not one_space:
        raise UserError(
            f"{place}: adds vectors of texts and pictures, but those of {section}.text_model="
            f"{spec.text_model} and {section}.image_model={spec.image_model} are no common space; "
            f"name the same CLIP or contrastive run for both, or set {section}.image_model to ''."
        )
    if spec.index_kind == "scann":
        _check_scann(section)


def _check_scann(section: str) -> None:
    from mmqa_jax.retrieval.indexes.index import scann_available

    if not scann_available():
        raise UserError(
            f"config key {section}.index_kind=scann: ScaNN cannot be imported (it is Linux-only); "
            "install `scann`, or set it to exact."
        )


def open_library(
    corpus: Corpus, spec: LibrarySpec, section: str = "parts.library", on_model: OnModel = ignored
) -> ExampleLibrary:
    """The library of in-context examples.

    Args:
      corpus: the row's own, whose examples are used if the spec names no data.
      section: of the config that has the spec, for messages.
    """
    home = open_corpus(spec.data) if spec.data else corpus
    examples = _examples(home, spec)
    splits = (spec.split, *spec.more_splits)
    vectors = PublishedVectors(Path(spec.vectors)) if spec.vectors else None
    embedded = spec.text_model and vectors is None
    embedders = _example_embedders(corpus, home, spec) if embedded else (None, None)
    if embedders[0] is not None:
        on_model("text_model", embedders[0].text)
        if spec.image_model:
            on_model("image_model", embedders[0].image)
    return ExampleLibrary(
        [example for example in examples if example.split in splits],
        embedders[0],
        text_of=TEXTS[spec.text],
        folds=spec.folds,
        vectors=vectors,
        of_queries=embedders[1],
        same_ids=_same_ids(corpus, home),
        index=_scann_index if spec.index_kind == "scann" else None,
        on_empty=_no_examples(examples, spec, section),
        read_picture=home.question_picture,
    )


def _examples(home: Corpus, spec: LibrarySpec) -> list[Question]:
    """The solved questions of all splits, of the spec's modality."""
    solved = [q for q in home.questions() if q.answers or q.answer_index is not None]
    if not spec.modality:
        return solved
    return [q for q in solved if has_picture(q) == (spec.modality == "image")]


def _no_examples(examples: list[Question], spec: LibrarySpec, section: str) -> str:
    """Returns the message for a split without examples."""
    with_answers = "with answers" + (f" of modality {spec.modality}" if spec.modality else "")
    splits = sorted({example.split for example in examples})
    remedy = f"name a split {with_answers} ({', '.join(splits)})"
    if not splits:
        remedy = f"no split of {spec.data or 'this corpus'} has questions {with_answers}, name"
        remedy = f"{remedy} other data in {section}.data"
    return (
        f"config key {section}.split={spec.split}: the library of examples is empty; {remedy}, or "
        "set shots to 0."
    )


def _same_ids(corpus: Corpus, home: Corpus) -> bool:
    """Whether an id names the same question in both: they are one corpus, or one benchmark."""
    if corpus is home or corpus.fingerprint == home.fingerprint:
        return True
    name = home.manifest.get("name")
    return name is not None and name == corpus.manifest.get("name")


def _scann_index(vectors: np.ndarray) -> Any:
    """ScaNN's index over the examples' vectors, in memory alone."""
    from mmqa_jax.retrieval.embeddings import Embeddings
    from mmqa_jax.retrieval.indexes.index import build_index

    return build_index(Embeddings(vectors, "", ""), "scann")


def open_text_embedder(model: str, corpus: Corpus) -> tuple[Any, PictureStore]:
    """The encoder that a section names (`minilm`, a folder, ORG/NAME), and a corpus's pictures."""
    if model == "minilm":
        from mmqa_jax.retrieval.text_encoder import load_minilm_embedder

        return load_minilm_embedder(), PictureStore(corpus, size=1)
    from mmqa_jax.tasks.embedder import open_embedder

    return open_embedder(Path(model), corpus)


def has_picture(question: Question) -> bool:
    """Whether a benchmark shows a picture with a question, be its file there or not."""
    return bool(question.extra.get(HAS_PICTURE, True))


def _example_embedders(corpus: Corpus, home: Corpus, spec: LibrarySpec) -> tuple[Any, Any]:
    """Embedders of the library's examples, of `home`, and of the row's questions, of `corpus`."""
    text, pictures = open_text_embedder(spec.text_model, home)
    image = text
    if not spec.image_model:
        image, pictures = None, None
    elif spec.text_model == "minilm" or Path(spec.image_model) != Path(spec.text_model):
        from mmqa_jax.tasks.embedder import open_embedder

        image, pictures = open_embedder(Path(spec.image_model), home)
    embedders = _embedders(home, text, image, pictures)
    if corpus is home:
        return embedders, embedders
    return embedders, _embedders(corpus, text, image, pictures and pictures.over(corpus))


def _embedders(corpus: Corpus, text: Any, image: Any, pictures: PictureStore | None) -> Any:
    if pictures is None:
        return Embedders(text, sources=lambda question: _sources(corpus, None, question))
    return Embedders(
        text,
        image,
        lambda question: pictures.encoded(question.image),
        lambda question: _sources(corpus, pictures, question),
    )


def _sources(
    corpus: Corpus, pictures: PictureStore | None, question: Question
) -> list[str | EncodedPicture]:
    """A question's gold sources: a snippet's text, a picture, or else its caption."""
    sources: list[str | EncodedPicture] = []
    for source in (corpus.sources[row] for row in corpus.positive_rows(question)):
        picture = pictures and pictures.encoded(source.image, source.text)
        sources.append(picture or source.text)
    return sources
