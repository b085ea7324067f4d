"""Our models in PyTorch, with the same weights: transformers', and VLP on top of its BERT.

Weights go through `mmqa_jax.weights.published` and a temporary folder into `from_pretrained`, as
those of a user who publishes a model. PyTorch computes with as many threads as XLA.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
import transformers
from flax import nnx
from torch.nn.functional import cross_entropy

from mmqa_jax.bench.timing import threads
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.llama import Llama
from mmqa_jax.models.vlp import VLP
from mmqa_jax.weights.formats.safetensors import ArraySource
from mmqa_jax.weights.layouts import Published
from mmqa_jax.weights.models.bert import bert_to_hf
from mmqa_jax.weights.models.llama import publish_llama
from mmqa_jax.weights.models.vlp import publish_vlp
from mmqa_jax.weights.published import write_published

Work = Callable[[], torch.Tensor]


def prepare_torch() -> str:
    """Gives PyTorch XLA's threads; returns the device that corresponds to jax's: cpu or cuda.

    Raises:
      RunError: jax has an accelerator, PyTorch has none.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if platform() == "cpu":
        torch.set_num_threads(threads())
        return "cpu"
    if not torch.cuda.is_available():
        raise RunError(
            f"PyTorch {torch.__version__} finds no CUDA device where jax uses "
            f"{jax.devices()[0].device_kind}: install its CUDA build, or set JAX_PLATFORMS=cpu."
        )
    return "cuda"


def torch_model(published: Published, **options: Any) -> torch.nn.Module:
    """The transformers model of a published one, in evaluation mode, on PyTorch's device.

    Args:
      published: its config names the class (`architectures`).
      options: of `from_pretrained`.

    Raises:
      RunError: a tensor is missing or was not used, so that the two models would differ.
    """
    kind = getattr(transformers, published.config["architectures"][0])
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as folder:
        write_published(folder, published)
        model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    odd = [key for kind in ("missing_keys", "unexpected_keys") for key in info[kind]]
    if odd:
        raise RunError(
            f"{kind.__name__}: tensors that only one side has: {', '.join(sorted(odd)[:5])}."
        )
    return model.eval().to(prepare_torch())


def torch_llama(model: Llama) -> torch.nn.Module:
    """transformers' LlamaForCausalLM with the weights of ours (its layers still stacked)."""
    return torch_model(publish_llama(model.config, nnx.state(model)))


class TorchVLP(torch.nn.Module):
    """VLP in PyTorch. transformers has none: its BERT computes all but the region embeddings."""

    def __init__(self, trunk: torch.nn.Module, content: Sequence[int], position: Sequence[int]):
        """Makes the model.

        Args:
          trunk: a BertForMaskedLM.
          content, position: layer widths of the two embeddings of a region.
        """
        super().__init__()
        self.trunk = trunk
        self.vis_embed = _relu_stack(content)
        self.vis_pe_embed = _relu_stack(position)

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states [B, L, H]; `inputs` as VLPInputs, with `mask` bool [B, 1, L, L]."""
        table = self.trunk.bert.embeddings
        tokens = table.word_embeddings(inputs["input_ids"])
        positions = table.position_embeddings(inputs["position_ids"])
        content = table.dropout(self.vis_embed(inputs["region_features"]))
        position = table.dropout(self.vis_pe_embed(inputs["region_positions"]))
        rest = slice(1 + content.shape[1], None)
        tokens = torch.cat([tokens[:, :1], content, tokens[:, rest]], dim=1)
        positions = torch.cat([positions[:, :1], position, positions[:, rest]], dim=1)
        types = table.token_type_embeddings(inputs["token_type_ids"])
        x = table.dropout(table.LayerNorm(tokens + positions + types))
        return self.trunk.bert.encoder(x, attention_mask=inputs["mask"])[0]

    def loss(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean cross-entropy of the tokens `masked_ids` [B, P] at `masked_positions` [B, P]."""
        hidden = self(inputs)
        index = inputs["masked_positions"][:, :, None].expand(-1, -1, hidden.shape[-1])
        logits = self.trunk.cls(hidden.gather(1, index))  # [B, P, V]
        return cross_entropy(logits.flatten(0, 1).float(), inputs["masked_ids"].flatten())


def torch_vlp(model: VLP) -> TorchVLP:
    """TorchVLP with the weights of ours, on PyTorch's device."""
    config, source = model.config, publish_vlp(model.config, nnx.state(model)).source
    tensors = {key: source.read(key) for key in source.specs()}
    of_trunk = {key: x for key, x in tensors.items() if key.startswith(("bert.", "cls."))}
    entries = bert_to_hf(config.bert) | {"architectures": ["BertForMaskedLM"]}
    trunk = torch_model(Published(ArraySource(of_trunk, "VLP's trunk"), entries))
    hidden = config.bert.hidden
    made = TorchVLP(
        trunk,
        (config.region_features, *config.visual_hidden, hidden),
        (config.region_positions, hidden),
    )
    for name in ("vis_embed", "vis_pe_embed"):
        own = {
            key.removeprefix(f"{name}."): torch.tensor(x)
            for key, x in tensors.items()
            if key.startswith(f"{name}.")
        }
        getattr(made, name).load_state_dict(own)
    return made.eval().to(prepare_torch())


def _relu_stack(widths: Sequence[int]) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [torch.nn.Linear(*widths[i : i + 2]), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def tensors_of(arrays: Mapping[str, np.ndarray], dtype: str = "float32") -> dict[str, Any]:
    """Inputs on PyTorch's device; the floating ones in `dtype`."""
    device = prepare_torch()
    tensors = {key: torch.tensor(x, device=device) for key, x in arrays.items()}
    kind = getattr(torch, dtype)
    return {key: x.to(kind) if x.is_floating_point() else x for key, x in tensors.items()}


def forward_work(
    model: torch.nn.Module,
    call: Callable[..., torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    dtype: str,
    *,
    compiled: bool = False,
) -> Work:
    """Runs `call(model, **inputs)` without gradients and returns when it is done.

    Args:
      model: is cast to `dtype` in place.
      call: returns what is compared.
      arrays: its inputs.
      dtype: of parameters and inputs.
      compiled: by torch.compile.
    """
    model.to(getattr(torch, dtype))
    inputs = tensors_of(arrays, dtype)

    def forward() -> torch.Tensor:
        return call(model, **inputs)

    run = torch.compile(forward) if compiled else forward

    def work() -> torch.Tensor:
        with torch.inference_mode():
            return _ready(run())

    return work


class TrainStep:
    """AdamW on one batch, step after step.

    Args:
      model: trained in place; parameters stay float32.
      arrays: the batch of `TorchVLP.loss`.
      dtype: of the matrix products; bfloat16 by torch.autocast.
      optimizer: learning rate and other arguments of AdamW.
      compiled: by torch.compile.
    """

    def __init__(
        self,
        model: TorchVLP,
        arrays: Mapping[str, np.ndarray],
        dtype: str,
        optimizer: Mapping[str, Any],
        *,
        compiled: bool = False,
    ):
        self._model, self._dtype = model, getattr(torch, dtype)
        self._inputs = tensors_of(arrays)
        self._loss = torch.compile(model.loss) if compiled else model.loss
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **optimizer)

    def __call__(self, dropout: bool) -> torch.Tensor:
        """One step; returns the loss before it."""
        self._model.train(dropout)
        low = self._dtype != torch.float32
        device = next(iter(self._inputs.values())).device.type
        with torch.autocast(device, self._dtype, enabled=low):
            loss = self._loss(self._inputs)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return _ready(loss.detach())


def matmul_work(side: int, dtype: str) -> Work:
    """One product of two square matrices."""
    x = torch.randn(side, side, device=prepare_torch()).to(getattr(torch, dtype))
    return lambda: _ready(x @ x)


def _ready(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        torch.cuda.synchronize()
    return x
