"""Our models as classes of the harnesses with which authors score theirs: MTEB, lm-eval, lmms-eval.

    import mteb
    from mmqa_jax.harness import MTEBModel

    mteb.evaluate(MTEBModel("minilm"), mteb.get_tasks(["Vidore3HrRetrieval"]))

No harness is imported before a class or a function of its own is used.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32

from mmqa_jax.api.answers import open_llm
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.prompting.backends import (
    Backend,
    Chat,
    Choices,
    Completion,
    Decoding,
    Message,
    Picture,
    Query,
)
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embeddings import TokenFormat
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.max_sim import MaxSimIndex
from mmqa_jax.retrieval.late_interaction import TokenEmbedder, dense_retriever
from mmqa_jax.tasks.embedder import open_embedder

if TYPE_CHECKING:
    import PIL.Image

_NEW_TOKENS = 256  # of an answer where a task does not say it: lm-eval's own default


class MTEBModel:
    """An encoder as MTEB's SearchProtocol and EncoderProtocol (mteb/models/models_protocols.py).

    Tasks of retrieval and reranking search all documents exactly: by cosine, or by MaxSim where the
    encoder has a vector for each token. Other tasks compare vectors of texts.

    Args:
      encoder: as `mmqa embed --model`: `minilm`, a published encoder's folder or ORG/NAME, a run.
      options: `batch_size` and `mesh`.
    """

    def __init__(self, encoder: str | os.PathLike = "minilm", **options: Any):
        self._name, self._options = os.fspath(encoder), options
        self._retriever: DenseRetriever | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="mmqa-mteb-")

    @property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the model: its name, by which results are kept."""
        from mteb.models import ModelMeta

        name = "/".join(Path(self._name).parts[-2:])
        return ModelMeta.create_empty({"name": name if "/" in name else f"mmqa_jax/{name}"})

    @functools.cached_property
    def _opened(self) -> tuple[Any, Any]:
        """The embedder, and what makes pictures ready for it."""
        distributed.start(join=False)
        return open_embedder(Path(self._name), corpus_of_lists(["-"]), self._options or None)

    def index(self, corpus: Iterable[Mapping[str, Any]], **_: Any) -> None:
        """Embeds documents (`id`, `title`, `text`, `image`); empty ones are left out."""
        rows = [(str(row["id"]), _text(row), _encoded(row.get("image"))) for row in corpus]
        ids, texts, pictures = zip(*(row for row in rows if row[1] or row[2]), strict=True)
        searched = corpus_of_lists(texts, pictures=pictures, ids=ids)
        embedder, store = self._opened
        store = store.over(searched)
        if isinstance(embedder, TokenEmbedder):
            embedder.store_tokens(TokenFormat("float16"))
        embeddings = embedder.embed_sources(searched, store, self._folder.name, overwrite=True)
        index: Any = ExactIndex(embeddings)
        if embeddings.tokens is not None:
            index = MaxSimIndex(index, embeddings.tokens, exhaustive=True)
        self._retriever = dense_retriever(searched, embedder, index, store)

    def search(
        self,
        queries: Iterable[Mapping[str, Any]],
        *,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """The scores of each query's best documents, or of those to rank again.

        Args:
          queries: `id`, `text`.
          top_k: documents of a query.
          top_ranked: query -> the documents that alone are scored.
        """
        if self._retriever is None:
            raise UserError("MTEBModel.search: no documents were indexed; call index first.")
        retriever = self._retriever
        questions = []
        for row in queries:
            if row.get("image") is not None:
                raise UserError(
                    f"MTEBModel.search: query {row['id']} has a picture; choose a task whose "
                    "queries are texts."
                )
            questions.append(Question(str(row["id"]), "test", row["text"]))
        if top_ranked is None:
            rankings = retriever.search(questions, min(top_k, len(retriever.corpus)))
        else:
            known = retriever.corpus.row
            candidates = []
            for question in questions:
                names = tuple(name for name in top_ranked[question.id] if name in known)
                candidates.append(Ranking(question.id, names, (0.0,) * len(names)))
            rankings = retriever.search_within(questions, candidates)
        return {
            ranking.question_id: dict(zip(ranking.sources, map(float, ranking.scores), strict=True))
            for ranking in rankings
        }

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **_: Any
    ) -> Float32[np.ndarray, "n D"]:
        """Vectors of texts, in batches of `text`; `prompt_type` is `query`, `document` or None."""
        embedder, _ = self._opened
        if isinstance(embedder, TokenEmbedder):
            raise UserError(
                f"MTEBModel: {self._name} has a vector for each token, and tasks other than "
                "retrieval compare one of a text; choose tasks of retrieval."
            )
        texts = []
        for batch in inputs:
            if "text" not in batch:
                raise UserError(
                    f"MTEBModel.encode: the task gives {', '.join(batch)}; choose one of texts."
                )
            texts += batch["text"]
        kind = getattr(prompt_type, "value", prompt_type)
        embed = {"query": embedder.embed_questions, "document": embedder.embed_passages}
        return embed.get(kind, embedder.embed_texts)(texts)

    def similarity(self, embeddings1: np.ndarray, embeddings2: np.ndarray) -> np.ndarray:
        """The cosines of all vectors [n, D] and [m, D]: [n, m]."""
        return np.asarray(embeddings1) @ np.asarray(embeddings2).T

    def similarity_pairwise(self, embeddings1: np.ndarray, embeddings2: np.ndarray) -> np.ndarray:
        """The cosines of pairs of vectors [n, D]: [n]."""
        return (np.asarray(embeddings1) * np.asarray(embeddings2)).sum(-1)


def lm_eval_model(model: str | os.PathLike | Backend = "smollm2") -> Any:
    """A language model as lm-eval's LM (lm_eval/api/model.py), for `lm_eval.simple_evaluate`.

    `model`: as `mmqa prompt --model`, or an opened one.
    """
    from lm_eval.api.model import LM

    class Model(LM):
        """Answers lm-eval's requests by a backend."""

        def __init__(self, backend: Backend):
            super().__init__()
            self._backend = backend

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            """Log-probability of each continuation, and whether greedy decoding gives it."""
            return _loglikelihood(self._backend, [(*request.args, ()) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            """Refused: no prompt stands before such texts."""
            raise UserError(
                "lm_eval: tasks of perplexity (loglikelihood_rolling) are not scored; choose tasks "
                "with questions."
            )

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            """The generated texts."""
            asked = [(*request.args, ()) for request in requests]
            return _generated(self._backend, asked, chat=False)

    return Model(open_llm(model) if isinstance(model, str | os.PathLike) else model)


def lmms_eval_model(model: str | os.PathLike | Backend = "smollm2") -> Any:
    """A language model that sees as lmms-eval's model (lmms_eval/api/model.py), for
    `lmms_eval.evaluator.evaluate`.

    `model`: as `mmqa prompt --model`, or an opened one.
    """
    from lmms_eval.api.model import lmms

    class Model(lmms):
        """Answers lmms-eval's requests by a backend."""

        def __init__(self, backend: Backend):
            super().__init__()
            self._backend = backend

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            """Log-probability of each continuation, which a function of the document gives."""
            pairs = []
            for request in requests:
                context, target, visuals, number, task, split = request.args
                document = self.task_dict[task][split][number]
                continuation = target if isinstance(target, str) else target(document)
                pairs.append((context, continuation, visuals(document)))
            return _loglikelihood(self._backend, pairs)

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            """The generated texts."""
            asked = []
            for request in requests:
                context, options, visuals, number, task, split = request.args
                document = self.task_dict[task][split][number]
                asked.append((context, options, visuals(document) or ()))
            return _generated(self._backend, asked, chat=self._backend.takes_messages)

        def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
            """Refused: a backend answers one request at a time."""
            raise UserError("lmms_eval: tasks of several rounds are not run; choose another task.")

    return Model(open_llm(model) if isinstance(model, str | os.PathLike) else model)


def _generated(
    backend: Backend,
    asked: Sequence[tuple[str, Mapping[str, Any], Sequence[PIL.Image.Image]]],
    chat: bool,
) -> list[str]:
    """Answers texts with options and pictures, as messages of a user or as texts to continue."""
    queries: list[Query] = []
    for number, (text, options, visuals) in enumerate(asked):
        until = options.get("until") or ()
        new_tokens = options.get("max_gen_toks") or options.get("max_new_tokens") or _NEW_TOKENS
        decoding = Decoding(
            max_new_tokens=int(new_tokens),
            temperature=float(options.get("temperature") or 0) if options.get("do_sample") else 0.0,
            stop=(until,) if isinstance(until, str) else tuple(until),
        )
        pictures = _pictures(visuals)
        if chat:
            queries.append(Chat(number, (Message("user", (*pictures, text)),), decoding))
        else:
            queries.append(Completion(number, text, decoding, pictures))
    answers = _answers(backend, queries)
    return [answers[number].text or "" for number in range(len(queries))]


def _loglikelihood(
    backend: Backend, pairs: Sequence[tuple[str, str, Sequence[PIL.Image.Image]]]
) -> list[tuple[float, bool]]:
    """Scores each continuation; those of one text and its pictures are scored together."""
    together: dict[Any, list[int]] = {}
    for number, (context, _, visuals) in enumerate(pairs):
        key = context, tuple(picture.digest for picture in _pictures(visuals))
        together.setdefault(key, []).append(number)
    queries: list[Query] = []
    for numbers in together.values():
        context, _, visuals = pairs[numbers[0]]
        continuations = tuple(pairs[number][1] for number in numbers)
        queries.append(Choices(len(queries), context, continuations, _pictures(visuals)))
    answers = _answers(backend, queries)
    scored: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    for query, numbers in enumerate(together.values()):
        for number, score in zip(numbers, answers[query].scores, strict=True):
            scored[number] = float(score.total), bool(score.greedy)
    return scored


def _answers(backend: Backend, queries: Sequence[Query]) -> Mapping[Any, Any]:
    """All answers, by number; UserError where a query has none, since a harness takes no gaps."""
    answers = answer_all(backend, queries)
    for number, reason in answers.failed.items():
        raise UserError(f"harness: request {number} has no answer: {reason}")
    return answers.by_id


def _pictures(visuals: Iterable[PIL.Image.Image] | None) -> tuple[Picture, ...]:
    return tuple(Picture(_encoded(image)) for image in visuals or ())


def _encoded(image: PIL.Image.Image | None) -> bytes | None:
    """The bytes of a picture as PNG, which loses nothing; None of none."""
    if image is None:
        return None
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _text(row: Mapping[str, Any]) -> str:
    """A document's title and text, joined as MTEB does (mteb/_create_dataloaders.py)."""
    return f"{row.get('title') or ''} {row.get('text') or ''}".strip()
