"""The architectures whose weights folders this package writes and reads, one entry each.

Entries name their parts as `module.attribute`, so that the command's help needs no numerical
library. To add an architecture that `mmqa convert` reads: write `models/NAME/keys.py` with its
key map, `open_NAME` and `publish_NAME`, and one entry here.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.config_json import config_from_json

if TYPE_CHECKING:
    from mmqa_jax.weights.layouts import Checkpoint, Published

HF_FOLDER = "folder of transformers (config.json, and safetensors or pytorch_model*.bin, sharded)"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture and what reads and writes it.

    Attributes:
      name: as the command line has it.
      title: what it is, for help.
      model, config: the module class in `mmqa_jax.models`, and the dataclass that it is built from.
      layouts: what `open` reads, for help; without any, only training makes this model.
      exports: what `publish` writes, for help.
      weights: folder of `mmqa_jax.models` whose `keys` read and write it; `name` by default.
      has_variants: configs of a folder are read by `read_NAME`, and their `build` makes the module,
        which may be a subclass of `model`.
      model_types: of transformers' config.json in the folders that `open` reads; an entry with dots
        names a mapping of `mmqa_jax`, whose keys are meant.
      sign: a key of config.json, or an entry of its `architectures`, that tells this model from
        another one of the same model type.
      takes_clip: `open` has an argument `clip`: a CLIP folder, for a checkpoint that has no vision
        tower of its own.
    """

    name: str
    title: str
    model: str
    config: str
    layouts: tuple[str, ...] = ()
    exports: str = ""
    weights: str = ""
    model_types: tuple[str, ...] = ()
    sign: str = ""
    has_variants: bool = False
    takes_clip: bool = False

    @property
    def known_types(self) -> set[str]:
        """`model_types`, with the keys of the mappings in their place."""
        mapped = (_load(f"mmqa_jax.{name}") for name in self.model_types if "." in name)
        return {kind for kind in self.model_types if "." not in kind}.union(*mapped)

    def build(self, config: Any, *, rngs: Any) -> Any:
        """A freshly initialized nnx.Module of a config."""
        if self.has_variants:
            return config.build(rngs=rngs)
        return _load(f"mmqa_jax.models.{self.model}")(config, rngs=rngs)

    def read_config(self, value: Any, where: str) -> Any:
        """The config in a weights folder; the arguments are those of `config_from_json`."""
        if self.has_variants:
            return self._weights("read")(value, where)
        return config_from_json(_load(f"mmqa_jax.models.{self.config}"), value, where)

    def open(self, path: Path, clip: Path | None = None) -> Checkpoint:
        """Opens a checkpoint of any published layout; reads headers only."""
        assert clip is None or self.takes_clip
        arguments = {} if clip is None else {"clip": clip}
        return self._weights("open")(path, **arguments)

    def publish(self, config: Any, state: Any) -> Published:
        """The model under published keys."""
        return self._weights("publish")(config, state)

    def _weights(self, verb: str) -> Any:
        folder = self.weights or self.name
        return _load(f"mmqa_jax.models.{folder}.keys.{verb}_{self.name}")


def _load(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


_RESEARCH = "torch file (.bin .pkl .pt .pth), its training state, or safetensors"
_OWN_KEYS = "safetensors under the original's keys (transformers does not have the model)"

ARCHITECTURES = (
    Architecture(
        name="clip",
        model_types=("clip",),
        title="CLIP with vision transformers",
        model="clip.network.CLIP",
        config="clip.network.CLIPConfig",
        layouts=(
            HF_FOLDER,
            "OpenAI's TorchScript archive (ViT-B-32.pt), or its state dict",
            "open_clip's folder, or its file beside open_clip_config.json",
        ),
        exports="CLIPModel",
    ),
    Architecture(
        name="siglip",
        model_types=("siglip", "siglip2"),
        title="SigLIP and SigLIP 2, also NaFlex",
        model="siglip.network.Siglip",
        config="siglip.network.SiglipConfig",
        layouts=(HF_FOLDER,),
        exports="SiglipModel, Siglip2Model (NaFlex)",
    ),
    Architecture(
        name="modified_resnet",
        title="image tower of CLIP's RN50 to RN50x64",
        model="modified_resnet.network.ModifiedResNet",
        config="modified_resnet.network.ModifiedResNetConfig",
        layouts=("OpenAI's TorchScript archive (RN50x64.pt)", _RESEARCH),
        exports=_OWN_KEYS,
    ),
    Architecture(
        name="bert",
        model_types=("bert",),
        title="BERT and MiniLM encoders",
        model="bert.network.Bert",
        config="bert.network.BertConfig",
        layouts=(HF_FOLDER,),
        exports="BertModel",
    ),
    Architecture(
        name="vlp",
        title="VLP and WebQA_Baseline",
        model="vlp.network.VLP",
        config="vlp.network.VLPConfig",
        has_variants=True,
        layouts=(_RESEARCH,),
        exports=_OWN_KEYS,
    ),
    Architecture(
        name="oscar",
        sign="img_feature_type",
        title="Oscar and Oscar+, captioner and tagger",
        model="oscar.network.Oscar",
        config="oscar.network.OscarConfig",
        layouts=("folder of Oscar (config.json, pytorch_model.bin or safetensors)",),
        exports="safetensors under the original's keys, with the original's config.json",
    ),
    Architecture(
        name="bart",
        model_types=("bart",),
        title="BART",
        model="bart.network.Bart",
        config="bart.config.BartConfig",
        layouts=(HF_FOLDER, "BARTScore's bart.pth (bart-large-cnn's sizes)"),
        exports="BartForConditionalGeneration",
    ),
    Architecture(
        name="llama",
        model_types=("models.llama.families.FAMILIES", "gemma3"),
        title="LLaMA, SmolLM, Mistral, Ministral, Qwen2 and 3, Phi-3, OLMo 2, Granite",
        model="llama.network.Llama",
        config="llama.config.LlamaConfig",
        layouts=(
            HF_FOLDER,
            "Meta's folder (params.json, consolidated.*.pth)",
            "llama2.c's .bin",
            "GGUF (F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q6_K ...) of llama, qwen2, qwen3",
        ),
        exports="LlamaForCausalLM, Qwen3ForCausalLM, ...: the family's class",
    ),
    Architecture(
        name="t5",
        model_types=("models.t5.config.FAMILIES",),
        title="T5, T5 1.1, Flan-T5, mT5",
        model="t5.network.T5",
        config="t5.config.T5Config",
        layouts=(
            HF_FOLDER,
            "GGUF (F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q6_K ...) of t5",
            "folder of Fusion-in-Decoder or KAT (FiDT5)",
        ),
        exports="T5ForConditionalGeneration or MT5ForConditionalGeneration",
    ),
    Architecture(
        name="multimodal_t5",
        sign="T5ForMultimodalGeneration",
        title="Multimodal-CoT's T5",
        model="multimodal_t5.network.MultimodalT5",
        config="multimodal_t5.network.MultimodalT5Config",
        layouts=(
            "folder of mm-cot (T5ForMultimodalGeneration)",
            "a T5's folder (--set features=256: the fusion is new)",
        ),
        exports="T5ForMultimodalGeneration",
    ),
    Architecture(
        name="llava",
        model_types=("models.llava.keys.MODEL_TYPES",),
        title="LLaVA: CLIP or SigLIP, and any family of decoders",
        model="llava.network.Llava",
        config="llava.network.LlavaConfig",
        layouts=(HF_FOLDER, "haotian-liu/LLaVA's folder (--clip: its CLIP's or SigLIP's)"),
        exports="LlavaForConditionalGeneration",
        takes_clip=True,
    ),
    Architecture(
        name="onevision",
        model_types=("llava_onevision",),
        title="LLaVA-OneVision",
        model="onevision.network.Onevision",
        config="onevision.network.OnevisionConfig",
        layouts=(HF_FOLDER,),
        exports="LlavaOnevisionForConditionalGeneration",
    ),
    Architecture(
        name="qwen_vl",
        model_types=("models.qwen_vl.vision.FAMILIES",),
        title="Qwen2.5-VL and Qwen3-VL, without experts",
        model="qwen_vl.network.QwenVL",
        config="qwen_vl.network.QwenVLConfig",
        layouts=(HF_FOLDER,),
        exports="Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration",
    ),
    Architecture(
        name="mcan",
        title="Prophet's MCAN",
        model="mcan.network.MCAN",
        config="mcan.network.MCANConfig",
        layouts=(_RESEARCH,),
        exports=_OWN_KEYS,
    ),
    Architecture(
        name="mcan_openvqa",
        weights="mcan",
        title="openvqa's MCAN, small and large",
        model="mcan.openvqa.MCANOpenVQA",
        config="mcan.openvqa.MCANOpenVQAConfig",
        layouts=(_RESEARCH,),
        exports=_OWN_KEYS,
    ),
    Architecture(
        name="detector",
        weights="detection",
        title="Faster R-CNN of VLP, VinVL and bottom-up attention",
        model="detection.faster_rcnn.FasterRCNN",
        config="detection.faster_rcnn.DetectorConfig",
        layouts=(
            "Detectron's .pkl (VLP's X-101-64x4d-FPN)",
            "maskrcnn-benchmark's .pth (vinvl_vg_x152c4.pth)",
            "detectron2's .pth or .pkl (bua-caffe-frcn-r101_with_attributes.pth)",
        ),
        exports=_OWN_KEYS,
    ),
)

NAMES = tuple(entry.name for entry in ARCHITECTURES)

# Made by training; `mmqa convert` reads no checkpoints of them.
TRAINED = (
    Architecture(
        name="dual_encoder",
        title="dual-stream retriever",
        model="encoders.dual_encoder.DualEncoder",
        config="encoders.dual_encoder.DualEncoderConfig",
    ),
    Architecture(
        name="caption_mcan",
        title="MCAN on captions",
        model="mcan.captions.CaptionMCAN",
        config="mcan.captions.CaptionMCANConfig",
    ),
    Architecture(
        name="patch_mcan",
        title="MCAN on patches",
        model="mcan.patches.PatchMCAN",
        config="mcan.patches.PatchMCANConfig",
    ),
)


def architecture(name: str, where: str = "--model", *, trained: bool = False) -> Architecture:
    """The entry of that name; `trained`: of those that only training makes too."""
    known = {entry.name: entry for entry in (*ARCHITECTURES, *(TRAINED if trained else ()))}
    if name not in known:
        raise UserError(f"{where}={name}: unknown; use one of {', '.join(known)}.")
    return known[name]


def architecture_of(model: Any) -> Architecture | None:
    """The entry of a module, or of the nearest class that it derives from; None: there is none."""
    for kind in type(model).__mro__:
        for entry in (*ARCHITECTURES, *TRAINED):
            if f"{kind.__module__}.{kind.__qualname__}" == f"mmqa_jax.models.{entry.model}":
                return entry
    return None


def model_of(path: Path) -> str | None:
    """The name of the model at a path, by what is there: a folder of ours or of transformers, GGUF.

    None: it does not say, as a file of weights alone.
    """
    from mmqa_jax.core.files import read_json
    from mmqa_jax.models.t5.gguf import ARCHITECTURES as GGUF_T5
    from mmqa_jax.weights.formats.gguf import GGUFSource
    from mmqa_jax.weights.record import is_weights_folder, read_metadata
    from mmqa_jax.weights.sources import gguf_file

    if is_weights_folder(path):
        return str(read_metadata(path).get("model"))
    if path.exists() and (gguf := gguf_file(path)) is not None:
        is_t5 = GGUFSource(gguf).metadata("general.architecture") in GGUF_T5
        return "t5" if is_t5 else "llama"
    if (path / "adapter_config.json").is_file():  # PEFT's, of a LLaMA
        return "llama"
    file = path / "config.json"
    published = read_json(file) if file.is_file() else {}
    if not isinstance(published, dict):
        raise UserError(f"{file}: is not an object; fetch the file again.")
    kind = str(published.get("model_type", ""))
    signs = {*published, *(published.get("architectures") or ())}
    entries = sorted(ARCHITECTURES, key=lambda entry: not entry.sign)
    return next(
        (e.name for e in entries if (e.sign in signs if e.sign else kind in e.known_types)), None
    )


def describe() -> str:
    """All models with what is read and written, as lines for the command's help."""
    lines = []
    for entry in ARCHITECTURES:
        lines.append(f"  {entry.name:<16}{entry.title}")
        lines += [f"{'':18}reads   {layout}" for layout in entry.layouts]
        lines.append(f"{'':18}export  {entry.exports}")
    return "\n".join(lines)
