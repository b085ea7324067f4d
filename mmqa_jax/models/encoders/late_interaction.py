"""Late interaction (ColBERT, Khattab & Zaharia 2020): a vector for each token, scored by MaxSim.

A score is the sum over a question's tokens of the largest product with any token of a source. How a
checkpoint makes its vectors stands in the files that sentence-transformers 6 (MultiVectorEncoder),
PyLate and Stanford's ColBERT publish: prompts, lengths, queries that are expanded with masked
tokens, words that are not scored. Originals: sentence_transformers/multi_vector_encoder and
sentence_transformers/base/modules/transformer.py (`preprocess`).
"""

import dataclasses
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.encoders.heads import Dense
from mmqa_jax.models.encoders.sentence_pooling import (
    MODULES,
    PROMPTS,
    TRANSFORMER,
    TRANSFORMER_FIXED,
    TRANSFORMER_HARMLESS,
    DenseLayer,
    Prompts,
    check_widths,
    read_dense,
    read_modules,
    read_settings,
)
from mmqa_jax.models.encoders.text_encoders import CONFIG, load_dense, load_text_encoder
from mmqa_jax.models.two_towers.network import l2_normalize
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.layouts import open_source

_NATIVE, _PYLATE, _STANFORD = "MultiVectorEncoder", "ColBERT", "HF_ColBERT"
_METADATA = "artifact.metadata"  # Stanford's
_TOKENS = "token_embeddings"
_EXPANDED = 32  # tokens of an expanded query where the files do not say it
_ENCODER_KEYS = kinds(
    size_or_null="max_seq_length query_length document_length",
    object_or_null="query_expansion",
    flag_or_null="do_lower_case",
)
_PYLATE_KEYS = kinds(
    name_or_null="query_prefix document_prefix",
    size_or_null="query_length document_length",
    flag_or_null="do_query_expansion attend_to_expansion_tokens attend_to_mask_tokens",
    list_or_null="skiplist_words",
    object_or_null="query_expansion",
)
_POOLING = "HierarchicalTokenPooling"
_IDENTITY = "torch.nn.modules.linear.Identity"
_SCORED = {"maxsim": False, "meanmaxsim": True}


@dataclasses.dataclass(frozen=True)
class Expansion:
    """Masked tokens behind a short query, which are scored too."""

    length: int  # tokens of a query that has them
    cuts: bool = True  # whether longer queries are cut to `length`; else they stay as they are
    attended: bool = False  # whether the other tokens attend to them
    token: str | None = None  # its spelling; None is the tokenizer's `[MASK]`


@dataclasses.dataclass(frozen=True)
class TokenPooling:
    """Ward's clusters of tokens that are alike, each of which becomes its mean
    (sentence-transformers' HierarchicalTokenPooling).
    """

    factor: float  # a text keeps about one vector for so many tokens
    protected: int = 1  # tokens at the beginning of a text that are not merged
    normalized: bool = True  # whether vectors are scaled to length 1 afterwards
    sides: tuple[str, ...] = ("document",)  # whose tokens are merged, of "query" and "document"


@dataclasses.dataclass(frozen=True)
class LateInteraction:
    """How the vectors of texts are made, and scored."""

    # Before a question and before a source.
    prompts: Prompts = dataclasses.field(default_factory=Prompts)
    marked: bool = False  # whether the first word of a prompt is a token, if the vocabulary has it
    # query_length, document_length: longer texts are cut, special tokens included; None: at
    # `max_tokens`.
    query_length: int | None = None
    document_length: int | None = None
    # By sentence-transformers' files; None: as many as the tokenizer says.
    max_tokens: int | None = None
    expansion: Expansion | None = None  # of queries; None: they are not expanded
    skipped: tuple[str, ...] = ()  # spellings of tokens that are not scored
    # The sides whose tokens are skipped, of "query" and "document".
    skips: tuple[str, ...] = ("document",)
    dense: tuple[DenseLayer, ...] = ()  # linear layers over the state of every token, in order
    normalized: bool = True  # whether vectors are scaled to length 1
    mean: bool = False  # whether a score is divided by the number of the question's tokens
    lowercase: bool = False  # whether texts are put in lower case before they are split
    pooling: TokenPooling | None = None  # of tokens, behind all else; None: all are kept


def is_late_interaction(folder: Path) -> bool:
    """Whether a published folder holds an encoder with a vector for each token."""
    kind = read_settings(folder / PROMPTS).get("model_type")
    return kind in (_NATIVE, _PYLATE) or _is_stanford(folder)


def read_late_interaction(folder: Path) -> LateInteraction:
    """How a folder makes and scores vectors; UserError for what is not known here."""
    if _is_stanford(folder) and not (folder / MODULES).is_file():
        return _stanford(folder)
    file = folder / PROMPTS
    settings = read_settings(file)
    is_pylate = settings.get("model_type") == _PYLATE
    read = {**kinds(object_or_null="prompts", name_or_null="similarity_fn_name"), **_PYLATE_KEYS}
    fixed = {"model_type": (_NATIVE, _PYLATE), "default_prompt_name": ()}
    check_keys(settings, str(file), read=read, harmless=("__version__",), fixed=fixed)
    recipe = _layers(folder, LateInteraction(), is_pylate)
    legacy = _pylate(settings) if settings.keys() & _PYLATE_KEYS.keys() else {}
    named = {name: text or "" for name, text in (settings.get("prompts") or {}).items()}
    sources = next((named[key] for key in ("document", "passage", "corpus") if key in named), "")
    prompts = [named.get("query", ""), sources]
    for side, key in enumerate(("query_prefix", "document_prefix")):
        if prefix := settings.get(key):
            prompts[side] = prefix + prompts[side].removeprefix(prefix)
    if is_pylate:
        skipped = settings.get("skiplist_words")
        words = string.punctuation if skipped is None else skipped
        legacy |= {"skipped": tuple(words), "normalized": True}
    scored = settings.get("similarity_fn_name")
    marked = bool({"query_prefix", "document_prefix"} & settings.keys())
    return dataclasses.replace(
        recipe,
        prompts=Prompts(*prompts),
        marked=marked,
        mean=_SCORED.get(scored, False),
        **{name: value for name, value in legacy.items() if value is not None},
    )


def _layers(folder: Path, recipe: LateInteraction, is_pylate: bool) -> LateInteraction:
    """The recipe with what the folders of modules.json say."""
    dense: list[DenseLayer] = []
    changes: dict[str, Any] = {"normalized": False}
    order = []
    for kind, place in read_modules(folder):
        name = "Dense" if kind == "pylate.models.Dense.Dense" else kind
        order.append(name)
        if _POOLING in order[:-1]:
            raise UserError(
                f"{folder / MODULES}: holds the layer {name!r} behind {_POOLING}, which is not "
                "known here; use a checkpoint with the pooling of tokens at its end."
            )
        if name == "Transformer" and not place:
            changes |= _encoder(folder / TRANSFORMER)
        elif name == "Dense" and "Normalize" not in order:
            dense.append(read_dense(folder / place, _TOKENS, usual=is_pylate))
        elif name == "MultiVectorMask":
            changes |= _mask(folder / place / "config.json")
        elif name == "Normalize":
            changes["normalized"] = True
        elif name == _POOLING:
            changes["pooling"] = _token_pooling(folder / place / "config.json")
        else:
            raise UserError(
                f"{folder / MODULES}: holds the layer {name!r} in {place!r} behind "
                f"{order[:-1]}, which is not known of a late-interaction encoder (only Transformer "
                f"at the root, Dense, MultiVectorMask, Normalize and {_POOLING}); use a checkpoint "
                "without it."
            )
    return dataclasses.replace(recipe, dense=tuple(dense), **changes)


def _encoder(file: Path) -> dict[str, Any]:
    """Reads the lengths, and how queries are expanded, of sentence_bert_config.json."""
    settings = read_settings(file)
    fixed = {key: x for key, x in TRANSFORMER_FIXED.items() if key not in _ENCODER_KEYS}
    check_keys(settings, str(file), read=_ENCODER_KEYS, harmless=TRANSFORMER_HARMLESS, fixed=fixed)
    return {
        "max_tokens": settings.get("max_seq_length"),
        "query_length": settings.get("query_length"),
        "document_length": settings.get("document_length"),
        "expansion": _expansion(settings.get("query_expansion"), str(file)),
        "lowercase": bool(settings.get("do_lower_case")),
    }


def _expansion(settings: Mapping[str, Any] | None, where: str) -> Expansion | None:
    if settings is None:
        return None
    read = kinds(size="length", flag="attend", name="strategy", name_or_null="token")
    check_keys(settings, f"{where}, query_expansion", read=read)
    strategy = settings.get("strategy")
    if strategy not in ("fixed", "min") or "length" not in settings:
        raise UserError(
            f"{where}: query_expansion is {dict(settings)}, expected a length and the strategy "
            "'fixed' or 'min'; fetch the file again."
        )
    return Expansion(
        settings["length"],
        strategy == "fixed",
        settings.get("attend", False),
        settings.get("token"),
    )


def _mask(file: Path) -> dict[str, Any]:
    """Reads which tokens the layer MultiVectorMask leaves out of the score."""
    settings = read_settings(file)
    read = kinds(list_or_null="skiplist_words skiplist_tasks")
    check_keys(settings, str(file), read=read, fixed={"keep_only_token_ids": ([],)})
    sides = settings.get("skiplist_tasks")
    return {
        "skipped": tuple(settings.get("skiplist_words") or ()),
        "skips": ("document",) if sides is None else tuple(sides),
    }


def _token_pooling(file: Path) -> TokenPooling | None:
    """Reads the layer HierarchicalTokenPooling; None: it changes nothing."""
    settings = read_settings(file)
    read = kinds(
        number="pool_factor",
        integer="num_protected_tokens",
        flag="normalize_embeddings",
        any="tasks",
    )
    check_keys(settings, str(file), read=read)
    sides = settings.get("tasks") or ("document",)
    pooling = TokenPooling(
        settings.get("pool_factor", 1.0),
        settings.get("num_protected_tokens", 1),
        settings.get("normalize_embeddings", False),  # of files that are older than the key
        (sides,) if isinstance(sides, str) else tuple(sides),
    )
    if pooling.factor < 1 or pooling.protected < 0 or not {*pooling.sides} <= {"query", "document"}:
        raise UserError(
            f"{file}: is {dict(settings)}, expected a pool_factor of 1 or more, no negative "
            "num_protected_tokens, and tasks of query and document; fetch the file again."
        )
    return pooling if pooling.factor > 1 or pooling.normalized else None


def _pylate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that PyLate keeps in config_sentence_transformers.json; None: not settings."""
    fields: dict[str, Any] = {
        "query_length": settings.get("query_length"),
        "document_length": settings.get("document_length"),
    }
    if "query_expansion" in settings:
        fields["expansion"] = _expansion(settings["query_expansion"], PROMPTS)
    elif settings.get("do_query_expansion") is not False:
        attended = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        length = fields.pop("query_length") or _EXPANDED
        fields["expansion"] = Expansion(length, attended=bool(attended))
    return fields


def _is_stanford(folder: Path) -> bool:
    return _STANFORD in (read_settings(folder / CONFIG).get("architectures") or [])


def _stanford(folder: Path) -> LateInteraction:
    """Stanford's ColBERT: a BERT with `linear.weight` beside it, and its training's settings."""
    settings = read_settings(folder / _METADATA)
    query, source = (
        f"{settings.get(key) or usual} "
        for key, usual in (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
    )
    read = kinds(
        name_or_null="query_token_id doc_token_id",
        size_or_null="doc_maxlen query_maxlen",
        flag_or_null="attend_to_mask_tokens mask_punctuation",
    )
    known = {key: x for key, x in settings.items() if key in read}  # the rest is of training
    check_keys(known, str(folder / _METADATA), read=read)
    tensors = open_source(folder)
    weight = tensors.specs().get("linear.weight")
    if weight is None:
        raise UserError(
            f"{tensors.name}: lacks linear.weight, which makes the vectors of Stanford's ColBERT; "
            "fetch the checkpoint again."
        )
    attended = bool(settings.get("attend_to_mask_tokens"))
    return LateInteraction(
        prompts=Prompts(query, source),
        marked=True,
        document_length=settings.get("doc_maxlen"),
        expansion=Expansion(settings.get("query_maxlen") or _EXPANDED, attended=attended),
        skipped=tuple(string.punctuation) if settings.get("mask_punctuation", True) else (),
        dense=(DenseLayer(folder, *weight.shape[::-1], False, _IDENTITY, beside=True),),
    )


class TokenEncoder(nnx.Module):
    """An encoder of texts with a vector for each token.

    Args:
      bert: (ids, mask) -> states.
      dense: layers over each state, in order.
      normalized: whether vectors are scaled to length 1.
    """

    def __init__(self, bert: nnx.Module, dense: Sequence[Dense], normalized: bool):
        self.bert, self.dense, self.normalized = bert, nnx.List(dense), normalized
        self.config = bert.config

    def __call__(self, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Right-padded texts, int and bool [B, L] -> float32 [B, L, D]."""
        vectors = self.bert(input_ids, mask)
        for layer in self.dense:
            vectors = layer(vectors)
        vectors = vectors.astype(jnp.float32)
        return l2_normalize(vectors) if self.normalized else vectors


def load_token_encoder(
    folder: Path, recipe: LateInteraction, mesh: Mesh | None = None
) -> TokenEncoder:
    """The encoder of a published folder; UserError for layers that do not fit."""
    encoder = load_text_encoder(folder, mesh, ignore=(r"^linear\.weight$",))
    check_widths(recipe.dense, encoder.config.hidden)
    return TokenEncoder(encoder, [load_dense(layer) for layer in recipe.dense], recipe.normalized)
