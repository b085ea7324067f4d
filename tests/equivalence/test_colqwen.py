"""ColQwen 2, 2.5 and 3, jina-embeddings-v4 and Nemotron ColEmbed beside transformers' Qwen-VLs and a linear layer, float32.

transformers' own ColQwen2 gives the tokens of pictures the positions of text, unlike the model
that was trained; here it is handed those of its Qwen2-VL.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from compare import WHOLE
from qwen_vl_pair import SPECIAL, UNIT, save_torch
from qwen_vl_prompts import small_pictures
from safetensors.torch import load_file, save_file
from tiny_encoders import texts
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.schema import Question
from mmqa_jax.retrieval.embeddings import TokenFormat
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.max_sim import decoded
from mmqa_jax.retrieval.late_interaction import dense_retriever
from mmqa_jax.tasks.embedder import open_embedder
from tests.pictures import encoded
from tests.refusals import refuses

pytestmark = pytest.mark.slow

DIM = 20
PAGE = (
    "<|im_start|>user\n<|vision_start|>{}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
)
CASES = [
    ("qwen2_vl", "ColQwen2ForRetrieval"),
    ("qwen2_vl", "ColQwen2"),
    ("qwen2_5_vl", "ColQwen2_5"),
    ("qwen3_vl", "ColQwen3"),
    ("qwen3_5", "ColQwen3_5"),
    ("qwen2_5_vl", "JinaEmbeddingsV4Model"),
    ("qwen3_vl", "Qwen3VLNemotronEmbedModel"),
]
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUERIES = ["which flag?", " a\n", texts(400)[-1][:560]]


class Theirs:
    """A saved ColQwen, and transformers run on what its processor makes."""

    def __init__(self, case, name, folder):
        self.tokenizer = byte_tokenizer("$A", more=SPECIAL[2:])
        self.tokenizer.pad_token = "<|endoftext|>"
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = dict(zip(names, self.tokenizer.convert_tokens_to_ids(list(SPECIAL[2:])), strict=True))
        sizes = {"vocab_size": len(self.tokenizer) + 3, "max_position_embeddings": 4096}
        whole, self.processor = save_torch(case, folder, sizes, **ids)
        self.model, self.image, self.folder = whole.model.eval(), ids["image_token_id"], folder
        torch.manual_seed(3)
        self.linear = torch.nn.Linear(48, DIM)
        self.of_transformers = name.endswith("Retrieval")
        self.of_jina = name.startswith("Jina")
        self.of_nemotron = "Nemotron" in name
        if self.of_transformers:
            config = transformers.ColQwen2Config(vlm_config=whole.config, embedding_dim=DIM)
            self.col = transformers.ColQwen2ForRetrieval(config).eval()
            self.col.vlm.load_state_dict(self.model.state_dict())
            self.col.embedding_proj_layer.load_state_dict(self.linear.state_dict())
            self.col.save_pretrained(folder)
        else:
            tensors = {key: x.contiguous() for key, x in self.model.state_dict().items()}
            linear = {f"custom_text_proj.{key}": x for key, x in self.linear.state_dict().items()}
            linear = {} if self.of_nemotron else linear
            save_file(tensors | linear, folder / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((folder / "config.json").read_text())
            if self.of_nemotron:
                config |= {"model_type": "qwen3_vl_nemotron_embed", "pooling": "colbert"}
            (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        if self.of_jina:
            self.with_adapters(folder)
        self.tokenizer.save_pretrained(folder)

    def with_adapters(self, folder):
        """The layout of jina-embeddings-v4; torch's linears get W + alpha / r B A of one task."""
        config = json.loads((folder / "config.json").read_text())
        config |= {"single_vector_pool_strategy": "mean", "task_names": ["retrieval", "code"]}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        for part in ("weight", "bias"):
            linear = tensors.pop(f"custom_text_proj.{part}")
            tensors[f"multi_vector_projector.{part}"] = linear
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        ends, rank, added = ("q_proj", "v_proj", "down_proj"), 2, {}
        linears = dict(self.model.named_modules()) | {"multi_vector_projector": self.linear}
        for name, linear in linears.items():
            if not name.endswith((*ends, "projector")):
                continue
            for task in ("retrieval", "code"):
                a = torch.randn(rank, linear.in_features) * 0.2
                b = torch.randn(linear.out_features, rank) * 0.2
                within = name if name.endswith("projector") else f"model.{name}"
                stem = f"base_model.model.{within}.lora_"
                added |= {f"{stem}A.{task}.weight": a, f"{stem}B.{task}.weight": b}
                if task == "retrieval":
                    linear.weight.data += 3 / rank * (b @ a)
        (folder / "adapters").mkdir()
        save_file(added, folder / "adapters" / "adapter_model.safetensors")
        (folder / "adapters" / "adapter_config.json").write_text(
            json.dumps(
                {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "base_model_name_or_path": "b"}
            )
        )

    def vectors(self, text, picture=None) -> np.ndarray:
        given = {}
        if picture is not None:
            given = dict(self.processor(images=[picture.convert("RGB")], return_tensors="pt"))
            count = int(given["image_grid_thw"].prod(-1)) // 4
            text = PAGE.format("<|image_pad|>" * count)
            if self.of_jina:
                text = text.replace("<|endoftext|>", "\n")
        if self.of_nemotron:
            text = (
                TURN.format(text.partition("user\n")[2].partition("Describe")[0] + "passage: ")
                if given
                else TURN.format(text)
            )
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        kinds = (ids == self.image).int()
        self.model.rope_deltas = None
        with torch.no_grad():
            states = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **given
            ).last_hidden_state[0]
            self.ids, self.states = ids[0], states
            made = torch.nn.functional.normalize(self.linear(states), dim=-1)
            if self.of_nemotron:
                return self.seeing_both(ids, kinds, given)
            if self.of_transformers:
                places, _ = self.model.get_rope_index(
                    ids,
                    mm_token_type_ids=kinds,
                    image_grid_thw=given.get("image_grid_thw"),
                    attention_mask=torch.ones_like(ids),
                )
                if picture is not None:
                    given["pixel_values"] = given["pixel_values"][None]
                self.col.vlm.rope_deltas = None
                again = self.col(ids, torch.ones_like(ids), position_ids=places, **given)
                np.testing.assert_allclose(again.embeddings[0], made, **WHOLE)
        return made.numpy()

    def seeing_both(self, ids, kinds, given) -> np.ndarray:
        """Vectors of the last layer's states, before the norm, without a causal mask."""
        places, _ = self.model.get_rope_index(
            ids,
            mm_token_type_ids=kinds,
            image_grid_thw=given.get("image_grid_thw"),
            attention_mask=torch.ones_like(ids),
        )
        states = []
        last = self.model.language_model.layers[-1]
        hook = last.register_forward_hook(lambda layer, inputs, out: states.append(out))
        mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        self.model(input_ids=ids, attention_mask=mask, position_ids=places, **given)
        hook.remove()
        return torch.nn.functional.normalize(states[0][0], dim=-1).numpy()

    def question(self, text) -> np.ndarray:
        if self.of_nemotron:
            return self.vectors(f"Query: query: {text}")
        if self.of_jina:
            return self.vectors(f"Query: {text}")
        text = f"Query: {text}" if self.of_transformers else text
        ending = "\n" if self.of_transformers else ""
        return self.vectors(f"{text}{'<|endoftext|>' * 10}{ending}")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[1])
def theirs(request, tmp_path_factory):
    return Theirs(*request.param, tmp_path_factory.mktemp("colqwen") / "model")


def corpus_with_pages():
    pages = [encoded(picture) for picture in small_pictures()]
    return corpus_of_lists(
        [texts(300)[-1], "a b", "", "a flag", "b"], None, [None, None, *pages], None
    )


def test_tokens_of_questions_and_pages(theirs, tmp_path):
    corpus = corpus_with_pages()
    ours, pictures = open_embedder(theirs.folder, corpus, {"batch_size": 2})
    ours.store_tokens(TokenFormat("float16"))
    found = {}
    for places, fixed, tokens in ours.encode_tokens(QUERIES, "query"):
        assert fixed.shape == (len(places), ours.dim)
        found |= dict(zip(places, tokens, strict=True))
    want = [theirs.question(text) for text in QUERIES]
    assert max(map(len, want)) > 500
    for row, vectors in enumerate(want):
        np.testing.assert_allclose(found[row], vectors, **WHOLE)
    embeddings = ours.embed_sources(corpus, pictures, tmp_path / "index")
    pages = []
    for source, codes in zip(corpus.sources, embeddings.tokens.rows(range(5)), strict=True):
        if source.modality == "image":
            pages.append(theirs.vectors(None, small_pictures()[len(pages)]))
            vectors = pages[-1]
        else:
            before = "Passage: " * theirs.of_jina + "passage: " * theirs.of_nemotron
            vectors = theirs.vectors(before + source.text)
        got = decoded(ours._stored_tokens[0], codes, ours.token_dim)
        np.testing.assert_allclose(got, vectors, atol=4e-4)  # float16
    for stored in (embeddings, dataclasses.replace(embeddings, tokens=None)):
        retriever = dense_retriever(corpus, ours, ExactIndex(stored), pictures)
        (ranking,) = retriever.search([Question("0", "", QUERIES[0])], 5)
        rows = [corpus.row[name] for name in ranking.sources]
        scores = dict(zip(rows, ranking.scores, strict=True))
        for row, page in enumerate(pages):
            score, error = (want[0] @ page.T).max(1).sum(), len(want[0]) * 2**-11  # float16
            np.testing.assert_allclose(scores[row + 2], score, atol=error)


def test_one_vector_of_jina(tmp_path):
    """The mean of a text's tokens, of a page those of its picture and of the marks around it."""
    theirs = Theirs("qwen2_5_vl", "JinaEmbeddingsV4Model", tmp_path / "model")
    file = theirs.folder / "config.json"
    content = json.loads(file.read_text()) | {"architectures": ["JinaEmbeddingsV4Single"]}
    file.write_text(json.dumps(content))
    corpus = corpus_with_pages()
    ours, pictures = open_embedder(theirs.folder, corpus, {"batch_size": 2})

    def wanted(text, picture=None):
        theirs.vectors(text, picture)
        states = theirs.states
        if picture is not None:
            first, last = (SPECIAL.index(f"<|vision_{end}|>") for end in ("start", "end"))
            marks = theirs.tokenizer.convert_tokens_to_ids([SPECIAL[first], SPECIAL[last]])
            begin, end = (theirs.ids.tolist().index(mark) for mark in marks)
            states = states[begin : end + 1]
        return torch.nn.functional.normalize(states.mean(0), dim=0).numpy()

    got = ours.embed_rows(corpus, pictures, range(5))
    shown = iter(small_pictures())
    want = [
        wanted(None, next(shown))
        if source.modality == "image"
        else wanted(f"Passage: {source.text}")
        for source in corpus.sources
    ]
    np.testing.assert_allclose(got, want, **WHOLE)
    want = [wanted(f"Query: {text}") for text in QUERIES]
    np.testing.assert_allclose(ours.embed_questions(QUERIES), want, **WHOLE)


def test_processor_of_transformers_writes_the_same_prompts(theirs):
    if not theirs.of_transformers:
        pytest.skip("colpali_engine is not here")
    processor = transformers.ColQwen2Processor(theirs.processor, theirs.tokenizer)
    ours, _ = open_embedder(theirs.folder, corpus_of_lists(["a"], None, None, None))
    for text, prompt in zip(QUERIES, ours.writer.questions(QUERIES), strict=True):
        (ids,) = processor.process_queries([text])["input_ids"]
        assert list(prompt.tokens) == ids.tolist()
    picture = small_pictures()[0]
    ids = processor.process_images([picture])["input_ids"][0].tolist()
    height, width = smart_resize(picture.height, picture.width, UNIT, 1600, 136 * 136)
    (prompt,) = ours.writer.sources([""], [np.zeros((height, width, 3), np.uint8)])
    once = [x for n, x in enumerate(ids) if x != theirs.image or ids[n - 1] != theirs.image]
    assert list(prompt.tokens) == once


@pytest.mark.parametrize(
    ("change", "message"),
    [("projection", "lacks embedding_proj_layer"), ("key", "'pooled'")],
)
def test_folders_that_are_refused(change, message, tmp_path):
    folder = tmp_path / "model"
    Theirs("qwen2_vl", "ColQwen2ForRetrieval", folder)
    if change == "projection":
        tensors = load_file(folder / "model.safetensors")
        left = {key: x for key, x in tensors.items() if "proj_layer" not in key}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"pooled": True}))
    refuses(message, open_embedder, folder, corpus_of_lists(["a"], None, None, None))
