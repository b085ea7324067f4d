"""The language model that a run fine-tunes: its sizes, its tokenizer and its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmqa_jax.core import distributed
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.lora import ADDED
from mmqa_jax.models.multimodal_t5 import MultimodalT5Config
from mmqa_jax.models.t5_config import T5Config
from mmqa_jax.prompting.local_model import weights_hash
from mmqa_jax.prompting.text_tokenizer import TextTokenizer, open_tokenizer
from mmqa_jax.weights.bundled import LANGUAGE_MODELS
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.folder import is_weights_folder, load_converted, read_record
from mmqa_jax.weights.hub import find_model, is_hub_name
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.registry import architecture

SCRATCH = "scratch"
_END = "<|end|>"  # of a tokenizer that is trained here


class _Kind(NamedTuple):
    """An architecture that is fine-tuned.

    Attributes:
      title, examples: for messages.
      config: its dataclass.
      free: fields that the weights do not decide.
    """

    title: str
    examples: str
    config: type
    free: tuple[str, ...]


_T5_FREE = ("dtype", "dropout", "remat", "unroll")
_KINDS = {
    "llama": _Kind(
        "LLaMA",
        f"{', '.join(LANGUAGE_MODELS)}, a folder, a GGUF file or ORG/NAME",
        LlamaConfig,
        ("dtype", "attention", "attention_dropout", "remat", "unroll"),
    ),
    "t5": _Kind("T5", "a folder or ORG/NAME", T5Config, _T5_FREE),
    # Wide as the pictures are where the base is a T5 without any.
    "multimodal_t5": _Kind(
        "Multimodal-CoT or T5",
        "a published folder or ORG/NAME",
        MultimodalT5Config,
        (*_T5_FREE, "features"),
    ),
}


def base_path(name: str, kind: str = "llama") -> Path:
    """Folder or file of the published, converted or trained model that `init` names.

    Args:
      kind: its architecture, of _KINDS.

    Raises:
      UserError: nothing there, or another architecture.
    """
    if is_hub_name(name):
        path = find_model(name, "config key init")
    else:
        path = LANGUAGE_MODELS[name]() if name in LANGUAGE_MODELS else Path(name)
    if not path.exists():
        raise UserError(
            f"config key init={name}: no such file or folder; name a {_KINDS[kind].title} as "
            f"`mmqa prompt --model` does ({_KINDS[kind].examples}), or "
            f"{SCRATCH}."
        )
    if is_weights_folder(path) and (found := read_record(path).architecture.name) != kind:
        raise UserError(f"config key init={name}: holds a {found}, a {kind} was expected.")
    return path


def model_config(task: Any, vocab_size: int) -> Any:
    """The model's config: the base's, with the changes of the section `model`.

    Args:
      task: its `architecture` is a name of _KINDS.
      vocab_size: of a model from scratch.

    Raises:
      UserError: a change of what the base's weights decide.
    """
    changes, kind = dict(task.model.changes), task.architecture
    if task.init == SCRATCH:
        return _KINDS[kind].config(**{"vocab_size": vocab_size, **changes})
    path, free = base_path(task.init, kind), _KINDS[kind].free
    fixed = [name for name in changes if name not in free]
    if fixed:
        raise UserError(
            f"config key model.changes.{fixed[0]}: the weights of init={task.init} decide it; "
            f"change only {', '.join(free)}, or set init to {SCRATCH}."
        )
    if is_weights_folder(path):
        return replace_fields(read_record(path).config, **changes)
    return replace_fields(architecture(kind).open(path).config, **changes)


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
    return weights_hash(base_path(task.init, task.architecture))


def base_loader(task: Any) -> Callable[[nnx.Module], None] | None:
    """Puts the base's weights into a freshly initialized model, in place; None from scratch."""
    if task.init == SCRATCH:
        return None

    def load(model: nnx.Module) -> None:
        kind, mesh = task.architecture, make_mesh(task.mesh)
        path = base_path(task.init, kind)
        options = {"mesh": mesh, "param_dtype": "float32"}
        if is_weights_folder(path):
            base = load_converted(path, **options)
        else:
            unknown = architecture(kind).open(path).unknown
            given = {name: task.model.changes[name] for name in unknown}
            base = load_published(kind, path, **options, **given)
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
    return open_tokenizer(name or base_path(task.init, task.architecture))


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


def check_vocabulary(task: Any, model: LlamaConfig | T5Config, tokenizer: TextTokenizer) -> None:
    """Refuses a tokenizer with ids that the model lacks."""
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"config key tokenizer={task.tokenizer}: has {tokenizer.vocab_size} tokens, the "
            f"model {model.vocab_size}; name the model's own tokenizer."
        )


def check_rows(task: Any, llama: LlamaConfig, tokenizer: TextTokenizer) -> None:
    """Refuses a tokenizer with ids that the model lacks, and rows longer than it reads."""
    check_vocabulary(task, llama, tokenizer)
    if task.batches.length > llama.positions:
        raise UserError(
            f"config key batches.length={task.batches.length}: the model reads at most "
            f"{llama.positions} tokens; use fewer."
        )
