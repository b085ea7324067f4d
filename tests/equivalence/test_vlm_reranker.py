"""Qwen3-VL-Reranker beside transformers' Qwen3VLModel, run by the published recipe, float32."""

import numpy as np
import pytest
import torch
from compare import WHOLE
from PIL import Image
from qwen_vl_prompts import Published, make_published, says, small_pictures, write_json
from tiny_encoders import texts

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.inference.cross_encoder import Side
from mmqa_jax.tasks.rerank import open_reranker
from tests.pictures import encoded

pytestmark = pytest.mark.slow

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
LONG = texts(400)[-1][:700]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Published:
    return make_published(tmp_path_factory.mktemp("vlm") / "Tiny-VL-Reranker")


def probability(published, query, document) -> float:
    """Qwen3VLReranker.process of one pair of (text, picture)."""
    content, shown = [says(f"<Instruct>: {INSTRUCTION}")], []
    for prefix, (text, picture) in (("<Query>:", query), ("\n<Document>:", document)):
        content.append(says(prefix))
        if picture is not None:
            content.append({"type": "image"})
            shown.append(picture)
        if text:
            content.append(says(text))
        elif picture is None:
            content.append(says("NULL"))
    conversation = [
        {"role": "system", "content": [says(SYSTEM)]},
        {"role": "user", "content": content},
    ]
    last = published.states(conversation, shown)[-1]
    yes, no = published.tokenizer.convert_tokens_to_ids(["yes", "no"])
    head = published.model.lm_head.weight.detach()
    return torch.sigmoid(last @ (head[yes] - head[no])).item()


def test_scores_with_texts_and_pictures(published):
    """Of each combination of a text and a picture on both sides; 500 tokens and more."""
    _, second, third = small_pictures()
    turned = second.transpose(Image.Transpose.ROTATE_90)  # of the same bucket: no program more
    sources = [("", turned), ("two pandas", second), (LONG, third), ("a flag", None)]
    corpus = corpus_of_lists(
        [text for text, _ in sources],
        None,
        [shown and encoded(shown) for _, shown in sources],
        None,
    )
    reranker = open_reranker(published.folder, corpus, {"batch_size": 2})
    questions = [("which flag?", None), ("\nis it this?", second)]
    asked = {"flag.png": encoded(second)}
    read, corpus.read_picture = corpus.read_picture, lambda name: asked.get(name) or read(name)
    given = [
        Question(str(n), "", text, image=None if shown is None else "flag.png")
        for n, (text, shown) in enumerate(questions)
    ]
    names = tuple(source.id for source in corpus.sources)
    candidates = [Ranking(question.id, names, (0.0,) * len(names)) for question in given]
    found = reranker.score(given, candidates)
    everything = []
    for question, ranking in zip(questions, found, strict=True):
        got = dict(zip(ranking.sources, ranking.scores, strict=True))
        want = [probability(published, question, source) for source in sources]
        np.testing.assert_allclose([got[name] for name in names], want, **WHOLE)
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)
        everything += want
    assert np.ptp(everything) > 0.01
    (nothing,) = reranker.relevance([(Side("which flag?"), Side(""))])
    want = probability(published, questions[0], ("", None))
    np.testing.assert_allclose(nothing, want, **WHOLE)


def test_an_embedder_is_refused(published, tmp_path):
    folder = tmp_path / "embedder"
    folder.mkdir()
    for file in published.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    write_json(folder / "modules.json", [{"type": "sentence_transformers.models.Pooling"}])
    with pytest.raises(UserError, match="it is no reranker"):
        open_reranker(folder, corpus_of_lists(["a"], None, None, None))
