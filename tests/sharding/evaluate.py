"""What a validation finds as one of several processes: python evaluate.py MESH ORDER

Prints, in one line of JSON, what untrained models say of a small corpus, and which of its pictures
this process decoded.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from mmqa_jax.core.hosts import distributed

distributed.start()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from PIL import Image  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from cli_runs import TINY, TINY_OF  # noqa: E402

from mmqa_jax.core.config import load_config  # noqa: E402
from mmqa_jax.core.mesh import make_mesh  # noqa: E402
from mmqa_jax.data.corpus import Corpus  # noqa: E402
from mmqa_jax.data.schema import Question, Source  # noqa: E402
from mmqa_jax.data.tokenizers import train_wordpiece  # noqa: E402
from mmqa_jax.papers import webqa  # noqa: E402
from mmqa_jax.tasks.registry import read_task  # noqa: E402
from tests.drawn_weights import drawn  # noqa: E402

COUNT = 7  # not a multiple of any batch


def make_corpus(decoded: set[str]) -> Corpus:
    """Pictures and snippets; `decoded` gets the names of the pictures that are read."""

    def picture(name: str) -> bytes:
        decoded.add(name)
        pixels = np.random.default_rng(int(name)).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    sources = [Source(f"s{i}", "text", f"snippet {i} says {i * i}", "") for i in range(COUNT)]
    sources += [Source(f"p{i}", "image", f"flag {i}", "", str(i)) for i in range(COUNT)]
    questions = [
        Question(
            f"q{i}", "val", f"what is {i} ?", None, (f"it is {i}",), str(i), "text",
            positives=(f"p{i}",),
            negatives=(f"p{(i + 1) % COUNT}", f"s{i}", f"s{(i + 3) % COUNT}"),
        )
        for i in range(COUNT)
    ]  # fmt: skip
    return Corpus(sources, questions, picture)


def vectors(made) -> list:
    return made.embedder.embed_rows(made.pool, made.pictures, range(len(made.pool))).tolist()


def relevance(made) -> list:
    given = webqa.restricted_candidates(made.questions, made.pool)
    return [[r.sources, r.scores] for r in made.reranker.score(made.questions, given)]


def answers(made) -> list:
    return [p.beams for p in webqa.answer_oracle(made.questions, made.reader)]


def main() -> None:
    mesh_of, order = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    mesh = make_mesh(mesh_of, devices=[jax.devices()[place] for place in order])
    decoded: set[str] = set()
    found = {}
    distributed.connect_devices()
    for task, detail in (("contrastive", vectors), ("rerank", relevance), ("answer", answers)):
        changes = {**TINY, **TINY_OF[task], "inference.batch_size": 5, "data.split": "val"}
        changes |= {"validate.split": "val", "validate.questions": 0}
        if task == "contrastive":
            changes |= {"validate.sources": 0, "batches.source_lengths": "(24,)"}
        config = load_config(f"configs/atlas/{task}.py:runlocal", changes)
        corpus = make_corpus(decoded)
        texts = [source.text for source in corpus.sources]
        texts += [question.question for question in corpus.questions()]
        tokenizer = train_wordpiece(texts, 100, lowercase=True)
        described = read_task(config)
        outline = described.recipe(corpus, tokenizer).objective.outline
        decoded.clear()
        model = drawn(outline, mesh=mesh)
        made = described.validation(corpus, tokenizer, nnx.eval_shape(outline)).evaluate
        distributed.barrier(task)  # they have half a minute to meet in a program
        values = made(model)
        decoded_in_one = sorted(decoded)
        found[task] = {"values": values, "detail": detail(made), "decoded": decoded_in_one}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
