"""The families of models, each a folder of `mmqa_jax.models` whose `FAMILIES` say what they are.

Whatever the package asks about a model (does it write, does it see, what are its presets, how is it
compared with transformers?) its entry answers. Entries name their parts as `module.attribute` of
`mmqa_jax.models`, so that the command's help needs no numerical library. To add a family: write
`models/NAME/`, with its entry in `__init__.py` and, where `mmqa convert` reads it, `keys.py` with
`open_NAME` and `publish_NAME`; and add NAME to `FOLDERS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.config_json import ForeignModel, config_from_json

if TYPE_CHECKING:
    from mmqa_jax.weights.layouts import Checkpoint, Published

FOLDERS = (
    *("two_towers", "modified_resnet", "bert", "vlp", "oscar", "bart", "llama", "t5"),
    *("llava", "onevision", "mistral3", "qwen_vl", "mcan", "detection", "encoders"),
)

HF_FOLDER = "folder of transformers (config.json, and safetensors or pytorch_model*.bin, sharded)"
RESEARCH = "torch file (.bin .pkl .pt .pth), its training state, or safetensors"
OWN_KEYS = "safetensors under the original's keys (transformers does not have the model)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture: what it is good for, and what reads and writes it."""

    name: str  # as the command line has it
    title: str  # what it is, for help
    # model, config: the module class, and the dataclass that it is built from.
    model: str
    config: str
    # What `open` reads, for help; without any, only training makes this model.
    layouts: tuple[str, ...] = ()
    exports: str = ""  # what `publish` writes, for help
    # Of transformers' config.json in the folders that `open` reads; an entry with dots names a
    # mapping of `mmqa_jax.models`, whose keys are meant.
    model_types: tuple[str, ...] = ()
    # The names of architectures in the GGUF files that `open` reads, written alike.
    gguf: tuple[str, ...] = ()
    # A key of config.json, or an entry of its `architectures`, that tells this model from another
    # one of the same model type.
    sign: str = ""
    # Configs of a folder are read by `read_NAME`, and their `build` makes the module, which may be
    # a subclass of `model`.
    has_variants: bool = False
    # `open` has an argument `clip`: a CLIP folder, for a checkpoint that has no vision tower of its
    # own.
    takes_clip: bool = False
    # Two codes prepare its texts and pictures, and `mmqa convert` keeps which.
    takes_preprocessing: bool = False
    noun: str = ""  # what a sentence calls it, where it writes texts
    # `mmqa prompt` answers with it, and how it does: as a decoder behind the prompt, or as an
    # encoder of the prompt and a decoder; "": it writes no texts by itself.
    writes: Literal["", "decoder", "encoder-decoder"] = ""
    # A prompt may have pictures. Its config has the decoder's as `llama` and the tower's as
    # `vision`.
    sees: bool = False
    presets: str = ""  # mapping of published sizes, name -> config, which `mmqa plan` knows
    base: str = ""  # `Base`, if a run may fine-tune it
    # Of `model_types`, those that make one vector of a picture as well as of a text.
    embeds: tuple[str, ...] = ()
    check: str = ""  # `common.comparison.Check`, if transformers has it
    lora: str = ""  # module that adds LoRA's additions to it; "": it takes none
    peft: bool = False  # PEFT's folders of additions are read and written
    # Function of a checkpoint: the module without stacks, and the checkpoint for it.
    layers_apart: str = ""

    @property
    def known_types(self) -> set[str]:
        """`model_types`, with the keys of the mappings in their place."""
        return _names(self.model_types)

    def part(self, question: str) -> Any:
        """The `presets`, `base`, `check` or `layers_apart` that the entry names, or None."""
        return _load(name) if (name := getattr(self, question)) else None

    @property
    def additions(self) -> Any:
        """The module that `lora` names."""
        return importlib.import_module(f"mmqa_jax.models.{self.lora}")

    def build(self, config: Any, *, rngs: Any) -> Any:
        """A freshly initialized nnx.Module of a config."""
        if self.has_variants:
            return config.build(rngs=rngs)
        return _load(self.model)(config, rngs=rngs)

    def read_config(self, value: Any, where: str) -> Any:
        """The config in a weights folder; the arguments are those of `config_from_json`."""
        if self.has_variants:
            return self._keys("read")(value, where)
        return config_from_json(_load(self.config), value, where)

    def open(self, path: Path, clip: Path | None = None) -> Checkpoint:
        """Opens a checkpoint of any published layout; reads headers only."""
        assert clip is None or self.takes_clip
        arguments = {} if clip is None else {"clip": clip}
        try:
            return self._keys("open")(path, **arguments)
        except ForeignModel as error:
            raise UserError(f"{error.what}; {_remedy_for(error.model_type)}.") from error

    def publish(self, config: Any, state: Any) -> Published:
        """The model under published keys."""
        return self._keys("publish")(config, state)

    def _keys(self, verb: str) -> Any:
        folder = self.model.partition(".")[0]
        return _load(f"{folder}.keys.{verb}_{self.name}")


class Base(NamedTuple):
    """How a run fine-tunes an architecture."""

    # title, examples: what messages call a base, and what they name as one.
    title: str
    examples: str
    # Makes the model's config from scratch, of its part and the fields of `changes`.
    config: Callable[..., Any]
    # Of each section of a run's `model` with changes, the fields that the weights do not decide.
    free: Mapping[str, tuple[str, ...]]
    # The part of the config that each section changes; empty where that is the whole.
    parts: Mapping[str, str] = {}
    # Tokens of a tokenizer that is trained from scratch, the end of an answer first.
    special: tuple[str, ...] = ("<|end|>",)
    chat: str | None = None  # template of such a tokenizer
    published_as: str = ""  # the architecture of a published base, "" for its own


def _load(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"mmqa_jax.models.{module}"), attribute)


def _names(entries: tuple[str, ...]) -> set[str]:
    mapped = (_load(name) for name in entries if "." in name)
    return {name for name in entries if "." not in name}.union(*mapped)


@functools.cache
def _entries() -> dict[str, Architecture]:
    folders = (importlib.import_module(f"mmqa_jax.models.{name}") for name in FOLDERS)
    return {entry.name: entry for folder in folders for entry in folder.FAMILIES}


def architectures(*, trained: bool = False) -> dict[str, Architecture]:
    """The entries that `mmqa convert` reads, by name; `trained`: those that only training makes,
    too."""
    return {name: entry for name, entry in _entries().items() if entry.layouts or trained}


def nouns(question: str) -> str:
    """What a sentence calls those whose entries answer: `LLaMA, LLaVA or T5`.

    question: an attribute, such as `writes` or `lora`.
    """
    words = [entry.noun for entry in architectures().values() if getattr(entry, question)]
    *others, last = sorted(words, key=str.casefold)
    return f"{', '.join(others)} or {last}"


def names() -> tuple[str, ...]:
    """The values of `--model` of `mmqa convert`."""
    return tuple(architectures())


def architecture(name: str, where: str = "--model", *, trained: bool = False) -> Architecture:
    """The entry of that name; `trained`: of those that only training makes, too."""
    known = architectures(trained=trained)
    if name not in known:
        raise UserError(f"{where}={name}: unknown; use one of {', '.join(known)}.")
    return known[name]


def architecture_of(model: Any) -> Architecture | None:
    """The entry of a module or of a config, or of the nearest class that it derives from; None:
    there is none."""
    entries = _entries().values()
    known = {name: entry for entry in entries for name in (entry.model, entry.config)}
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__)
    names = (name.removeprefix("mmqa_jax.models.") for name in kinds)
    return next((known[name] for name in names if name in known), None)


def model_of(path: Path) -> str | None:
    """The name of the model at a path, by what is there: a folder of ours, of transformers or of
    PEFT, or a GGUF file.

    None: it does not say, as a file of weights alone.
    """
    from mmqa_jax.core.files import read_json
    from mmqa_jax.weights.formats.gguf import GGUFSource
    from mmqa_jax.weights.layouts import gguf_file
    from mmqa_jax.weights.record import is_weights_folder, read_metadata

    if is_weights_folder(path):
        return str(read_metadata(path).get("model"))
    known = architectures().values()
    if path.exists() and (gguf := gguf_file(path)) is not None:
        kind = GGUFSource(gguf).metadata("general.architecture")
        readers = [entry for entry in known if entry.gguf]  # the first refuses a kind it lacks
        return next(
            (entry.name for entry in readers if kind in _names(entry.gguf)), readers[0].name
        )
    if (path / "adapter_config.json").is_file():  # PEFT's
        return next(entry.name for entry in known if entry.peft)
    file = path / "config.json"
    published = read_json(file) if file.is_file() else {}
    if not isinstance(published, dict):
        raise UserError(f"{file}: is not an object; fetch the file again.")
    kind = str(published.get("model_type", ""))
    signs = {*published, *(published.get("architectures") or ())}
    entries = sorted(known, key=lambda entry: not entry.sign)
    return next(
        (e.name for e in entries if (e.sign in signs if e.sign else kind in e.known_types)), None
    )


def check_declared(path: Path) -> None:
    """UserError, with what is near, for a config.json in a folder whose model type is not read."""
    from mmqa_jax.core.files import read_json

    file = path / "config.json"
    published = read_json(file) if file.is_file() else {}
    if "model_type" in published:
        kind = published["model_type"]
        problem = f"{file}: model_type is {kind!r}, which `mmqa convert` does not read"
        raise UserError(f"{problem}; {_remedy_for(kind)}.")


def _remedy_for(model_type: Any) -> str:
    """What to do with a checkpoint of a model type that was not expected: what reads it, else the
    nearest model type that is read, and where else it can be asked."""
    types = {kind: entry.name for entry in architectures().values() for kind in entry.known_types}
    if isinstance(model_type, str) and model_type in types:
        return (
            f"give a checkpoint of that model, or --model={types[model_type]} to convert this one"
        )
    elsewhere = "serve this one elsewhere (vLLM, llama.cpp) and ask it by --backend=openai"
    near = difflib.get_close_matches(str(model_type), types, n=1)
    near = [
        candidate for candidate in near if candidate[:3] == str(model_type)[:3]
    ]  # molmo is no olmoe
    if not near:
        return f"{elsewhere}; `mmqa models` lists what is read here"
    return (
        f"the nearest by name that is read is {near[0]!r} (`mmqa models` lists all): give such a "
        f"checkpoint, or {elsewhere}"
    )


def describe() -> str:
    """All models with what is read and written, as lines for the command's help."""
    lines = []
    for entry in architectures().values():
        lines.append(f"  {entry.name:<16}{entry.title}")
        lines += [f"{'':18}reads   {layout}" for layout in entry.layouts]
        lines.append(f"{'':18}export  {entry.exports}")
    return "\n".join(lines)
