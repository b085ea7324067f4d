"""The language model that a run fine-tunes: its sizes, its tokenizer and its weights."""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar

import jax
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import hold_base, language_model
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.prompting import text_tokenizer
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, TextTokenizer, open_text_tokenizer
from mmqa_jax.tasks.task import Recipe, Task
from mmqa_jax.weights.adapters import Adapter
from mmqa_jax.weights.bundled import LANGUAGE_MODELS
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.folder import load_converted, read_record, weights_hash
from mmqa_jax.weights.hub import find_model, is_hub_name
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder
from mmqa_jax.weights.registry import Base, architecture, model_of

SCRATCH = "scratch"


def _base(kind: str) -> Base:
    return architecture(kind).part("base")


def kind_of_base(name: str) -> str:
    """The architecture that `init` names, of a folder that is there; "": it is not known."""
    path = find_model(name, "config key init") if is_hub_name(name) else Path(name)
    return (model_of(path) or "") if path.exists() else ""


def base_path(name: str, kind: str = "llama") -> Path:
    """Folder or file of the published, converted or trained model that `init` names.

    kind: its architecture.
    """
    wanted = _base(kind)
    if is_hub_name(name):
        path = find_model(name, "config key init")
    else:
        path = LANGUAGE_MODELS[name]() if name in LANGUAGE_MODELS else Path(name)
    if not name or not path.exists():
        raise UserError(
            f"config key init={name}: no such file or folder; name a {wanted.title} as "
            f"`mmqa prompt --model` does ({wanted.examples}), or {SCRATCH}."
        )
    published_as = "" if is_weights_folder(path) else wanted.published_as
    if (model_type := model_of(path) or "llama") != (published_as or kind):
        raise UserError(
            f"config key init={name}: holds a {model_type}, a {kind} was expected; name a "
            f"{wanted.title} ({wanted.examples})."
        )
    return path


def model_config(task: Any, vocab_size: int) -> Any:
    """The model's config: the base's, with the changes of the section `model`.

    Args:
      task: its `architecture` says which sections of `model` change which part (`Base.parts`).
      vocab_size: of a model from scratch.
    """
    kind = _base(task.architecture)
    changes = {section: dict(getattr(task.model, section)) for section in kind.free}
    fields, *of_parts = changes.values()
    if task.init == SCRATCH:
        return kind.config(*of_parts, **{"vocab_size": vocab_size, **fields})
    path = base_path(task.init, task.architecture)
    for section, free in kind.free.items():
        fixed = [name for name in changes[section] if name not in free]
        if fixed:
            raise UserError(
                f"config key model.{section}.{fixed[0]}: the weights of init={task.init} decide "
                f"it; change only {', '.join(free)}, or set init to {SCRATCH}."
            )
    unknown: Collection[str] = ()
    if is_weights_folder(path):
        base = read_record(path).config
    else:
        opened = architecture(task.architecture).open(path)
        base, unknown = opened.config, opened.unknown
    width = fields.get("features")
    if width is not None and "features" not in unknown and width != base.features:
        raise UserError(
            f"config key model.changes.features={width}: init={task.init} reads vectors of "
            f"{base.features} values; set it to that, or init to a T5 without pictures."
        )
    if not kind.parts:
        return replace_fields(base, **fields)
    parts = {
        part: replace_fields(getattr(base, part), **changes[section])
        for section, part in kind.parts.items()
    }
    return dataclasses.replace(base, **parts)


def adapter_of(task: Any) -> Adapter | None:
    """Returns the adapter that a run adds to a published base; None: it has a whole model."""
    lora = getattr(task.model, "lora", None)
    if lora is None or task.init == SCRATCH:
        return None
    config = model_config(task, 0)
    targets = lora.targets or getattr(config, "llama", config).linears
    return Adapter(task.init, base_fingerprint(task), lora.rank, lora.alpha, targets)


def base_fingerprint(task: Any) -> str:
    """Hash of the base's weights; "" from scratch. A run resumes on the same base alone."""
    if task.init == SCRATCH:
        return ""
    return weights_hash(base_path(task.init, task.architecture))


def base_loader(task: Any) -> Callable[[nnx.Module], None] | None:
    """Puts the base's weights into a model of shapes, in place; None from scratch."""
    if task.init == SCRATCH:
        return None

    def load(model: nnx.Module) -> None:
        kind, mesh = task.architecture, make_mesh(task.mesh)
        path, lora = base_path(task.init, kind), getattr(task.model, "lora", None)
        is_held = lora is not None and lora.base != "float32"
        dtype = task.model.changes.get("dtype", "float32") if is_held else "float32"
        options = {"mesh": mesh, "param_dtype": dtype}
        if is_weights_folder(path):
            base = load_converted(path, **options)
        else:
            unknown = architecture(kind).open(path).unknown
            changed = {name: task.model.changes[name] for name in unknown}
            base = load_published(kind, path, **options, **changed)
        if lora is not None:
            hold_base(language_model(base), lora)
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
    return open_text_tokenizer(folder)


def _new_tokenizer(task: Any, corpus: Corpus) -> Any:
    name = task.tokenizer
    if name.startswith("corpus:"):
        size, kind = name.removeprefix("corpus:"), _base(task.architecture)
        least = len(pre_tokenizers.ByteLevel.alphabet()) + len(kind.special)
        if not size.isdecimal() or len(size) > 9 or int(size) < least:
            raise UserError(
                f"config key tokenizer={name}: write corpus:N with a number of tokens, {least} or "
                "more (every byte is one)."
            )
        return _train_tokenizer(corpus, int(size), kind)
    if not name and task.init == SCRATCH:
        raise UserError(
            "config key tokenizer is empty, but a model from scratch has none; write corpus:N or "
            "name a tokenizer."
        )
    return open_text_tokenizer(name or base_path(task.init, task.architecture))


def _train_tokenizer(corpus: Corpus, size: int, kind: Base) -> TextTokenizer:
    """Byte-level BPE (as GPT-2's) of the train questions, with choices and rationales."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token) for token in kind.special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (" ".join((q.question, *q.choices, q.rationale)) for q in corpus.questions("train"))
    tokenizer.train_from_iterator(texts, trainer)
    chat = None if kind.chat is None else ChatTemplate(kind.chat)
    return TextTokenizer(tokenizer, chat, end_ids=(tokenizer.token_to_id(kind.special[0]),))


def check_vocabulary(task: Any, model: LlamaConfig | T5Config, tokenizer: TextTokenizer) -> None:
    """Refuses a tokenizer with ids that the model lacks."""
    if tokenizer.vocab_size > model.vocab_size:
        scratch = task.init == SCRATCH
        remedy = "leave model.changes.vocab_size out" if scratch else "name the model's own"
        raise UserError(
            f"config key tokenizer={task.tokenizer}: has {tokenizer.vocab_size} tokens, the "
            f"model {model.vocab_size}; {remedy}."
        )


def check_rows(task: Any, llama: LlamaConfig, tokenizer: TextTokenizer, pictured: int = 0) -> None:
    """Refuses a tokenizer with ids that the model lacks, and rows longer than it reads.

    pictured: tokens of the largest picture of a row, beside batches.length.
    """
    check_vocabulary(task, llama, tokenizer)
    if task.batches.length + pictured > llama.positions:
        beside = f" with {pictured} of a picture (model.vision.max_pixels)" if pictured else ""
        raise UserError(
            f"config key batches.length={task.batches.length}:{beside} the model reads at most "
            f"{llama.positions} tokens; use fewer."
        )


# What tasks share that train a language model or an encoder-decoder on texts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModelTask(Task):
    """A task whose model reads a language model's tokens and starts from a published one.

    `tokenizer`: "" for the base's own; see base_llm.make_text_tokenizer.
    """

    architecture: ClassVar[str]  # of the model, as base_llm has it

    def tokenizer_kind(self) -> tuple[str, str]:
        return TextTokenizer.kind, "that of a language model"

    def make_tokenizer(self, corpus: Corpus, folder: Path) -> TextTokenizer:
        return make_text_tokenizer(self, corpus, folder)

    def open_tokenizer(self, folder: Path) -> TextTokenizer:
        return text_tokenizer.open_text_tokenizer(folder)

    def check_trained(self) -> None:
        """Refuses a filter of the trained parameters, which the section `model` names."""
        if self.loop.optimizer.trainable is not None:
            raise UserError(
                f"config key train.optimizer.trainable={self.loop.optimizer.trainable}: the "
                "section model says what is trained (model.lora: its additions); set it to None."
            )

    def check_targets(self, targets: int) -> None:
        """Refuses answers without a token."""
        if targets < 1:
            raise UserError(f"config key batches.targets={targets}: give 1 or more.")

    def check_lengths(self, lengths: tuple[int, ...]) -> None:
        """Refuses lengths of prompts that are none, or not ascending."""
        if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise UserError(
                f"config key batches.lengths={lengths}: ascending numbers of tokens were expected, "
                "such as (128, 256, 512); change them."
            )

    def metadata(self, tokenizer: TextTokenizer) -> dict[str, Any]:
        """Further values of model.json."""
        return {
            "base": base_fingerprint(self),
            "token_ids": {"eos_token_id": list(tokenizer.end_ids)},
            **({"adapter": dataclasses.asdict(adapter)} if (adapter := adapter_of(self)) else {}),
        }

    def recipe_of(self, objective: Any, batches: Any, tokenizer: TextTokenizer) -> Recipe:
        """Returns the recipe of a run that begins at the base."""
        return Recipe(
            objective,
            batches,
            base_loader(self),
            finish=self.finisher(objective),
            metadata=self.metadata(tokenizer),
        )

    def finisher(self, objective: Any) -> Callable[[nnx.Module], nnx.Module] | None:
        """`finish` of the recipe: a whole model, or the additions to a published base alone."""
        return None if adapter_of(self) else objective.finish
