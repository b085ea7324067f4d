"""The task `retriever` on models that see pictures, beside transformers' models in float64 under
sentence-transformers' losses: losses and parameters of five steps, folders that are exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_colqwen as colqwen
import test_page_retrievers as pages
import torch
import transformers
from compare import randomize
from flax import nnx
from PIL import Image
from qwen_vl_prompts import make_published, small_pictures
from safetensors.numpy import save_file
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from siglip_pair import published as siglip
from siglip_pair import spiece
from test_clip_embedder import published as clip  # noqa: F401, a fixture
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from updates import our_updates

from mmqa_jax.core.config import load_config
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.data.chat_template import PictureChat
from mmqa_jax.data.corpus import Corpus, corpus_of_lists
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.inference.cross_encoder import Side, pair_prompts, reranked_pictures
from mmqa_jax.models.encoders.trained_pictured import read_pictured_record, read_seeing_reranker
from mmqa_jax.retrieval.vlm_encoder import Slots, prompt_arrays, slots_of
from mmqa_jax.runs.verbs.conversion import export_retrieval_run
from mmqa_jax.tasks.embedder import open_embedder
from mmqa_jax.tasks.published_trunk import trunk_of
from mmqa_jax.tasks.reranker import RerankerObjective
from mmqa_jax.tasks.retriever import RetrieverLoss, RetrieverObjective
from mmqa_jax.tasks.run import run_training
from mmqa_jax.training.optimizer import OptimizerOptions
from tests.pictures import encoded

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "configs/openstax/retriever.py"
BOUND = 1e-6
MOST = 2304  # pixels of a Qwen-VL's picture
TEXTS = ["two red flags", "it", "a", "a b", "which flag", "of cedar"]
ASKED = ["which flag?", "is it red", "the third"]
STEPS = 5


class Peer:
    """A published checkpoint: transformers' model, and what it makes of our rows.

    Attributes:
      whole: the model.
      vectors: (ids [L], PIL picture or None) -> [L, D], or [D].
    """

    length, query_length, max_pixels = 200, 40, 0
    sees_padding = False

    def __init__(self, folder: Path):
        self.folder = folder

    def reopened(self, folder: Path) -> torch.nn.Module:
        return type(self.whole).from_pretrained(folder)


class ColQwen(Peer):
    def __init__(self, folder):
        super().__init__(folder)
        made = colqwen.Theirs("qwen2_vl", "ColQwen2ForRetrieval", folder)
        self.whole, self.processor, self.image = made.col, made.processor, made.image
        self.processor.size = {"shortest_edge": 1600, "longest_edge": MOST}
        self.processor.save_pretrained(folder)

    def vectors(self, ids, picture):
        more = {}
        if picture is not None:
            more = dict(self.processor(images=[picture.convert("RGB")], return_tensors="pt"))
        self.whole.vlm.rope_deltas = None
        states = self.whole.vlm(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.image).int(),
            **more,
        ).last_hidden_state[0]
        return torch.nn.functional.normalize(self.whole.embedding_proj_layer(states), dim=-1)


class Paged(Peer):
    length = 400

    def __init__(self, name, folder):
        super().__init__(folder)
        self.made = pages.Theirs(name, folder)
        self.whole = self.made.whole

    def vectors(self, ids, picture):
        more = {} if picture is None else self.made.picture(picture)[1]
        if self.made.case.config is pages.paligemma:
            more["token_type_ids"] = torch.zeros_like(ids)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
        states = self.whole.vlm(**inputs).last_hidden_state[0]
        return torch.nn.functional.normalize(self.whole.embedding_proj_layer(states), dim=-1)


class Chat(Peer):
    length, query_length, max_pixels = 240, 80, MOST

    def __init__(self, folder):
        super().__init__(folder / "Embedding")
        self.made = make_published(self.folder, "$A", "<|endoftext|>")
        self.whole = self.made.model

    def vectors(self, ids, picture):
        more = {}
        if picture is not None:
            height, width = smart_resize(picture.height, picture.width, 8, 4 * 64, MOST)
            shown = picture.convert("RGB").resize((width, height))
            more = dict(self.made.processor(images=[shown], do_resize=False, return_tensors="pt"))
        model = self.whole.model
        model.rope_deltas = None
        states = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.whole.config.image_token_id).int(),
            **more,
        ).last_hidden_state[0]
        return torch.nn.functional.normalize(states[-1], dim=-1)


class Towers(Peer):
    def __init__(self, folder, kind, whole):
        super().__init__(folder)
        self.whole = whole.eval()
        if kind == "clip":
            self.processor = transformers.CLIPImageProcessorPil(
                size={"shortest_edge": 32}, crop_size=32
            )
        else:
            self.processor = transformers.SiglipImageProcessorPil(size={"height": 27, "width": 27})
            self.processor.save_pretrained(folder)
        self.sees_padding = kind == "siglip"
        self.length = self.query_length = 20 if kind == "clip" else 11

    def vectors(self, ids, picture):
        if picture is None:
            made = self.whole.get_text_features(ids).pooler_output[0]
        else:
            pixels = self.processor([picture.convert("RGB")], return_tensors="pt")["pixel_values"]
            made = self.whole.get_image_features(pixels.double()).pooler_output[0]
        return torch.nn.functional.normalize(made, dim=-1)


KINDS = ("colqwen2", "ColPaliForRetrieval", "ColModernVBertForRetrieval", "chat", "siglip", "clip")


@pytest.fixture(params=KINDS)
def peer(request, tmp_path):
    kind = request.param
    if kind == "colqwen2":
        return ColQwen(tmp_path / "model")
    if kind == "chat":
        return Chat(tmp_path)
    if kind == "siglip":
        model = siglip("siglip", tmp_path)
        spiece(tmp_path)
        return Towers(tmp_path, kind, model)
    if kind == "clip":
        model = transformers.CLIPModel.from_pretrained(request.getfixturevalue("clip"))
        folder = tmp_path / "clip"
        shutil.copytree(request.getfixturevalue("clip"), folder)
        randomize(model, 1).save_pretrained(folder)
        return Towers(folder, kind, model)
    return Paged(kind, tmp_path / "model")


class AsSentences(torch.nn.Module):
    """What sentence-transformers' losses ask of a model: features that are already vectors."""

    def __init__(self, peer: Peer):
        super().__init__()
        self.peer = peer

    def forward(self, features: Any, **_: Any) -> dict[str, torch.Tensor]:
        rows = [self.peer.vectors(*row) for row in features["rows"]]
        if rows[0].ndim == 1:
            return {"sentence_embedding": torch.stack(rows)}
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(row)) for row in rows], batch_first=True
        )
        made = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"token_embeddings": made, "attention_mask": mask}


def batches_of(peer: Peer, record: Any) -> tuple[list[dict], list[list[dict]]]:
    """Our batches, and sentence-transformers' columns: questions, pages, other texts."""
    shown = [None, None, None, *small_pictures()]
    corpus = corpus_of_lists(TEXTS, None, [x and encoded(x) for x in shown], None)
    trunk = trunk_of(record)
    trunk.check(peer.query_length, peer.length)
    tokenizer = trunk.open_tokenizer(peer.folder)
    pictures = trunk.open_pictures(corpus, tokenizer)
    assert isinstance(pictures, PictureStore)
    texts = [trunk.text_of(lambda s: s.text)(source) for source in corpus.sources]
    queries = trunk.side(tokenizer, "query", ASKED, peer.query_length)
    sources = trunk.side(tokenizer, "document", texts, peer.length, pictures)
    ours, theirs = [], []
    for step in range(STEPS):
        rows = np.stack([3 + np.roll(np.arange(3), step), np.arange(3)], 1).ravel()
        sides = {"query": queries.rows(range(3), peer.query_length)}
        sides["source"] = sources.rows(rows, peer.length)
        for name, length in (("query", peer.query_length), ("source", peer.length)):
            count = 3 if name == "query" else 6
            shapes = trunk.shapes("query" if name == "query" else "document", count, length)
            got = {key: (x.shape, x.dtype) for key, x in sides[name].items()}
            assert got == {key: (x.shape, x.dtype) for key, x in shapes.items()}
        batch = {f"{name}_{key}": x for name, side in sides.items() for key, x in side.items()}
        batch |= {
            "positive": 2 * np.arange(3),
            "source_rows": rows,
            "gold_rows": rows[::2, None],
        }
        ours.append(jax.tree.map(jnp.asarray, batch))

        def inputs(name, number, row, sides=sides):
            side = sides[name]
            real = slice(None) if peer.sees_padding else side["mask"][number]
            ids = torch.tensor(side["ids"][number][real].astype(np.int64))[None]
            return ids, None if row is None else shown[row]

        columns = [{"rows": [inputs("query", number, None) for number in range(3)]}]
        for column in range(2):
            places = range(column, 6, 2)
            columns.append({"rows": [inputs("source", place, rows[place]) for place in places]})
        theirs.append(columns)
    return ours, theirs


def test_five_steps_equal(peer, tmp_path):
    """Losses of five steps of AdamW, and the parameters behind them, by an exported folder."""
    record = read_pictured_record(peer.folder, None, max_pixels=peer.max_pixels)
    model = nnx.eval_shape(lambda: record.build(rngs=nnx.Rngs(0)))
    record.load(model, peer.folder)
    is_token = record.vectors == "token"
    losses = RetrieverLoss(scale=0.1 if is_token else 1.0)  # so that roundings stay small
    eps = 1e-2 if is_token else 1e-1
    ours, theirs = batches_of(peer, record)
    objective = RetrieverObjective(record, losses=losses)
    options = OptimizerOptions(
        name="adamw",
        learning_rate=1e-3,
        schedule="constant",
        warmup=0.0,
        eps=eps,
        weight_decay=0.0,
        clip_norm=None,
    )
    got = our_updates(objective, model, options, ours, lambda state: published(record, state))
    peer.whole.double()
    optimizer = torch.optim.AdamW(peer.whole.parameters(), lr=1e-3, eps=eps, weight_decay=0.0)
    kind = MultiVectorMultipleNegativesRankingLoss if is_token else MultipleNegativesRankingLoss
    loss_of = kind(AsSentences(peer), scale=losses.scale)
    deviations = []  # of 1 or the loss
    for columns, update in zip(theirs, got, strict=True):
        peer.whole.zero_grad()
        loss = loss_of(columns, None)
        loss.backward()
        deviations.append(abs(update.loss - loss.item()) / max(1, abs(loss.item())))
        optimizer.step()
    assert max(deviations) < BOUND, deviations
    assert got[0].loss - got[-1].loss > 1e-5
    again = reopened(peer, record, got[-1].parameters, tmp_path / "out")
    for name, wanted in peer.whole.named_parameters():
        np.testing.assert_allclose(
            again[name].numpy(), wanted.detach().numpy(), rtol=0, atol=BOUND, err_msg=name
        )


def test_five_steps_of_a_reranker_equal(tmp_path):
    """Of a Qwen3-VL-Reranker: pictures of sources and of a question, cross-entropy with labels."""
    made = make_published(tmp_path / "Reranker")
    words = made.model.config.text_config.vocab_size
    tokenizer = load_encoder_tokenizer(made.folder, words, pairs=False)
    yes, no = (tokenizer.token_id(word) for word in ("yes", "no"))
    record = read_seeing_reranker(made.folder, yes, no, max_pixels=MOST)
    model = nnx.eval_shape(lambda: record.build(rngs=nnx.Rngs(0)))
    record.load(model, made.folder)
    shown = small_pictures()
    corpus = corpus_of_lists(["a"] * 3, None, [encoded(x) for x in shown], None)
    pixels = [reranked_pictures(corpus, record.config).pixels(row) for row in range(3)]
    pairs = [  # of a question with a picture, and of one without
        *((("is it this?", 1), source) for source in (("", 0), ("two flags", None), ("red", 2))),
        *((("which flag?", None), source) for source in (("", 2), ("a b", 1), ("", None))),
    ]
    sides = [[Side(text, None if n is None else pixels[n]) for text, n in pair] for pair in pairs]
    chat = PictureChat(made.folder, tokenizer, record.config.image_token)
    prompts = pair_prompts(chat, record.config, sides, longest=300)
    arrays = prompt_arrays(
        prompts, record.config, Slots(2, slots_of(record.config).bucket), 300, tokenizer.pad_id
    )
    labels = np.array([[1.0, 0, 0], [0, 0.5, 1.0]], np.float32)
    batch = {f"pair_{key}": jnp.asarray(x) for key, x in arrays.items()}
    batch |= {"labels": jnp.asarray(labels)}
    objective = RerankerObjective(record, "listwise", 3)
    options = OptimizerOptions(
        name="adamw",
        learning_rate=1e-3,
        schedule="constant",
        warmup=0.0,
        eps=1e-1,
        weight_decay=0.0,
        clip_norm=None,
    )
    got = our_updates(objective, model, options, [batch] * STEPS, lambda x: published(record, x))
    whole = made.model.double()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, eps=1e-1, weight_decay=0.0)

    def logit(number: int) -> torch.Tensor:
        ids = torch.tensor(arrays["ids"][number][arrays["mask"][number]].astype(np.int64))[None]
        more = {}
        if pictures := [n for _, n in pairs[number] if n is not None]:
            resized = [Image.fromarray(pixels[n]) for n in pictures]
            more = dict(made.processor(images=resized, do_resize=False, return_tensors="pt"))
        whole.model.rope_deltas = None
        states = whole.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == whole.config.image_token_id).int(),
            **more,
        ).last_hidden_state[0, -1]
        return states @ (whole.lm_head.weight[yes] - whole.lm_head.weight[no])

    for update in got:
        whole.zero_grad()
        logits = torch.stack([logit(number) for number in range(6)]).reshape(2, 3)
        wanted = torch.nn.functional.softmax(torch.tensor(labels).double(), dim=1)
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        loss.backward()
        assert abs(update.loss - loss.item()) < BOUND * max(1, abs(loss.item()))
        optimizer.step()
    assert got[0].loss - got[-1].loss > 1e-4
    for name, x in whole.named_parameters():
        if name in got[-1].parameters:
            want = x.detach().numpy()
            np.testing.assert_allclose(
                got[-1].parameters[name], want, rtol=0, atol=BOUND, err_msg=name
            )
    assert {name for name, _ in whole.named_parameters()} <= {*got[-1].parameters, "lm_head.weight"}


def published(record, state):
    """Parameters by the names of the published files."""
    source = record.tensors(state)
    return {name: source.read(name) for name in source.specs()}.items()


def reopened(peer, record, tensors, out) -> dict[str, torch.Tensor]:
    """Parameters of transformers' model, of a folder with these tensors."""
    shutil.copytree(peer.folder, out)
    save_file(dict(tensors), out / "model.safetensors", metadata={"format": "pt"})
    model = peer.reopened(out)
    return {name: x.detach() for name, x in model.named_parameters()}


def test_mode_pages_of_the_config(tmp_path):
    """configs/openstax/retriever.py:pages from a corpus to vectors, in the run and as exported."""
    pixels = {f"{n}.png": encoded(picture) for n, picture in enumerate(small_pictures())}
    sources = [Source(name, "image", "a flag", image=name) for name in pixels]
    asked = [
        Question(f"q{n}", "train", text, positives=(name,))
        for n, (text, name) in enumerate(zip(ASKED, pixels, strict=True))
    ]
    corpus = Corpus(sources, asked, pixels.__getitem__, fingerprint="flags")
    folder = make_published(tmp_path / "Qwen3-VL", "$A", "<|endoftext|>").folder
    values = {
        "init": str(folder), "data.dir": "flags", "batches.batch_size": 2, "batches.threads": 0,
        "train.steps": 3, "train.checkpoint_every": 3, "train.log_every": 1,
        "train.optimizer.learning_rate": 0.01, "train.optimizer.warmup": 0.0,
        "model.changes.dtype": "float32", "pictures.max_pixels": MOST,
        "batches.query_length": 40, "batches.source_lengths": (200,),
    }  # fmt: skip
    run = tmp_path / "run"
    run_training(load_config(f"{CONFIG}:pages", values), run, corpus=corpus)
    export_retrieval_run(run, tmp_path / "exported", overwrite=False)
    vectors = []
    for place in (run, tmp_path / "exported"):
        embedder, pictures = open_embedder(place, corpus)
        vectors.append(embedder.embed_rows(corpus, pictures, range(len(corpus))))
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-6)
    losses = [row["loss"] for _, row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0]
