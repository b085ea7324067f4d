"""Opens the parts of a prompted system: its language model and its library of examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.datasets.scienceqa import HAS_PICTURE
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.shots import TEXTS
from mmqa_jax.prompting.templates import load_template
from mmqa_jax.systems.parts import open_embedder


@dataclasses.dataclass(frozen=True)
class LLMSpec:
    """The language model of a prompted system.

    Attributes:
      model: as `mmqa prompt --model`: `smollm2`, a folder or GGUF file, or a server's name for it.
      backend: `engine` (this process) or `openai` (a server, see prompting/backend_http.py).
      tokenizer: for the engine, if the model's folder has none.
      engine, server: values of these sections of configs/prompt/default.py that differ.
    """

    model: str
    backend: Literal["engine", "openai"] = "engine"
    tokenizer: str = ""
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    server: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LibrarySpec:
    """Where in-context examples come from, and how they are compared with questions.

    Attributes:
      data: folder of `mmqa prepare`; "" is the row's own.
      split: of the examples.
      folds: see ExampleLibrary; 2 makes one split both library and queries.
      text_model: `minilm`, a converted CLIP or a contrastive run; "": no embeddings (random shots).
      image_model: a converted CLIP or a contrastive run that embeds the questions' pictures; "":
        none.
      text: what is embedded: the question, or the question with hint and choices.
      modality: only examples with a picture (`image`), without one (`text`), or all (RMR, table 4).
    """

    data: str = ""
    split: str = "train"
    folds: int = 1
    text_model: str = "minilm"
    image_model: str = ""
    text: Literal["question", "question_and_choices"] = "question"
    modality: Literal["", "text", "image"] = ""


def check_prompted(options: Mapping[str, Any], library: Mapping[str, Any]) -> None:
    """Refuses, before anything is opened, what could only fail later.

    Args:
      options: of the setting, its defaults included.
      library: the config section `parts.library`.

    Raises:
      UserError: an unknown template, or a similarity without the encoder that it needs.
    """
    if "template" in options:
        load_template(options["template"])
    similarity = options.get("similarity")
    if similarity == "random" or options.get("shots", 1) == 0:
        return
    if not library.get("text_model", LibrarySpec.text_model):
        raise UserError(
            f"config key options.similarity={similarity}: the library has no embedder; set "
            "parts.library.text_model, or options.similarity to random."
        )
    if similarity in ("image", "question_and_image") and not library.get("image_model"):
        raise UserError(
            f"config key options.similarity={similarity}: needs an encoder of pictures; set "
            "parts.library.image_model to a converted CLIP or a contrastive run."
        )


def open_llm(spec: LLMSpec, cache: Path) -> Any:
    """The language model with its response cache in the file `cache`.

    Raises:
      UserError: no such model or server, or an unknown setting.
    """
    from mmqa_jax.core.config import find_config, load_config
    from mmqa_jax.prompting.cache import Cached, ResponseCache
    from mmqa_jax.prompting.open import open_backend

    changes = {f"engine.{key}": value for key, value in spec.engine.items()}
    changes |= {f"server.{key}": value for key, value in spec.server.items()}
    config = load_config(find_config("configs/prompt/default.py"), changes)
    backend = open_backend(spec.backend, spec.model, spec.tokenizer or None, config)
    return Cached(backend, ResponseCache(cache))


def open_library(corpus: Corpus, spec: LibrarySpec) -> Any:
    """The library of in-context examples.

    Args:
      corpus: the row's own, whose examples are used if the spec names no data.

    Raises:
      UserError: no such data or model.
    """
    from mmqa_jax.data.corpus import open_corpus
    from mmqa_jax.prompting.shots import ExampleLibrary

    home = open_corpus(spec.data) if spec.data else corpus
    examples = [q for q in home.questions(spec.split) if q.answers or q.answer_index is not None]
    if spec.modality:
        examples = [q for q in examples if has_picture(q) == (spec.modality == "image")]
    embedders = _example_embedders(corpus, home, spec) if spec.text_model else None
    return ExampleLibrary(examples, embedders, text_of=TEXTS[spec.text], folds=spec.folds)


def has_picture(question: Question) -> bool:
    """Whether a benchmark shows a picture with a question, be its file there or not."""
    return bool(question.extra.get(HAS_PICTURE, True))


def _example_embedders(corpus: Corpus, home: Corpus, spec: LibrarySpec) -> Any:
    """Embedders of the library's examples (of `home`) and of the row's questions."""
    from mmqa_jax.prompting.shots import Embedders
    from mmqa_jax.retrieval.minilm import load_minilm_embedder

    if spec.text_model == "minilm":
        text = load_minilm_embedder()
    else:
        text = open_embedder(Path(spec.text_model), home)[0]
    if not spec.image_model:
        return Embedders(text)
    image, pictures = open_embedder(Path(spec.image_model), home)
    of_examples = {question.id for question in home.questions(spec.split)}
    of_queries = open_embedder(Path(spec.image_model), corpus)[1] if spec.data else pictures

    def pixels(question: Question) -> Any:
        store = pictures if question.id in of_examples else of_queries
        return store.question_pixels(question)

    return Embedders(text, image, pixels)
