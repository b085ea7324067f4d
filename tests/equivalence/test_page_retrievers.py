"""ColPali, ColIdefics3, ColModernVBERT, ColGemma and their single-vector kin beside transformers'
models and a linear layer, float32.

colpali_engine is not here: its prompts and heads are written here again, as of its commit 9be8f19.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from compare import LAYER, randomize
from qwen_vl_prompts import small_pictures
from safetensors.torch import load_file, save_file
from tiny_encoders import texts
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmqa_jax.data.corpus import corpus_of_lists
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.retrieval.page_embedder import PageEmbedder, page_matches
from mmqa_jax.runs.reports.row import MATCHES, write_row_matches
from mmqa_jax.tasks.embedder import open_embedder
from tests.pictures import encoded
from tests.refusals import refuses

pytestmark = pytest.mark.slow

DIM, SIDE, PATCH, WIDTH = 20, 24, 4, 48
AROUND = ("<start_of_image>", "<end_of_image>")
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
MARKS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS),
    *("<bos>", "<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>", *AROUND),
)
TEXT = {
    "hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 2500, "rms_norm_eps": 2e-5,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 5,
    "image_size": SIDE, "patch_size": PATCH, "layer_norm_eps": 3e-5,
}  # fmt: skip
SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
QUESTIONS = ["which flag?", " a\n", texts(400)[-1][:560]]
SOURCES = [texts(300)[-1], "a b", "", "a flag", "b"]


def paligemma(image: int, words: int) -> Any:
    return transformers.PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma", "head_dim": 12, "vocab_size": words},
        vision_config=SIGLIP,
        image_token_index=image,
        projection_dim=WIDTH,
        attn_implementation="eager",
    )


def idefics3(image: int, words: int) -> Any:
    return transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama", "vocab_size": words},
        vision_config=VISION,
        image_token_id=image,
        scale_factor=2,
        attn_implementation="eager",
    )


def gemma3(image: int, words: int) -> Any:
    sizes = {"head_dim": 12, "vocab_size": words, "sliding_window": 11, "sliding_window_pattern": 2}
    return transformers.Gemma3Config(
        text_config=TEXT | sizes,
        vision_config=SIGLIP,
        mm_tokens_per_image=9,
        boi_token_index=image + MARKS.index(AROUND[0]),
        eoi_token_index=image + MARKS.index(AROUND[1]),
        image_token_index=image,
        attn_implementation="eager",
    )


def modernvbert(image: int, words: int) -> Any:
    text = {
        "vocab_size": words, "hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": 4,
        "num_attention_heads": 6, "max_position_embeddings": 2500, "local_attention": 30,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0,
        "sep_token_id": 0,
    }  # fmt: skip
    return transformers.ModernVBertConfig(
        text_config=text, vision_config=SIGLIP, image_token_id=image, pixel_shuffle_factor=2
    )


def tiles() -> Any:
    sizes = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    return Idefics3ImageProcessorPil(**sizes)


def square(kind: type) -> Any:
    return kind(size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of retrievers: its config, processor of pictures, prompts, and what it makes."""

    config: Callable[[int, int], Any]
    pictures: Callable[[], Any]
    page: str
    question: str
    source: str = "{}"
    prefix: str = "model."
    linear: str = "custom_text_proj"
    pooling: str = ""
    strips: bool = False


PALI = Case(
    paligemma,
    lambda: square(SiglipImageProcessorPil),
    "{}<bos><bos>Describe the image.\n",
    "<bos>{}" + 10 * "<pad>",
    "<bos>{}",
    prefix="model.model.",
)
IDEFICS3 = Case(
    idefics3,
    tiles,
    "<|im_start|>User:{}Describe the image.<end_of_utterance>\nAssistant:",
    "{}" + 10 * "<end_of_utterance>",
    linear="linear",
)
MODERNVBERT = dataclasses.replace(
    IDEFICS3,
    config=modernvbert,
    page="<|begin_of_text|>User:{}Describe the image.<end_of_utterance>\nAssistant:",
    linear="custom_text_proj",
)
TURN = "<bos><start_of_turn>user\n{}<end_of_turn>\n"
GEMMA3 = Case(
    gemma3,
    lambda: square(Gemma3ImageProcessorPil),
    TURN.format("\n\n<start_of_image>{}<end_of_image>\n\nDescribe this image"),
    TURN.format("Query: {}"),
    TURN.format("Query: {}"),
    prefix="",
    strips=True,
)
REPLACE = dataclasses.replace
CASES = {
    "ColPaliForRetrieval": REPLACE(
        PALI,
        page="{}<bos>Describe the image.\n",
        question="<bos>Question: {}" + 10 * "<pad>" + "\n",
        linear="embedding_proj_layer",
    ),
    "ColPali": PALI,
    "BiPaliProj": REPLACE(PALI, pooling="mean"),
    "ColIdefics3": IDEFICS3,
    "BiIdefics3": REPLACE(IDEFICS3, linear="", pooling="last"),
    "ColModernVBertForRetrieval": REPLACE(MODERNVBERT, linear="embedding_proj_layer"),
    "BiModernVBert": REPLACE(MODERNVBERT, linear="", pooling="mean"),
    "ColGemma3": GEMMA3,
    "BiGemma3": REPLACE(
        GEMMA3,
        question=TURN.format("Query: {}" + 10 * "<eos>"),
        linear="",
        pooling="last",
        strips=False,
    ),
}


class Theirs:
    """A saved retriever, and transformers run on its prompts."""

    def __init__(self, name, folder):
        self.case = case = CASES[name]
        self.tokenizer = byte_tokenizer("$A", more=MARKS)
        self.tokenizer.pad_token = "<pad>"
        self.image = self.tokenizer.convert_tokens_to_ids("<image>")
        config = case.config(self.image, len(self.tokenizer) + 3)
        self.wrapped = name.endswith("ForRetrieval")
        torch.manual_seed(3)
        if self.wrapped:
            kind = getattr(transformers, name)
            whole = kind(kind.config_class(vlm_config=config, embedding_dim=DIM))
            self.whole = randomize(whole, 0, 0.05)
            self.model, self.linear = whole.vlm, whole.embedding_proj_layer
            whole.save_pretrained(folder)
        else:
            self.model = randomize(transformers.AutoModel.from_config(config), 0, 0.05)
            self.linear = torch.nn.Linear(WIDTH, DIM) if case.linear else torch.nn.Identity()
            config.save_pretrained(folder)
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [name]}))
            tensors = {case.prefix + key: x for key, x in self.model.state_dict().items()}
            layer = self.linear.state_dict().items()
            tensors |= {f"{case.linear}.{key}": x for key, x in layer}
            tensors = {key: x.contiguous() for key, x in tensors.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self.processor = case.pictures()
        self.processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.folder = folder

    def picture(self, picture) -> tuple[str, dict[str, torch.Tensor]]:
        """What stands for a picture in a prompt, and its pixels."""
        if not isinstance(self.processor, Idefics3ImageProcessorPil):
            pixels = self.processor(picture.convert("RGB"), return_tensors="pt")["pixel_values"]
            return "<image>" * (9 if self.case.config is gemma3 else 36), {"pixel_values": pixels}
        made = self.processor(
            [[picture.convert("RGB")]], return_tensors="pt", return_row_col_info=True
        )
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        around, tile, text = "<fake_token_around_image>", "<image>" * 9, ""
        for row in range(rows):
            for column in range(columns):
                text += f"{around}<row_{row + 1}_col_{column + 1}>{tile}"
            text += "\n"
        text += "\n" if rows else ""
        pixels = {"pixel_values": made["pixel_values"]}
        return f"{text}{around}<global-img>{tile}{around}", pixels

    def ids(self, text: str) -> list[int]:
        first = self.tokenizer.bos_token_id
        ids = self.tokenizer(text)["input_ids"]
        return ids if first is None else [first, *ids]

    def vectors(self, text: str, pixels: dict[str, torch.Tensor] | None = None) -> np.ndarray:
        case, ids = self.case, torch.tensor([self.ids(text) or [self.tokenizer.pad_token_id]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **(pixels or {})}
        if case.config is paligemma:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        if case.config is gemma3:
            inputs["token_type_ids"] = (ids == self.image).long()
        with torch.no_grad():
            if self.wrapped:
                return self.whole(**inputs).embeddings[0].numpy()
            states = self.model(**inputs).last_hidden_state[0]
            if case.pooling:
                states = states.mean(0) if case.pooling == "mean" else states[-1]
            return torch.nn.functional.normalize(self.linear(states), dim=-1).numpy()

    def question(self, text: str) -> np.ndarray:
        return self.vectors(self.case.question.format(self.stripped(text)))

    def stripped(self, text: str) -> str:
        return text.rstrip() if self.case.strips else text

    def source(self, text: str, picture: Any = None) -> np.ndarray:
        if picture is None:
            return self.vectors(self.case.source.format(self.stripped(text)))
        written, pixels = self.picture(picture)
        return self.vectors(self.case.page.format(written), pixels)


@pytest.fixture(scope="module", params=CASES)
def theirs(request, tmp_path_factory):
    return Theirs(request.param, tmp_path_factory.mktemp(request.param) / "model")


def corpus_with_pages():
    pages = [encoded(picture) for picture in small_pictures()]
    return corpus_of_lists(SOURCES, None, [None, None, *pages], None)


def test_vectors_of_questions_texts_and_pages(theirs):
    corpus = corpus_with_pages()
    ours, pictures = open_embedder(theirs.folder, corpus, {"batch_size": 2})
    asked = [theirs.question(text) for text in QUESTIONS]
    shown = [None, None, *small_pictures()]
    wanted = [theirs.source(*pair) for pair in zip(SOURCES, shown, strict=True)]
    if isinstance(ours, PageEmbedder):
        np.testing.assert_allclose(ours.embed_questions(QUESTIONS), asked, **LAYER)
        rows = [corpus.row[source.id] for source in corpus.sources]
        np.testing.assert_allclose(ours.embed_rows(corpus, pictures, rows), wanted, **LAYER)
        return
    vectors = {}
    for places, _, tokens in ours.encode_tokens(QUESTIONS, "query"):
        vectors |= dict(zip(places, tokens, strict=True))
    assert max(map(len, asked)) > 500
    for row, want in enumerate(asked):
        np.testing.assert_allclose(vectors[row], want, **LAYER)
    of_sources = ours.embed_source_tokens(corpus, pictures, range(len(SOURCES)))
    for vectors, want in zip(of_sources, wanted, strict=True):
        np.testing.assert_allclose(vectors, want, **LAYER)


@pytest.mark.parametrize("name", ["ColPaliForRetrieval", "ColIdefics3"])
def test_matches_are_products_at_the_places_of_a_page(name, tmp_path):
    theirs, corpus = Theirs(name, tmp_path / "model"), corpus_with_pages()
    ours, pictures = open_embedder(theirs.folder, corpus)
    asked = theirs.question("a flag")
    for row, picture in enumerate(small_pictures()):
        made = page_matches(ours, "a flag", pictures.pixels(row + 2))
        written, _ = theirs.picture(picture)
        ids = np.array(theirs.ids(theirs.case.page.format(written)))
        of_picture = theirs.source("", picture)[ids == theirs.image]
        np.testing.assert_allclose(made.similarity, asked @ of_picture.T, **LAYER)
        words = [
            token for token, is_word in zip(made.tokens, made.are_words, strict=True) if is_word
        ]
        assert "".join(words) in ("aĠflag", "Question:ĠaĠflagĊ")  # without a decoder
        tiles = len(of_picture) // 9
        covered = made.boxes if name != "ColIdefics3" or tiles == 1 else made.boxes[: 9 * tiles - 9]
        middles = (covered[:, :2] + covered[:, 2:]) / 2  # each point of a grid is in one box
        points = np.stack(np.meshgrid(*2 * [np.linspace(0.03, 0.97, 23)]), -1).reshape(-1, 1, 2)
        inside = ((covered[:, :2] <= points) & (points < covered[:, 2:])).all(-1).sum(1)
        assert (inside == 1).all()
        assert (middles[0] < 0.2).all()
        assert (covered[-1, 2:] == 1).all()
        if "<row_1_col_2>" in written:  # tile by tile: the second tile is right of the first
            assert middles[9, 0] > middles[8, 0]
            assert middles[9, 1] == middles[0, 1]
        best = {token["token"]: token for token in made.rows()}["f"]
        number = made.similarity[made.tokens.index("f")].argmax()
        np.testing.assert_allclose(best["box"], made.boxes[number], atol=1e-4)
        drawn = np.asarray(made.drawn_on(picture))
        assert drawn.shape == (picture.height, picture.width, 3)
        assert (drawn == (0, 0, 255)).all(-1).any()
    # A row that retrieves with it has them beside its report.
    retriever = types.SimpleNamespace(embedder=ours, pictures=pictures, corpus=corpus)
    page = corpus.sources[2].id
    row = (
        [Question("q", "test", "a flag")],
        [Prediction("q", sources=(page,), source_scores=(1.0,))],
    )
    write_row_matches(tmp_path, "row", *row, (), [object()])
    assert not (tmp_path / MATCHES).exists()
    found = [Ranking("q", (page,), (1.0,))]
    for parts, candidates in (([retriever], ()), ([types.SimpleNamespace(dense=retriever)], found)):
        write_row_matches(tmp_path, "row", *row, candidates, parts)
        written = (tmp_path / MATCHES).read_text()
        assert f"<p>{page}</p>" in written
        assert "data:image" in written
        (tmp_path / MATCHES).unlink()


@pytest.mark.parametrize("name", ["ColPaliForRetrieval", "ColModernVBertForRetrieval"])
def test_processors_of_transformers_write_the_same_prompts(name, tmp_path):
    theirs = Theirs(name, tmp_path / "model")
    ours, _ = open_embedder(theirs.folder, corpus_of_lists(["a"], None, None, None))
    if name == "ColPaliForRetrieval":
        theirs.tokenizer.bos_token, theirs.tokenizer.image_token = "<bos>", "<image>"
        theirs.tokenizer.image_token_id = theirs.image
        theirs.processor.image_seq_length = 36
        processor = transformers.ColPaliProcessor(theirs.processor, theirs.tokenizer)
    else:
        processor = transformers.ColModernVBertProcessor(
            theirs.processor, theirs.tokenizer, image_seq_len=9
        )
    for text, prompt in zip(QUESTIONS, ours.writer.questions(QUESTIONS), strict=True):
        (ids,) = processor.process_queries([text])["input_ids"]
        assert list(prompt.tokens) == ids.tolist()
    for row, picture in enumerate(small_pictures()):
        ids = processor.process_images([picture])["input_ids"][0].tolist()
        corpus = corpus_with_pages()
        _, pictures = open_embedder(theirs.folder, corpus)
        (prompt,) = ours.writer.sources([""], [pictures.pixels(row + 2)])
        count = 36 if name == "ColPaliForRetrieval" else 9
        repeated = [[x] * (count if x == theirs.image else 1) for x in prompt.tokens]
        assert [x for run in repeated for x in run] == ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("projection", "lacks linear"),
        ("mark", "the tokenizer lacks <end_of_utterance>"),
        ("model", "on a model of type 'opt'"),
    ],
)
def test_folders_that_are_refused(change, message, tmp_path):
    folder = tmp_path / "model"
    Theirs("ColIdefics3", folder)
    if change == "projection":
        tensors = load_file(folder / "model.safetensors")
        left = {key: x for key, x in tensors.items() if not key.startswith("linear")}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    elif change == "mark":
        marks = [mark for mark in MARKS if mark != "<end_of_utterance>"]
        byte_tokenizer("$A", more=[*marks, "<other>"]).save_pretrained(folder)
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "opt"}))
    refuses(message, open_embedder, folder, corpus_of_lists(["a"], None, None, None))
