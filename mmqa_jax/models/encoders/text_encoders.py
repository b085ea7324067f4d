"""Published encoders of texts and cross-encoders, opened from a folder of transformers.

To add a family that embeds texts: its config and key map in `models/FAMILY/`, and one entry here.
Qwen3-VL-Embedding and Qwen3-VL-Reranker are opened here, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.bert import keys as bert_keys
from mmqa_jax.models.bert import rotary
from mmqa_jax.models.bert.mpnet import MPNET_PADDING, MPNet, mpnet_config, mpnet_key_map
from mmqa_jax.models.bert.network import Bert
from mmqa_jax.models.common import comparison
from mmqa_jax.models.common.layers import Linear
from mmqa_jax.models.encoders import embedding_gemma
from mmqa_jax.models.encoders.heads import (
    CrossEncoder,
    Dense,
    QwenVLEncoder,
    QwenVLYesNo,
    TextDecoder,
    YesNoDecoder,
)
from mmqa_jax.models.encoders.sentence_pooling import ACTIVATIONS, DenseLayer
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.families import FAMILIES as DECODERS
from mmqa_jax.models.llama.keys import Fused, apart, fused_rows, llama_key_map, together
from mmqa_jax.models.modernbert import keys
from mmqa_jax.models.modernbert.network import ModernBert, ModernBertCrossEncoder
from mmqa_jax.models.qwen_vl.keys import open_qwen_vl, qwen_vl_key_map
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.hub import find_model, is_hub_name
from mmqa_jax.weights.keymap import KeyMap, untied_source
from mmqa_jax.weights.layouts import Checkpoint, open_source
from mmqa_jax.weights.published import load_checkpoint
from mmqa_jax.weights.record import is_weights_folder

CONFIG = "config.json"
_CLASSIFIER = "ForSequenceClassification"  # how the names of these architectures end


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of transformers."""

    # (config.json, its name for messages) -> our config.
    config: Callable[[Mapping[str, Any], str], Any]
    model: type[nnx.Module]  # the encoder's module
    key_map: Callable[[Any], KeyMap]  # of the encoder
    # Key map of its classifier of sequences and `cross_encoder`; None: there is none.
    classifier: Callable[[Any], KeyMap] | None = None
    cross_encoder: type[nnx.Module] = CrossEncoder  # the module of a cross-encoder
    # What its checkpoints keep as rows of one tensor.
    fused: Callable[[Any], Fused] = lambda config: {}
    # (key of the key map, whether of a classifier) -> that of a checkpoint.
    name: Callable[[str, bool], str] = lambda key, classifier: key
    # config.json -> the token that transformers gives no position of its own, wherever it stands;
    # None: every token has one.
    unplaced: Callable[[Mapping[str, Any]], int | None] = lambda published: None


def for_reading(config: LlamaConfig, device: str) -> LlamaConfig:
    """The config of a decoder that reads texts, long ones too, on devices of a platform.

    On accelerators it computes in bfloat16, its published precision, and attention's memory is
    linear in the length.
    """
    if device == "cpu":
        return config
    attention = "cudnn" if device == "gpu" else "blocks"
    return dataclasses.replace(config, dtype="bfloat16", attention=attention)


def _decoder_config(published: Mapping[str, Any], where: str) -> LlamaConfig:
    config = LlamaConfig.from_hf(published, where)
    if config.experts:
        raise UserError(
            f"{where}: num_experts is {config.experts}: a mixture of experts writes texts here and "
            "encodes none; use an encoder without experts."
        )
    return for_reading(config, platform())


# transformers' defaults of EuroBERT where they are not LLaMA's.
_EUROBERT = {
    **{"vocab_size": 128256, "hidden_size": 768, "intermediate_size": 3072},
    **{"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 8192},
    "rms_norm_eps": 1e-5,
}


def _eurobert_config(published: Mapping[str, Any], where: str) -> LlamaConfig:
    """EuroBERT (Boizard et al. 2025): a LLaMA whose tokens see both ways. It writes no texts, so
    that it is no entry of `llama.families`."""
    of_llama = {**_EUROBERT, **published, "model_type": "llama"}
    for key in ("classifier_pooling", "clf_pooling"):  # of its classifier
        of_llama.pop(key, None)
    if of_llama.pop("is_causal", False):
        raise UserError(
            f"{where}: is_causal is true, expected false; use a checkpoint of EuroBERT."
        )
    return dataclasses.replace(_decoder_config(of_llama, where), bidirectional=True)


def decoder_key_map(config: LlamaConfig) -> KeyMap:
    """Maps keys of a decoder that may lack `model.`, as those saved without their head."""
    key_map = llama_key_map(config)
    bare = (r"^(embed_tokens|layers|norm)\.", r"model.\1.")
    return dataclasses.replace(key_map, rename=[*key_map.rename, bare])


def _headless_key_map(config: LlamaConfig) -> KeyMap:
    key_map = decoder_key_map(dataclasses.replace(config, tied=True))
    return dataclasses.replace(key_map, tied=(), ignore=[*key_map.ignore, r"^lm_head\."])


# What the configs of cross-encoders say of sentence-transformers; a sigmoid is taken in any case.
_SCORED = ("sentence_transformers", "sbert_ce_default_activation_function")
_ROBERTA = Family(
    functools.partial(bert_keys.roberta_config, harmless=_SCORED),
    Bert,
    bert_keys.roberta_key_map,
    bert_keys.roberta_classifier_key_map,
    unplaced=bert_keys.roberta_padding,
)


def _rotary(family: rotary.RotaryBert) -> Family:
    return Family(
        functools.partial(rotary.rotary_config, family, harmless=_SCORED),
        Bert,
        functools.partial(rotary.rotary_key_map, family),
        functools.partial(rotary.rotary_classifier_key_map, family),
        fused=rotary.rotary_fused,
    )


_DECODER = Family(_decoder_config, TextDecoder, _headless_key_map, fused=fused_rows)
FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        functools.partial(bert_keys.bert_config, harmless=_SCORED),
        Bert,
        bert_keys.bert_key_map,
        bert_keys.bert_classifier_key_map,
    ),
    "xlm-roberta": _ROBERTA,
    "roberta": _ROBERTA,
    "mpnet": Family(mpnet_config, MPNet, mpnet_key_map, unplaced=lambda published: MPNET_PADDING),
    "modernbert": Family(
        functools.partial(keys.modernbert_config, harmless=_SCORED),
        ModernBert,
        keys.modernbert_key_map,
        keys.modernbert_classifier_key_map,
        ModernBertCrossEncoder,
        keys.modernbert_fused,
        keys.modernbert_published_name,
    ),
    "nomic_bert": _rotary(rotary.NOMIC),
    "gte": _rotary(rotary.GTE),
    "new": _rotary(rotary.GTE),  # the authors' name of GTE
    "jina_embeddings_v3": _rotary(rotary.JINA_V3),
    "eurobert": dataclasses.replace(_DECODER, config=_eurobert_config),
    "embedding_gemma2": Family(
        lambda published, where: for_reading(
            embedding_gemma.embedding_gemma_config(published, where), platform()
        ),
        embedding_gemma.EmbeddingGemma,
        embedding_gemma.embedding_gemma_key_map,
        name=embedding_gemma.published_name,
    ),
    **dict.fromkeys(DECODERS, _DECODER),
}


def published_folder(model: str | Path, flag: str = "--model") -> Path | None:
    """The folder of transformers that a path or name means.

    Args:
      model: a path, or ORG/NAME or ORG/NAME@REVISION in the Hugging Face cache.
      flag: that named it, for messages.

    Returns:
      None: it is something else, such as a training run or a converted model.
    """
    fetch = f"add --download, or run `hf download {model}`"
    folder = find_model(str(model), flag, fetch) if is_hub_name(model) else Path(model)
    if not (folder / CONFIG).is_file() or is_weights_folder(folder):
        return None
    config = read_json(folder / CONFIG)
    return folder if isinstance(config, dict) and "model_type" in config else None


def published_kind(folder: Path) -> str:
    """The `model_type` of a published folder."""
    return str(read_json(folder / CONFIG)["model_type"])


def is_classifier(folder: Path) -> bool:
    """Whether a published folder holds a classifier of sequences."""
    names = read_json(folder / CONFIG).get("architectures") or []
    return any(str(name).endswith(_CLASSIFIER) for name in names)


def model_type_of(folder: Path) -> str:
    """transformers' name of a published folder's family; some of them are decoders."""
    return str(read_json(folder / CONFIG).get("model_type"))


def read_decoder_config(folder: Path) -> LlamaConfig:
    """Our config of the decoder in a published folder; UserError as `LlamaConfig.from_hf`."""
    return _decoder_config(read_json(folder / CONFIG), str(folder / CONFIG))


def check_padding(folder: Path, pad_id: int) -> None:
    """Checks that the token without a position is the tokenizer's padding, which no text holds.

    Here every token of a text has a position.
    """
    family, published, where = _family(folder)
    unplaced = family.unplaced(published)
    if unplaced not in (None, pad_id):
        raise UserError(
            f"{where}: token {unplaced} gets no position in this model, but the tokenizer pads "
            f"with token {pad_id}, so that texts may hold token {unplaced}; correct pad_token in "
            "tokenizer_config.json, or pad_token_id here."
        )


# Of jina-embeddings-v3, for questions and for what is searched.
_RETRIEVAL = ("retrieval.query", "retrieval.passage")


def retrieval_tasks(folder: Path) -> tuple[str | None, str | None]:
    """The tasks whose additions encode questions and sources; None: the encoder has none."""
    published, where = read_json(folder / CONFIG), folder / CONFIG
    tasks = published.get(rotary.ADAPTED)
    if tasks is None or published.get("load_trained_adapters") is False:
        return None, None
    if not isinstance(tasks, list) or not {*_RETRIEVAL} <= {*map(str, tasks)}:
        raise UserError(
            f"{where}: {rotary.ADAPTED} is {tasks!r}, expected {' and '.join(_RETRIEVAL)} among "
            "its tasks; use a checkpoint that was trained to retrieve."
        )
    return _RETRIEVAL


def load_text_encoder(
    folder: Path,
    mesh: Mesh | None = None,
    ignore: tuple[str, ...] = (),
    task: str | None = None,
) -> Any:
    """The encoder of tokens in a published folder, of its family's `model`.

    Args:
      ignore: patterns of tensors that belong to another model in the same files.
      task: one of `retrieval_tasks`.
    """
    family, published, where = _family(folder)
    if is_classifier(folder):
        raise UserError(
            f"{folder}: holds a reranker, a classifier of pairs, where an encoder of texts was "
            "expected; use it with `mmqa rerank --model`."
        )

    def key_map(config: Any) -> KeyMap:
        whole = family.key_map(config)
        return dataclasses.replace(whole, ignore=(*whole.ignore, *ignore))

    config = family.config(published, where)
    return _load(folder, family, config, family.model, key_map, mesh, published, task)


def published_tensors(
    family: Family, config: Any, state: nnx.State, key_map: KeyMap, *, classifier: bool = False
) -> TensorSource:
    """A model's parameters as a checkpoint of its family has them: what `_load` reads."""
    source = untied_source(state, key_map)
    if fused := family.fused(config):
        source = together(source, fused)
    tensors = {
        family.name(key, classifier): (spec, functools.partial(source.read, key))
        for key, spec in source.specs().items()
    }
    return DerivedSource(source.name, tensors)


def load_dense(layer: DenseLayer) -> Dense:
    """A linear layer of sentence-transformers; UserError for tensors that do not fit."""
    source = open_source(layer.folder)
    shapes = {"linear.weight": (layer.outputs, layer.inputs)}
    shapes |= {"linear.bias": (layer.outputs,)} if layer.bias else {}
    mapped = layer.residual and layer.inputs != layer.outputs
    shapes |= {"residual.weight": (layer.outputs, layer.inputs)} if mapped else {}
    tensors = {key: tuple(spec.shape) for key, spec in source.specs().items()}
    if layer.beside:
        tensors = {key: shape for key, shape in tensors.items() if key in shapes}
    if tensors != shapes:
        raise UserError(
            f"{layer.folder}: its tensors are {tensors}, {shapes} were expected by config.json; "
            "fetch the folder again."
        )

    def linear(name: str, bias: bool) -> Linear:
        sizes = layer.inputs, layer.outputs
        made = Linear(*sizes, ("embed", None), rngs=nnx.Rngs(), use_bias=bias)
        made.kernel.set_value(jnp.asarray(source.read(f"{name}.weight"), jnp.float32).T)
        if made.bias is not None:
            made.bias.set_value(jnp.asarray(source.read(f"{name}.bias"), jnp.float32))
        return made

    residual = linear("residual", False) if mapped else layer.residual
    return Dense(linear("linear", layer.bias), layer.activation, residual)


def load_cross_encoder(folder: Path, mesh: Mesh | None = None) -> Any:
    """The cross-encoder in a published folder, of its family's `cross_encoder`."""
    family, published, where = _family(folder)
    if family.classifier is None or not is_classifier(folder):
        known = [name for name, entry in FAMILIES.items() if entry.classifier]
        raise UserError(
            f"{folder}: holds no reranker: a classifier of sequences ({_CLASSIFIER}) of "
            f"{', '.join(known)} was expected, or a Qwen3-Reranker; give such a checkpoint."
        )
    labels = _labels(published)
    if labels != 1:
        raise UserError(
            f"{where}: the classifier has {labels} labels, 1 was expected, the relevance; use a "
            "checkpoint that was trained to rank."
        )
    _check_activation(published, where)
    config = family.config(published, where)
    return _load(folder, family, config, family.cross_encoder, family.classifier, mesh)


def load_pair_classifier(folder: Path, labels: int, what: str) -> CrossEncoder:
    """The BERT in a published folder that puts pairs of texts into classes, `what` in messages."""
    family, published, where = _family(folder)
    kind = published.get("model_type")
    if kind != "bert" or not is_classifier(folder) or _labels(published) != labels:
        raise UserError(
            f"{where}: a BertForSequenceClassification with {labels} labels was expected, {what}; "
            "name another folder."
        )
    build = functools.partial(CrossEncoder, labels=labels)
    config = family.config(published, where)
    return _load(folder, family, config, build, family.classifier, None)


def _labels(published: Mapping[str, Any]) -> int:
    names = published.get("id2label")
    return len(names) if names else published.get("num_labels", 2)  # transformers' default


def load_yes_no(folder: Path, yes: int, no: int, mesh: Mesh | None = None) -> YesNoDecoder:
    """The decoder in a published folder that judges by the tokens `yes` and `no`."""
    family, published, where = _family(folder)

    def build(config: LlamaConfig, *, rngs: nnx.Rngs) -> YesNoDecoder:
        return YesNoDecoder(config, yes, no, rngs=rngs)

    config = family.config(published, where)
    return _load(folder, family, config, build, decoder_key_map, mesh)


def _load(
    folder: Path,
    family: Family,
    config: Any,
    model: Callable[..., nnx.Module],
    key_map: Callable[[Any], KeyMap],
    mesh: Mesh | None,
    published: Mapping[str, Any] | None = None,
    task: str | None = None,
) -> Any:
    source: TensorSource = open_source(folder)
    if published and rotary.ADAPTED in published:
        source = rotary.with_task(source, published, task, str(folder / CONFIG))
    if fused := family.fused(config):
        source = apart(source, fused)
    checkpoint = Checkpoint(config, key_map, source, "transformers")
    # A decoder's parameters are kept in the type that it computes in.
    dtype = config.dtype if isinstance(config, LlamaConfig) else "float32"
    return load_checkpoint(model, checkpoint, config, mesh, dtype)


def _family(folder: Path) -> tuple[Family, Mapping[str, Any], str]:
    """The family of a folder, its config.json and that file's name."""
    file = folder / CONFIG
    published = read_json(file)
    kind = published.get("model_type")
    if rotary.ADAPTED in published:  # its authors call it "xlm-roberta"
        kind = "jina_embeddings_v3"
    if kind not in FAMILIES:
        raise UserError(
            f"{file}: model_type is {kind!r}, which is not known as an encoder of texts; use "
            f"one of {', '.join(FAMILIES)}."
        )
    return FAMILIES[kind], published, str(file)


def _check_activation(published: Mapping[str, Any], where: str) -> None:
    """UserError if the logit is not what is taken: then a sigmoid of it would rank otherwise."""
    settings = published.get(_SCORED[0]) or {}
    named = settings.get("activation_fn") if isinstance(settings, dict) else settings
    for name in (named, published.get(_SCORED[1])):
        if name not in (None, *ACTIVATIONS):
            raise UserError(
                f"{where}: the logit goes through {name!r}, which is not known here (only "
                f"{', '.join(ACTIVATIONS)}); use another checkpoint."
            )


# Beside transformers.


def _states(model: Any, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An encoder's embeddings and layers [N + 1, B, L, H], and its output."""
    if isinstance(model, ModernBert):
        embedded = model.embed(ids)
        layers = model.layer_outputs(embedded, mask)
        return comparison.states_of(embedded, layers), model.norm(layers[-1])
    if isinstance(model, MPNet):
        embedded = model.embeddings(ids)
        layers = model.layer_outputs(embedded, mask)
    else:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        embedded = model.embeddings(ids, positions, jnp.zeros_like(ids))
        layers = model.layer_outputs(embedded, mask[:, None, None, :])
    return comparison.states_of(embedded, layers), layers[-1]


def _run(model: Any, inputs: Mapping[str, jax.Array]) -> comparison.Outputs:
    states, output = _states(model, inputs["ids"], inputs["mask"])
    return comparison.Outputs({"": states}, {"output": output})


def _run_reranker(model: Any, inputs: Mapping[str, jax.Array]) -> comparison.Outputs:
    ids, mask = inputs["ids"], inputs["mask"]
    states, _ = _states(model.bert, ids, mask)
    logit = model(ids, mask, jnp.zeros_like(ids))[:, None]
    return comparison.Outputs({"": states}, {"logit": logit})


CHECK = comparison.Check("AutoModel", _run, {"output": "last_hidden_state"})
RERANKER_CHECK = comparison.Check(
    "AutoModelForSequenceClassification", _run_reranker, {"logit": "logits"}
)


FAMILY = "qwen3_vl"
# Vision-language models that others make vectors with, by recipes of their own.
OTHERS = ("qwen2_vl", "qwen2_5_vl")
# Tokens of the smallest and the largest picture: MIN_PIXELS and MAX_PIXELS of the originals.
_LEAST, _MOST = 4, 1800


def load_vlm_encoder(
    folder: Path, truncate_dim: int | None = None, mesh: Mesh | None = None
) -> QwenVLEncoder:
    """The encoder of a Qwen3-VL-Embedding; it computes in bfloat16 on accelerators.

    Args:
      folder: of transformers, with or without an output head.
      truncate_dim: see QwenVLEncoder.
      mesh: where the parameters go; None: the default device.
    """
    build = functools.partial(QwenVLEncoder, truncate_dim=truncate_dim)
    return _load_vlm(folder, build, headless_key_map, mesh)


def load_vlm_yes_no(folder: Path, yes: int, no: int, mesh: Mesh | None = None) -> QwenVLYesNo:
    """The Qwen3-VL-Reranker in a folder, which judges by the tokens `yes` and `no`."""
    return _load_vlm(folder, functools.partial(QwenVLYesNo, yes=yes, no=no), reader_key_map, mesh)


def read_vlm_config(folder: Path) -> QwenVLConfig:
    """Our config of a folder's Qwen3-VL, with the bounds that its pictures have as an encoder."""
    return for_encoding(open_qwen_vl(folder).config, platform())


def check_family(folder: Path) -> None:
    """UserError for a vision-language model that makes vectors by another recipe."""
    kind = model_type_of(folder)
    if kind in OTHERS:
        raise UserError(
            f"{folder}: holds a {kind}, which GME and others embed with by recipes that are not "
            "known here; use a Qwen3-VL-Embedding."
        )


def _load_vlm(
    folder: Path, build: Callable[..., nnx.Module], key_map: Callable[[Any], KeyMap], mesh: Any
) -> Any:
    checkpoint = open_qwen_vl(folder)
    config = for_encoding(checkpoint.config, platform())
    checkpoint = checkpoint._replace(config=config, key_map=key_map)
    return load_checkpoint(build, checkpoint, config, mesh, config.llama.dtype)


def for_encoding(config: QwenVLConfig, device: str) -> QwenVLConfig:
    """As `for_reading_prompts`; pictures have the originals' least and most tokens."""
    config, unit = for_reading_prompts(config, device), config.vision.unit
    bounds = {"min_pixels": _LEAST * unit**2, "max_pixels": _MOST * unit**2}
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, **bounds))


def for_reading_prompts(config: Any, device: str) -> Any:
    """See text_encoders.for_reading, of a config with a `vision` and a `llama`; the tower computes
    in the decoder's precision."""
    llama = for_reading(config.llama, device)
    vision = dataclasses.replace(config.vision, dtype=llama.dtype)
    return dataclasses.replace(config, llama=llama, vision=vision)


def reader_key_map(config: QwenVLConfig) -> KeyMap:
    """Also of a model that was saved without its head, whose keys lack `model.`."""
    key_map = qwen_vl_key_map(config)
    bare = (r"^language_model\.", "model.")
    return dataclasses.replace(key_map, rename=[*key_map.rename, bare])


def headless_key_map(config: QwenVLConfig) -> KeyMap:
    """Key map of a model whose output head, if there is one, is left out."""
    tied = dataclasses.replace(config, llama=dataclasses.replace(config.llama, tied=True))
    key_map = reader_key_map(tied)
    return dataclasses.replace(key_map, tied=(), ignore=[*key_map.ignore, r"^lm_head\."])
