"""The architectures that `mmqa convert` knows, one entry each.

An entry names its parts as `module:attribute`, so that the command's help needs no numerical
library. To add an architecture: write its opener (see weights.openers), its exporter (see
weights.exports), and one entry here.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from mmqa_jax.core.errors import UserError

HF_FOLDER = "folder of transformers (config.json, and safetensors or pytorch_model*.bin, sharded)"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture and what reads and writes it.

    Attributes:
      name: as the command line has it.
      title: what it is, for help.
      model, config: the module class, and the dataclass that it is built from.
      opener: (path) -> openers.Checkpoint, of any published layout; reads headers only.
      exporter: (config, state) -> exports.Published.
      layouts: what the opener reads, for help.
      exports: what the exporter writes, for help.
      takes_clip: the opener has an argument `clip`: a CLIP folder, for a checkpoint that has no
        vision tower of its own.
    """

    name: str
    title: str
    model: str
    config: str
    opener: str
    exporter: str
    layouts: tuple[str, ...]
    exports: str
    takes_clip: bool = False

    def part(self, name: str) -> Any:
        """The object that the attribute `name` (model, config, opener, ...) stands for."""
        module, _, attribute = getattr(self, name).partition(":")
        return getattr(importlib.import_module(module), attribute)


_OPENERS, _EXPORTS = "mmqa_jax.weights.openers", "mmqa_jax.weights.exports"
_MODELS = "mmqa_jax.models"
_RESEARCH = "torch file (.bin .pkl .pt .pth), its training state, or safetensors"
_OWN_KEYS = "safetensors under the original's keys (transformers has no such model)"

ARCHITECTURES = (
    Architecture(
        name="clip",
        title="CLIP with vision transformers",
        model=f"{_MODELS}.clip:CLIP",
        config=f"{_MODELS}.clip:CLIPConfig",
        opener=f"{_OPENERS}:open_clip",
        exporter=f"{_EXPORTS}:publish_clip",
        layouts=(HF_FOLDER, "OpenAI's TorchScript archive (ViT-B-32.pt), or its state dict"),
        exports="CLIPModel",
    ),
    Architecture(
        name="modified_resnet",
        title="image tower of CLIP's RN50 to RN50x64",
        model=f"{_MODELS}.modified_resnet:ModifiedResNet",
        config=f"{_MODELS}.modified_resnet:ModifiedResNetConfig",
        opener=f"{_OPENERS}:open_modified_resnet",
        exporter=f"{_EXPORTS}:publish_modified_resnet",
        layouts=("OpenAI's TorchScript archive (RN50x64.pt)", _RESEARCH),
        exports=_OWN_KEYS,
    ),
    Architecture(
        name="bert",
        title="BERT and MiniLM encoders",
        model=f"{_MODELS}.bert:Bert",
        config=f"{_MODELS}.bert:BertConfig",
        opener=f"{_OPENERS}:open_bert",
        exporter=f"{_EXPORTS}:publish_bert",
        layouts=(HF_FOLDER,),
        exports="BertModel",
    ),
    Architecture(
        name="vlp",
        title="VLP and WebQA_Baseline",
        model=f"{_MODELS}.vlp:VLP",
        config=f"{_MODELS}.vlp:VLPConfig",
        opener=f"{_OPENERS}:open_vlp",
        exporter=f"{_EXPORTS}:publish_vlp",
        layouts=(_RESEARCH,),
        exports=_OWN_KEYS,
    ),
    Architecture(
        name="oscar",
        title="Oscar and Oscar+, captioner and tagger",
        model=f"{_MODELS}.oscar:Oscar",
        config=f"{_MODELS}.oscar:OscarConfig",
        opener=f"{_OPENERS}:open_oscar",
        exporter=f"{_EXPORTS}:publish_oscar",
        layouts=("folder of Oscar (config.json, pytorch_model.bin or safetensors)",),
        exports="safetensors under the original's keys, with the original's config.json",
    ),
    Architecture(
        name="bart",
        title="BART",
        model=f"{_MODELS}.bart:Bart",
        config=f"{_MODELS}.bart_config:BartConfig",
        opener=f"{_OPENERS}:open_bart",
        exporter=f"{_EXPORTS}:publish_bart",
        layouts=(HF_FOLDER, "BARTScore's bart.pth (bart-large-cnn's sizes)"),
        exports="BartForConditionalGeneration",
    ),
    Architecture(
        name="llama",
        title="LLaMA 1, 2, 3, Vicuna, SmolLM2",
        model=f"{_MODELS}.llama:Llama",
        config=f"{_MODELS}.llama_config:LlamaConfig",
        opener=f"{_OPENERS}:open_any_llama",
        exporter=f"{_EXPORTS}:publish_llama",
        layouts=(
            HF_FOLDER,
            "Meta's folder (params.json, consolidated.*.pth)",
            "llama2.c's .bin",
            "GGUF (F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q6_K ...)",
        ),
        exports="LlamaForCausalLM",
    ),
    Architecture(
        name="llava",
        title="LLaVA-1.5",
        model=f"{_MODELS}.llava:Llava",
        config=f"{_MODELS}.llava:LlavaConfig",
        opener=f"{_OPENERS}:open_any_llava",
        exporter=f"{_EXPORTS}:publish_llava",
        layouts=(HF_FOLDER, "haotian-liu/LLaVA's folder (--clip names its CLIP's folder)"),
        exports="LlavaForConditionalGeneration",
        takes_clip=True,
    ),
    Architecture(
        name="mcan",
        title="Prophet's MCAN",
        model=f"{_MODELS}.mcan:MCAN",
        config=f"{_MODELS}.mcan:MCANConfig",
        opener=f"{_OPENERS}:open_mcan",
        exporter=f"{_EXPORTS}:publish_mcan",
        layouts=(_RESEARCH,),
        exports=_OWN_KEYS,
    ),
    Architecture(
        name="mcan_openvqa",
        title="openvqa's MCAN, small and large",
        model=f"{_MODELS}.mcan_openvqa:MCANOpenVQA",
        config=f"{_MODELS}.mcan_openvqa:MCANOpenVQAConfig",
        opener=f"{_OPENERS}:open_mcan_openvqa",
        exporter=f"{_EXPORTS}:publish_mcan_openvqa",
        layouts=(_RESEARCH,),
        exports=_OWN_KEYS,
    ),
)

NAMES = tuple(entry.name for entry in ARCHITECTURES)


def architecture(name: str, where: str = "--model") -> Architecture:
    """The entry of that name.

    Raises:
      UserError: there is none.
    """
    for entry in ARCHITECTURES:
        if entry.name == name:
            return entry
    raise UserError(f"{where}={name}: unknown; use one of {', '.join(NAMES)}.")


def describe() -> str:
    """All models with what is read and written, as lines for the command's help."""
    lines = []
    for entry in ARCHITECTURES:
        lines.append(f"  {entry.name:<16}{entry.title}")
        lines += [f"{'':18}reads   {layout}" for layout in entry.layouts]
        lines.append(f"{'':18}export  {entry.exports}")
    return "\n".join(lines)
