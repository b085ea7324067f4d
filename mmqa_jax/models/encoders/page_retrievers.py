"""Retrievers that see pages, as colpali_engine and transformers publish them: one entry a class.

An entry says which texts stand around a page and a question, and what is made of the tokens'
states: a vector for each, or one of all. The model that reads the prompts is a Qwen-VL, a decoder
behind a tower (PaliGemma, Idefics3, Gemma 3), or ModernVBERT.
Originals: illuin-tech/colpali colpali_engine/models, transformers models/colpali, colqwen2 and
colmodernvbert.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.encoders import heads
from mmqa_jax.models.encoders.text_encoders import CONFIG, for_reading_prompts, headless_key_map
from mmqa_jax.models.llama.keys import Fused
from mmqa_jax.models.llava.families import FAMILIES as TOWERED
from mmqa_jax.models.llava.keys import llava_key_map, open_llava, read_llava_config
from mmqa_jax.models.modernbert.keys import modernbert_fused
from mmqa_jax.models.modernvbert import network as modernvbert
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.qwen_vl.keys import PUBLISHED as QWEN_VL
from mmqa_jax.models.qwen_vl.keys import open_qwen_vl, read_qwen_vl_config
from mmqa_jax.weights.adapters import with_task
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import KeyMap, Transform, linear_rules
from mmqa_jax.weights.layouts import Checkpoint
from mmqa_jax.weights.published import load_checkpoint

PICTURE, TEXT = "{picture}", "{text}"  # their places in a prompt


@dataclasses.dataclass(frozen=True)
class PageRetriever:
    """How one class of retrievers makes vectors."""

    title: str  # what people call it
    # page, question, source: the prompts of a page, a question and a text that is searched.
    page: str
    question: str
    source: str = TEXT
    # What becomes of the tokens' states: one of POOLINGS, or `heads.OF_PICTURE`; "": a vector for
    # each.
    pooling: str = ""
    # Of its tensors, the linear layer over states; "": there is none.
    projection: str = "custom_text_proj"
    around: bool = True  # whether the tokenizer's own tokens stand around a prompt, too
    strips: bool = False  # whether the text loses the blanks at its end
    # Marks that are plain text where the tokenizer has no such token.
    optional: tuple[str, ...] = ()
    # Whose additions in the folder `adapters` are put into its linears; "": there are none.
    task: str = ""
    unused: tuple[str, ...] = ()  # patterns of tensors that another class in the same files reads
    harmless: tuple[str, ...] = ()  # keys of its config.json beside those of the model that reads
    model_type: str = ""  # of that model, where its config.json has one of its own; "": it has none
    # Whether tokens see what follows them, and their states are those before the last norm, of
    # which a vector of length 1 knows its scale alone.
    sees_both: bool = False


def _single(retriever: PageRetriever, title: str, **changes: Any) -> PageRetriever:
    """The same with one vector of a prompt, of its last token if `changes` do not say it."""
    usual = {"pooling": "lasttoken", "projection": ""}
    return dataclasses.replace(retriever, title=title, **{**usual, **changes})


_QWEN = PageRetriever(
    title="ColQwen",
    page=f"<|im_start|>user\n<|vision_start|>{PICTURE}<|vision_end|>"
    "Describe the image.<|im_end|><|endoftext|>",
    question=TEXT + 10 * "<|endoftext|>",
)
_PALI = PageRetriever(
    title="ColPali",
    # transformers' processor of PaliGemma puts a <bos> behind the picture where there is one.
    page=f"{PICTURE}<bos><bos>Describe the image.\n",
    question=f"<bos>{TEXT}" + 10 * "<pad>",
    source=f"<bos>{TEXT}",
    around=False,
)
_IDEFICS3 = PageRetriever(
    title="ColIdefics3, ColSmol",
    page=f"<|im_start|>User:{PICTURE}Describe the image.<end_of_utterance>\nAssistant:",
    question=TEXT + 10 * "<end_of_utterance>",
    projection="linear",
)
_MODERNVBERT = dataclasses.replace(
    _IDEFICS3,
    title="ColModernVBERT",
    page=f"<|begin_of_text|>User:{PICTURE}Describe the image.<end_of_utterance>\nAssistant:",
    projection="custom_text_proj",
    optional=("<|begin_of_text|>",),
)
_GEMMA3 = PageRetriever(
    title="ColGemma 3 (ColNetraEmbed)",
    page=f"<bos><start_of_turn>user\n{PICTURE}Describe this image<end_of_turn>\n",
    question=f"<bos><start_of_turn>user\nQuery: {TEXT}<end_of_turn>\n",
    source=f"<bos><start_of_turn>user\nQuery: {TEXT}<end_of_turn>\n",
    strips=True,
)
_JINA_V4 = PageRetriever(
    title="jina-embeddings-v4",
    page=f"<|im_start|>user\n<|vision_start|>{PICTURE}<|vision_end|>"
    "Describe the image.<|im_end|>\n",
    question=f"Query: {TEXT}",
    source=f"Passage: {TEXT}",
    projection="multi_vector_projector",
    task="retrieval",
    harmless=(
        *("single_vector_pool_strategy", "multi_vector_projector_dim", "matryoshka_dims"),
        *("pretrained_peft_model_name_or_path", "verbosity", "task_names", "truncate_dim"),
    ),
)
_TURN = "<|im_end|>\n<|im_start|>assistant\n"
_NEMOTRON = PageRetriever(
    title="Nemotron ColEmbed v2",
    page=f"<|im_start|>user\n<|vision_start|>{PICTURE}<|vision_end|>passage: {_TURN}",
    question=f"<|im_start|>user\nQuery: query: {TEXT}{_TURN}",
    source=f"<|im_start|>user\npassage: {TEXT}{_TURN}",
    projection="",
    harmless=("pooling",),
    model_type="qwen3_vl",
    sees_both=True,
)
_ONES = Transform(lambda x: x * 0 + 1, None)
_OF_TRANSFORMERS = "embedding_proj_layer"
# By an entry of `architectures` in config.json.
RETRIEVERS: Mapping[str, PageRetriever] = {
    "ColPali": _PALI,
    "ColPaliForRetrieval": dataclasses.replace(
        _PALI,
        title="ColPali, of transformers",
        page=f"{PICTURE}<bos>Describe the image.\n",
        question=f"<bos>Question: {TEXT}" + 10 * "<pad>" + "\n",
        projection=_OF_TRANSFORMERS,
    ),
    "BiPali": _single(_PALI, "BiPali", pooling="mean"),
    "BiPaliProj": _single(_PALI, "BiPali", pooling="mean", projection="custom_text_proj"),
    "ColIdefics3": _IDEFICS3,
    "BiIdefics3": _single(_IDEFICS3, "BiIdefics3"),
    "ColModernVBert": _MODERNVBERT,
    "ColModernVBertForRetrieval": dataclasses.replace(_MODERNVBERT, projection=_OF_TRANSFORMERS),
    "BiModernVBert": _single(_MODERNVBERT, "BiModernVBERT", pooling="mean"),
    **dict.fromkeys(("ColQwen2", "ColQwen2_5", "ColQwen3", "ColQwen3_5"), _QWEN),
    "ColQwen2ForRetrieval": dataclasses.replace(
        _QWEN,
        title="ColQwen, of transformers",
        question=f"Query: {TEXT}" + 10 * "<|endoftext|>" + "\n",
        projection=_OF_TRANSFORMERS,
    ),
    **dict.fromkeys(("BiQwen2", "BiQwen2_5", "BiQwen3", "BiQwen3_5"), _single(_QWEN, "BiQwen")),
    "JinaEmbeddingsV4Model": _JINA_V4,
    "JinaEmbeddingsV4Single": _single(
        _JINA_V4,
        "jina-embeddings-v4 with one vector",
        pooling=heads.OF_PICTURE,
        unused=(r"^multi_vector_projector\.",),
    ),
    "Qwen3VLNemotronEmbedModel": _NEMOTRON,
    "ColGemma3": _GEMMA3,
    "BiGemma3": _single(
        _GEMMA3,
        "BiGemma 3 (NetraEmbed)",
        question=f"<bos><start_of_turn>user\nQuery: {TEXT}" + 10 * "<eos>" + "<end_of_turn>\n",
        strips=False,
    ),
}
# The classes that transformers' own model types mean.
_MODEL_TYPES = {
    "colpali": "ColPaliForRetrieval",
    "colqwen2": "ColQwen2ForRetrieval",
    "colmodernvbert": "ColModernVBertForRetrieval",
}
_WRAPPER = kinds(object="vlm_config", size="embedding_dim", number="initializer_range")


def page_retriever(folder: Path) -> PageRetriever | None:
    """The entry of a published folder; None: it holds something else."""
    name = page_retriever_name(folder)
    return None if name is None else RETRIEVERS[name]


def page_retriever_name(folder: Path) -> str | None:
    """The name of that entry."""
    published = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(published, dict):
        return None
    classes = [_MODEL_TYPES.get(str(published.get("model_type")))]
    classes += published.get("architectures") or []
    return next((name for name in classes if name in RETRIEVERS), None)


class _Reader(NamedTuple):
    """A kind of models that read prompts."""

    # (folder, config of the model or None) -> its checkpoint.
    open: Callable[[Path, Mapping[str, Any] | None], Checkpoint]
    # (folder of the files of pictures, config of the model) -> ours.
    config: Callable[[Path, Mapping[str, Any]], Any]
    key_map: Callable[[Any], KeyMap]  # of a model without an output head
    # tokens, pooled: its classes with a vector for each token, and with one.
    tokens: type[nnx.Module]
    pooled: type[nnx.Module]
    # What its checkpoints keep as rows of one tensor.
    fused: Callable[[Any], Fused] = lambda config: {}


def _headless_llava(config: Any) -> KeyMap:
    tied = dataclasses.replace(config.llama, tied=True)
    of_llava = llava_key_map(dataclasses.replace(config, llama=tied))
    # Old versions of both have the language model with its head, and later the model, within.
    rename = (
        (r"^model\.(?=model\.|language_model\.(model|lm_head)\.|lm_head\.)", ""),
        *of_llava.rename,
        (r"^language_model\.(layers|embed_tokens|norm)\.", r"language_model.model.\1."),
    )
    ignore = (*of_llava.ignore, r"^language_model\.lm_head\.")
    return dataclasses.replace(of_llava, rename=rename, ignore=ignore, tied=())


_READERS = (
    (
        QWEN_VL,
        _Reader(
            open_qwen_vl,
            read_qwen_vl_config,
            headless_key_map,
            heads.QwenVLTokens,
            heads.QwenVLEncoder,
        ),
    ),
    (
        TOWERED,
        _Reader(
            lambda folder, published: open_llava(folder, published=published),
            read_llava_config,
            _headless_llava,
            heads.LlavaTokens,
            heads.LlavaEncoder,
        ),
    ),
    (
        (modernvbert.MODEL_TYPE,),
        _Reader(
            modernvbert.open_modernvbert,
            modernvbert.read_modernvbert_config,
            modernvbert.modernvbert_key_map,
            heads.ModernVBertTokens,
            heads.ModernVBertEncoder,
            lambda config: modernbert_fused(config.text),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class PageModel:
    """The model of a page retriever, as its published files describe it."""

    retriever: PageRetriever  # its entry
    published: Mapping[str, Any]  # its config.json
    folder: Path  # of the files that say how pictures are prepared, and of messages
    # The values behind the linear layer over states; None: there is no such layer.
    dim: int | None = None

    @property
    def of_vlm(self) -> Mapping[str, Any] | None:
        """The part of config.json that describes the model which reads; None: all of it."""
        published, where = self.published, str(self.folder / CONFIG)
        if harmless := self.retriever.harmless:
            of_vlm = {key: x for key, x in published.items() if key not in harmless}
            kind = self.retriever.model_type or published.get("model_type")
            return {**of_vlm, "model_type": kind}
        if published.get("model_type") not in _MODEL_TYPES:
            return None
        of_vlm = published.get("vlm_config")
        check_keys(published, where, read=_WRAPPER)
        if not isinstance(of_vlm, dict):
            raise UserError(f"{where}: lacks its vlm_config; fetch the file again.")
        if "text_config" in of_vlm:  # transformers writes the size there, too
            of_vlm = {key: x for key, x in of_vlm.items() if key != "vocab_size"}
        return of_vlm

    @property
    def reader(self) -> _Reader:
        """The kind of its model."""
        kind = (self.of_vlm or self.published).get("model_type")
        reader = next((reader for names, reader in _READERS if kind in names), None)
        if reader is None:
            raise UserError(
                f"{self.folder / CONFIG}: {self.retriever.title} on a model of type {kind!r} is "
                "not known here; use a checkpoint as it was published."
            )
        return reader

    def config(self) -> Any:
        """The model's sizes; decoders compute in bfloat16 on accelerators."""
        config = self.reader.config(self.folder, self.of_vlm or self.published)
        return _for_reading(config, self.retriever)

    def build(self, config: Any, *, rngs: nnx.Rngs) -> nnx.Module:
        """A freshly initialized model."""
        layer = {} if self.dim is None else {"dim": self.dim}
        if self.retriever.pooling:
            return self.reader.pooled(config, pooling=self.retriever.pooling, **layer, rngs=rngs)
        return self.reader.tokens(config, **layer, rngs=rngs)

    def key_map(self, config: Any) -> KeyMap:
        """Of the whole model."""
        of_reader, name = self.reader.key_map(config), self.retriever.projection
        if self.retriever.sees_both:
            of_reader = of_reader.with_transform("model.norm.weight", _ONES)
        rules = [*of_reader.rules, *(linear_rules(name, "projection") if name else ())]
        rename = ((r"^vlm\.", ""), *of_reader.rename)
        ignore = (*of_reader.ignore, *self.retriever.unused)
        return dataclasses.replace(of_reader, rules=rules, rename=rename, ignore=ignore)


def _for_reading(config: Any, retriever: PageRetriever) -> Any:
    if isinstance(config, ModernVBertConfig):
        return config
    config = for_reading_prompts(config, platform())
    if not retriever.sees_both:
        return config
    return dataclasses.replace(config, llama=dataclasses.replace(config.llama, bidirectional=True))


def load_page_retriever(folder: Path, retriever: PageRetriever, mesh: Mesh | None = None) -> Any:
    """The model in a folder, merged with its adapter; decoders compute in bfloat16 on accelerators.

    Args:
      folder: of transformers or colpali_engine.
      retriever: its entry.
      mesh: where the parameters go; None: the default device.
    """
    model, checkpoint = open_page_retriever(folder, retriever)
    config = checkpoint.config
    dtype = "float32" if isinstance(config, ModernVBertConfig) else config.llama.dtype
    return load_checkpoint(model.build, checkpoint, config, mesh, dtype)


def open_page_retriever(
    folder: Path, retriever: PageRetriever, *, new: int | None = None
) -> tuple[PageModel, Checkpoint]:
    """The model in a folder and its checkpoint, of which only headers have been read.

    new: the values of a linear layer that the folder lacks; None: it has the layer, if any.
    """
    model = PageModel(retriever, read_json(folder / CONFIG), folder)
    checkpoint = model.reader.open(folder, model.of_vlm)
    if retriever.task:
        source = with_task(checkpoint.source, folder / "adapters", retriever.task)
        checkpoint = checkpoint._replace(source=source)
    if name := retriever.projection:
        weight = checkpoint.source.specs().get(f"{name}.weight")
        if weight is None and new is None:
            raise UserError(
                f"{checkpoint.source.name}: lacks {name}, which makes a retriever's vectors; use a "
                "checkpoint that is merged with its adapter."
            )
        model = dataclasses.replace(model, dim=new if weight is None else weight.shape[0])
    config = _for_reading(checkpoint.config, retriever)
    return model, checkpoint._replace(config=config, key_map=model.key_map)
