"""The language model that a run fine-tunes: its sizes, its tokenizer and its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmqa_jax.core import distributed
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.lora import ADDED
from mmqa_jax.prompting.local_model import weights_hash
from mmqa_jax.prompting.text_tokenizer import TextTokenizer, open_tokenizer
from mmqa_jax.weights.bundled import LANGUAGE_MODELS
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.folder import is_weights_folder, load_converted, read_record
from mmqa_jax.weights.hub import find_model, is_hub_name
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.registry import architecture

SCRATCH = "scratch"
_COMPUTE = ("dtype", "attention", "attention_dropout", "remat", "unroll")  # not in the weights
_END = "<|end|>"  # of a tokenizer that is trained here


def base_path(name: str) -> Path:
    """Folder or file of the published, converted or trained LLaMA that `init` names.

    Raises:
      UserError: nothing there, or another architecture.
    """
    if is_hub_name(name):
        path = find_model(name, "config key init")
    else:
        path = LANGUAGE_MODELS[name]() if name in LANGUAGE_MODELS else Path(name)
    if not path.exists():
        raise UserError(
            f"config key init={name}: no such file or folder; name a LLaMA as `mmqa prompt "
            f"--model` does ({', '.join(LANGUAGE_MODELS)}, a folder, a GGUF file or ORG/NAME), or "
            f"{SCRATCH}."
        )
    if is_weights_folder(path) and (kind := read_record(path).architecture.name) != "llama":
        raise UserError(f"config key init={name}: holds a {kind}, a llama was expected.")
    return path


def llama_of(task: Any, vocab_size: int) -> LlamaConfig:
    """The model's config: the base's, with the changes of the section `model`.

    Args:
      vocab_size: of a model from scratch.

    Raises:
      UserError: a change of what the base's weights decide.
    """
    changes = dict(task.model.changes)
    if task.init == SCRATCH:
        return LlamaConfig(**{"vocab_size": vocab_size, **changes})
    path = base_path(task.init)
    fixed = [name for name in changes if name not in _COMPUTE]
    if fixed:
        raise UserError(
            f"config key model.changes.{fixed[0]}: the weights of init={task.init} decide it; "
            f"change only {', '.join(_COMPUTE)}, or set init to {SCRATCH}."
        )
    if is_weights_folder(path):
        return replace_fields(read_record(path).config, **changes)
    return replace_fields(architecture("llama").open(path).config, **changes)


def check_trainable(task: Any) -> None:
    """Refuses an optimizer that does not train what the section `model` says.

    Raises:
      UserError: LoRA whose base is trained, or a filter without LoRA.
    """
    wanted = None if task.model.lora is None else ADDED
    given = task.loop.optimizer.trainable
    if given != wanted:
        raise UserError(
            f"config key train.optimizer.trainable={given}: with model.lora="
            f"{'none' if wanted is None else '...'} {wanted!r} was expected, the parameters that "
            "are trained; set it so."
        )


def base_fingerprint(task: Any) -> str:
    """Hash of the base's weights; "" from scratch. A run resumes on the same base alone."""
    if task.init == SCRATCH:
        return ""
    return weights_hash(base_path(task.init))


def base_loader(task: Any) -> Callable[[nnx.Module], None] | None:
    """Puts the base's weights into a freshly initialized model, in place; None from scratch."""
    if task.init == SCRATCH:
        return None

    def load(model: nnx.Module) -> None:
        path, mesh = base_path(task.init), make_mesh(task.mesh)
        options = {"mesh": mesh, "param_dtype": "float32"}
        if is_weights_folder(path):
            base = load_converted(path, **options)
        else:
            base = load_published("llama", path, **options)
        nnx.update(model, nnx.state(base, nnx.Param))

    return load


def make_text_tokenizer(task: Any, corpus: Corpus, folder: Path) -> TextTokenizer:
    """The run's tokenizer, saved in its folder; one that is already there is used.

    `task.tokenizer` is "" for the base's own, a path as `mmqa prompt --tokenizer` has it, or
    `corpus:N` for N tokens trained on the questions (for a model from scratch).
    """
    if jax.process_index() == 0 and not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _new_tokenizer(task, corpus).save(folder)
    distributed.barrier("tokenizer")
    return open_tokenizer(folder)


def _new_tokenizer(task: Any, corpus: Corpus) -> Any:
    name = task.tokenizer
    if name.startswith("corpus:"):
        size = name.removeprefix("corpus:")
        if not size.isdecimal():
            raise UserError(f"config key tokenizer={name}: write corpus:N with a number of tokens.")
        return _train_tokenizer(corpus, int(size))
    if not name and task.init == SCRATCH:
        raise UserError(
            "config key tokenizer is empty, but a model from scratch has none; write corpus:N or "
            "name a tokenizer."
        )
    return open_tokenizer(name or base_path(task.init))


def _train_tokenizer(corpus: Corpus, size: int) -> TextTokenizer:
    """Byte-level BPE (as GPT-2's) of the train questions, with choices and rationales."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (" ".join((q.question, *q.choices, q.rationale)) for q in corpus.questions("train"))
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer, end_ids=(tokenizer.token_to_id(_END),))


def check_rows(task: Any, llama: LlamaConfig, tokenizer: TextTokenizer) -> None:
    """Refuses a tokenizer with ids that the model lacks, and rows longer than it reads."""
    if tokenizer.vocab_size > llama.vocab_size:
        raise UserError(
            f"config key tokenizer={task.tokenizer}: has {tokenizer.vocab_size} tokens, the "
            f"model {llama.vocab_size}; name the model's own tokenizer."
        )
    if task.batches.length > llama.positions:
        raise UserError(
            f"config key batches.length={task.batches.length}: the model reads at most "
            f"{llama.positions} tokens; use fewer."
        )
