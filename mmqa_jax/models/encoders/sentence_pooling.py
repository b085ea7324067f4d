"""How a sentence-transformers folder makes one vector of a text, read and checked.

`modules.json` names the layers, `1_Pooling/config.json` how the states of tokens become one vector,
`config_sentence_transformers.json` the prompts before questions and sources, and
`sentence_bert_config.json` the length. What one of them says and is not done here is refused: the
vectors would be others, without a word.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_within, read_json
from mmqa_jax.weights.config_json import check_keys, kinds

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER, POOLING = "sentence_bert_config.json", "1_Pooling/config.json"
# The same file as older versions named it by the encoder.
_TRANSFORMERS = (
    TRANSFORMER,
    *("sentence_roberta_config.json", "sentence_xlm-roberta_config.json"),
)
# Of a cross-encoder's logit: both rank alike, and a sigmoid is taken in any case.
ACTIVATIONS = ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid")
_LAYERS = ("Transformer", "Pooling", "Normalize")
_DENSE = "Dense"
_DENSE_KEYS = kinds(
    size="in_features out_features", flag="bias use_residual", name="activation_function"
)
# The switches of older versions, and the names that newer ones give in `pooling_mode`.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_SIZES = ("word_embedding_dimension", "embedding_dimension")
_POOLING_KEYS = {**kinds(any="pooling_mode"), **dict.fromkeys(_SIZES, "size")}
_POOLING_KEYS |= dict.fromkeys(_SWITCHES, "flag")
_PROMPT_KEYS = kinds(
    object_or_null="prompts",
    name_or_null="default_prompt_name similarity_fn_name",
    size_or_null="truncate_dim",
)
_PAIR_PROMPTS = kinds(object_or_null="prompts", name_or_null="default_prompt_name")
_TRANSFORMER_KEYS = kinds(size_or_null="max_seq_length", flag_or_null="do_lower_case")
# Of a text encoder these say what it is anyway.
TRANSFORMER_FIXED = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({},),
    "query_length": (),
    "document_length": (),
    "query_expansion": (),
}
TRANSFORMER_HARMLESS = ("modality_config", "unpad_inputs", "model_args", "tokenizer_args")
# What towers that are trained further take.
_MEAN: Mapping[str, tuple[Any, ...]] = {
    "pooling_mode": ("mean", ["mean"]),
    "include_prompt": (True,),
    **{switch: (mode == "mean",) for switch, mode in _SWITCHES.items()},
}
# The prompt of sources has one of these names, as in `SentenceTransformer.encode_document`.
_OF_SOURCES = ("document", "passage", "corpus", "retrieval.passage")
_OF_QUESTIONS = ("query", "retrieval.query")
_REMEDY = (
    "use a checkpoint whose sentences are means of their tokens, or move modules.json and the "
    "folders that it names away to take BERT's token states alone"
)


def mean_pool(hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """Mean over real tokens, in float32: [B, L, D], [B, L] -> [B, D] (sentence-transformers)."""
    weights = attention_mask.astype(jnp.float32)[..., None]  # [B, L, 1]
    total = (hidden.astype(jnp.float32) * weights).sum(1)
    return total / jnp.maximum(weights.sum(1), 1e-9)


def first_token(hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """State of the first token, [CLS]: [B, L, D], [B, L] -> [B, D] in float32."""
    return hidden[:, 0].astype(jnp.float32)


def last_token(hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """State of the last real token of right-padded texts: [B, L, D], [B, L] -> [B, D]."""
    last = jnp.maximum(attention_mask.astype(jnp.int32).sum(1) - 1, 0)  # [B]
    return jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0].astype(jnp.float32)


def max_sim(
    questions: jax.Array, asked: jax.Array, sources: jax.Array, scored: jax.Array
) -> jax.Array:
    """MaxSim of P pairs.

    Args:
      questions: float [P, Q, D], vectors of each pair's question.
      asked: bool [P, Q], which of them are scored.
      sources: float [P, L, D]; scored: bool [P, L], the same of its source.

    Returns:
      float32 [P]; a source of which nothing is scored has the smallest float32.
    """
    products = jnp.einsum("pqd,pld->pql", questions, sources, precision="highest")
    least = jnp.finfo(jnp.float32).min
    best = jnp.where(scored[:, None], products, least).max(-1)  # [P, Q]
    total = jnp.where(asked, best, 0).sum(-1)
    return jnp.where(scored.any(-1), total, least)


# By the names of sentence-transformers.
POOLINGS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean": mean_pool,
    "cls": first_token,
    "lasttoken": last_token,
}


# Behind a linear layer over pooled states, by torch's names.
DENSE_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What is put before a question, and before a passage or caption."""

    question: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """A linear layer over the pooled states."""

    folder: Path  # of its weights
    # inputs, outputs: values of a vector before and after it.
    inputs: int
    outputs: int
    bias: bool  # whether it has one
    activation: str  # one of DENSE_ACTIVATIONS
    # Whether what it gets is added to what it gives, through a linear layer where their sizes
    # differ.
    residual: bool = False
    beside: bool = False  # whether its tensors are among those of the encoder


@dataclasses.dataclass(frozen=True)
class SentenceRecipe:
    """How one vector, of length 1, is made of a text."""

    pooling: str = "mean"  # one of POOLINGS
    prompts: Prompts = Prompts()  # before the texts
    # Longer texts are cut, special tokens included; None: as long as the encoder takes.
    max_tokens: int | None = None
    lowercase: bool = False  # whether texts are put in lower case before they are split
    truncate_dim: int | None = None  # the first so many values are kept (Matryoshka); None: all
    dense: tuple[DenseLayer, ...] = ()  # linear layers over what is pooled, in order


def has_recipe(folder: Path) -> bool:
    """Whether a folder's files say how one vector is made of a text."""
    return (folder / MODULES).is_file() or (folder / POOLING).is_file()


def read_recipe(
    folder: Path, processing: Sequence[Any] = (), own_kinds: Sequence[str] = ()
) -> SentenceRecipe:
    """How a folder makes one vector of a text; a plain encoder's is the mean of its tokens.

    Vectors are of length 1 whether or not the folder has a layer for it: here they are compared by
    cosine. `processing` are the values of `processing_kwargs` that say what the caller does anyway,
    `own_kinds` the folder's own classes of a Transformer that the caller is.
    """
    pooling, normalized, dense = "mean", False, []
    for kind, place in read_modules(folder):
        kind = "Transformer" if kind in own_kinds else kind
        if kind not in (*_LAYERS, _DENSE):
            raise UserError(
                f"{folder / MODULES}: holds the layer {kind!r}, which is not known here (only "
                f"{', '.join((*_LAYERS, _DENSE))}); use a checkpoint without it."
            )
        if kind == _DENSE and normalized:
            raise UserError(
                f"{folder / MODULES}: holds a layer Dense behind Normalize, which is not known "
                "here; use a checkpoint with Normalize at its end."
            )
        if kind == _DENSE:
            dense.append(read_dense(folder / place))
        if kind == "Transformer" and place:
            raise UserError(
                f"{folder / MODULES}: the encoder is in its folder {place!r}; move the files of "
                "that folder here, and set its path in modules.json to an empty text."
            )
        normalized = normalized or kind == "Normalize"
        if kind == "Pooling":
            pooling = _pooling(folder / place / "config.json")
    named = (folder / name for name in _TRANSFORMERS)
    file = next((file for file in named if file.is_file()), folder / TRANSFORMER)
    content = read_settings(file)
    check_keys(
        content,
        str(file),
        read=_TRANSFORMER_KEYS,
        harmless=TRANSFORMER_HARMLESS,
        fixed={**TRANSFORMER_FIXED, "processing_kwargs": ({}, *processing)},
    )
    prompts, truncate_dim = _prompts(folder / PROMPTS, normalized)
    return SentenceRecipe(
        pooling,
        prompts,
        content.get("max_seq_length"),
        bool(content.get("do_lower_case")),
        truncate_dim,
        tuple(dense),
    )


def read_pair_length(folder: Path) -> int | None:
    """Tokens of a cross-encoder's longest pair by sentence-transformers' files, or None."""
    for kind, place in read_modules(folder):
        if kind != "Transformer" or place:
            raise UserError(
                f"{folder / MODULES}: holds the layer {kind!r} in {place!r}, but of a reranker "
                "only its classifier is read; use a checkpoint without further layers."
            )
    if check_logit_prompts(folder / PROMPTS):
        raise UserError(
            f"{folder / PROMPTS}: default_prompt_name puts a prompt before every pair, which is "
            "not done here; use a checkpoint without it."
        )
    fixed = {**TRANSFORMER_FIXED, "transformer_task": ("sequence-classification",)}
    fixed |= {"module_output_name": ("scores",), "do_lower_case": (False,)}
    content, file = read_settings(folder / TRANSFORMER), str(folder / TRANSFORMER)
    read = {"max_seq_length": "size?"}
    check_keys(content, file, read=read, harmless=TRANSFORMER_HARMLESS, fixed=fixed)
    return content.get("max_seq_length")


def check_logit_prompts(file: Path) -> str:
    """The prompt that holds by default in a reranker's config_sentence_transformers.json, or "".

    A reranker that is a decoder takes it for its instruction.
    """
    content = read_settings(file)
    fixed = {"model_type": ("CrossEncoder",), "activation_fn": ACTIVATIONS}
    check_keys(content, str(file), read=_PAIR_PROMPTS, fixed=fixed)
    name = content.get("default_prompt_name")
    prompts = content.get("prompts") or {}
    if not name:
        return ""
    if not isinstance(prompts.get(name), str):
        raise UserError(
            f"{file}: default_prompt_name is {name!r}, which is none of its prompts; correct it."
        )
    return prompts[name]


def check_mean_pooling(folder: Path) -> None:
    """Checks that a folder's sentences are means of their tokens; a plain BERT's pass.

    For towers that are trained further, which pool by the mean (models/encoders/dual_encoder.py).
    """
    for kind, place in read_modules(folder):
        if kind not in _LAYERS:
            raise UserError(f"{folder / MODULES}: holds the layer {kind!r}; {_REMEDY}.")
        if kind == "Pooling":
            file = folder / place / "config.json"
            try:
                check_keys(_needed_object(file), str(file), read=_SIZES, fixed=_MEAN)
            except UserError as error:
                first = str(error).partition(";")[0]
                raise UserError(f"{first}; {_REMEDY}.") from error
    file = folder / TRANSFORMER
    if read_settings(file).get("do_lower_case"):
        raise UserError(
            f"{file}: do_lower_case puts every text in lower case, which is not done here; take "
            "the key out, and set do_lower_case to true in tokenizer_config.json."
        )
    file = folder / PROMPTS
    content = read_settings(file)
    name, prompts = content.get("default_prompt_name"), content.get("prompts")
    if name is not None and isinstance(prompts, dict) and prompts.get(name):
        raise UserError(
            f"{file}: default_prompt_name {name!r} puts {prompts[name]!r} before every text, which "
            "is not done here; take the key out and put it before your texts yourself."
        )


def read_dense(folder: Path, of: str = "sentence_embedding", usual: bool = True) -> DenseLayer:
    """A layer Dense in a folder; UserError for an activation that is not known here.

    Args:
      of: what it is a layer over, sentence-transformers' name.
      usual: whether a file that does not say so means `of`.
    """
    file = folder / "config.json"
    content = _needed_object(file)
    fixed = {"module_input_name": (of,), "module_output_name": (of, None)}
    check_keys(content, str(file), read=_DENSE_KEYS, fixed=fixed)
    if not usual and "module_input_name" not in content:
        raise UserError(f"{file}: has no module_input_name; expected {of}: add it.")
    missing = [key for key in ("in_features", "out_features") if key not in content]
    activation = content.get("activation_function", "torch.nn.modules.activation.Tanh")
    if missing or activation not in DENSE_ACTIVATIONS:
        raise UserError(
            f"{file}: in_features, out_features and an activation_function of "
            f"{', '.join(DENSE_ACTIVATIONS)} were expected; fetch the file again, or use another "
            "checkpoint."
        )
    sizes = content["in_features"], content["out_features"]
    residual = content.get("use_residual", False)
    return DenseLayer(folder, *sizes, content.get("bias", True), activation, residual)


def check_widths(layers: Sequence[DenseLayer], width: int) -> int:
    """The values of a vector behind linear layers over `width`; UserError where they do not fit."""
    for layer in layers:
        if layer.inputs != width:
            raise UserError(
                f"{layer.folder / 'config.json'}: in_features is {layer.inputs}, but vectors have "
                f"{width} values there; fetch the file again."
            )
        width = layer.outputs
    return width


def _pooling(file: Path) -> str:
    """The pooling in a config of the layer Pooling; UserError for one that is not known here."""
    content = _needed_object(file)
    check_keys(content, str(file), read=_POOLING_KEYS, fixed={"include_prompt": (True,)})
    modes = content.get("pooling_mode")
    if modes is None:
        modes = [name for switch, name in _SWITCHES.items() if content.get(switch)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in POOLINGS:
        raise UserError(
            f"{file}: its pooling is {modes!r}, which is not known here (only one of "
            f"{', '.join(POOLINGS)}); use a checkpoint with one of them."
        )
    return modes[0]


def _prompts(file: Path, normalized: bool) -> tuple[Prompts, int | None]:
    """The prompts and the Matryoshka size of config_sentence_transformers.json."""
    content = read_settings(file)
    check_keys(
        content, str(file), read=_PROMPT_KEYS, fixed={"model_type": ("SentenceTransformer",)}
    )
    similarity = content.get("similarity_fn_name") or "cosine"
    # Of vectors of length 1 these rank alike.
    known = ("cosine", "dot", "euclidean") if normalized else ("cosine",)
    if similarity not in known:
        raise UserError(
            f"{file}: similarity_fn_name is {similarity!r}, but vectors are of length 1 here and "
            "compared by cosine; use a checkpoint that was trained for cosines."
        )
    named = {
        name: text for name, text in (content.get("prompts") or {}).items() if text is not None
    }
    for name, text in named.items():
        if not isinstance(text, str):
            raise UserError(f"{file}: the prompt {name!r} is {text!r}, a text was expected.")
    of_sources = next((name for name in _OF_SOURCES if name in named), None)
    of_questions = next((name for name in _OF_QUESTIONS if name in named), None)
    default = named.get(content.get("default_prompt_name") or "", "")
    if default and (of_questions is None or of_sources is None):
        raise UserError(
            f"{file}: default_prompt_name puts {default!r} before every text, and versions of "
            "sentence-transformers differ in whether before questions and sources too; name "
            '"query" and "document" in its prompts.'
        )
    prompts = Prompts(named.get(of_questions, ""), named.get(of_sources, ""))
    return prompts, content.get("truncate_dim")


def read_modules(folder: Path) -> Iterator[tuple[str, str]]:
    """The class of each module, with its package if that is not the library's, and its folder."""
    file = folder / MODULES
    if not file.is_file():  # of a folder that was copied without it
        if (folder / POOLING).is_file():
            yield "Pooling", "1_Pooling"
        return
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(entry, dict) for entry in modules):
        raise UserError(f"{file}: is not a list of modules; fetch the file again.")
    for module in modules:
        name = str(module.get("type"))
        package, _, kind = name.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            kind = name  # of code in the folder, which is not run
        place = str(module.get("path", ""))
        check_within(place, file)
        yield kind, place


def read_settings(file: Path) -> Mapping[str, Any]:
    """The content of a file that may be absent."""
    return _needed_object(file) if file.is_file() else {}


def _needed_object(file: Path) -> Mapping[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: is no JSON object; fetch the file again.")
    return content
