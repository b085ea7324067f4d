"""Our models in PyTorch, with the same weights: transformers' and those of tests/equivalence.

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
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    scaled_dot_product_attention,
)

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.host import threads
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.llama.keys import publish_llama
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.mcan.keys import publish_mcan_openvqa
from mmqa_jax.models.mcan.network import MCANOpenVQA
from mmqa_jax.models.vlp.keys import publish_vlp
from mmqa_jax.models.vlp.network import VLP
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.layouts import Published
from mmqa_jax.weights.published import write_published
from tests.equivalence.mcan_torch import Projections, TorchMCAN
from tests.equivalence.vlp_torch import TorchVLP

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
    _check_alike(kind, [*info["missing_keys"], *info["unexpected_keys"]])
    return model.eval().to(prepare_torch())


def _check_alike(kind: type, differing: Sequence[str]) -> None:
    if differing:
        raise RunError(
            f"{kind.__name__}: tensors that only one side has: {', '.join(sorted(differing)[:5])}."
        )


def torch_llama(model: Llama) -> torch.nn.Module:
    """transformers' LlamaForCausalLM with the weights of ours (its layers still stacked)."""
    return torch_model(publish_llama(model.config, nnx.state(model)))


def torch_vlp(model: VLP) -> TorchVLP:
    """tests/equivalence's VLP with the weights of ours, on PyTorch's device."""
    source = publish_vlp(model.config, nnx.state(model)).source
    made = _filled(TorchVLP(model.config), source)
    for layer in made.bert["encoder"]["layer"]:
        dropout = layer.attention["self"]["dropout"]
        layer.mix = lambda q, k, v, additive, dropout=dropout: _fused(q, k, v, additive, dropout)
    return made


def vlp_loss(model: TorchVLP, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the tokens `masked_ids` [B, P] at `masked_positions` [B, P]."""
    hidden = model(inputs, inputs["mask"])[-1]
    index = inputs["masked_positions"][:, :, None].expand(-1, -1, hidden.shape[-1])
    logits = model.words(hidden.gather(1, index))  # [B, P, V]
    return cross_entropy(logits.flatten(0, 1).float(), inputs["masked_ids"].flatten())


def torch_mcan(model: MCANOpenVQA) -> TorchMCAN:
    """tests/equivalence's MCAN of openvqa with the weights of ours, on PyTorch's device."""
    source = publish_mcan_openvqa(model.config, nnx.state(model)).source
    made = _filled(TorchMCAN(model.config), source)
    for attention in (module for module in made.modules() if isinstance(module, Projections)):
        attention.mix = lambda q, k, v, closed, dropout=attention.dropout: _fused(
            q, k, v, ~closed[:, None, None], dropout
        )
    return made


def mcan_loss(model: TorchMCAN, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy summed over answers, mean over the batch, as openvqa trains it."""
    logits = model(inputs["question_ids"], inputs["image"]).float()
    entropy = binary_cross_entropy_with_logits(logits, inputs["targets"], reduction="sum")
    return entropy / len(logits)


def _filled(model: torch.nn.Module, source: TensorSource) -> torch.nn.Module:
    tensors = {key: torch.tensor(source.read(key)) for key in source.specs()}
    differing = model.load_state_dict(tensors, strict=False)
    # Of tensors that are tied one is published.
    missing = dict(model.named_parameters()).keys() & differing.missing_keys
    _check_alike(type(model), [*missing, *differing.unexpected_keys])
    return model.eval().to(prepare_torch())


def _fused(q, k, v, mask, dropout: torch.nn.Dropout) -> torch.Tensor:
    """PyTorch's own attention, which a user of it would take; the restatements spell it out."""
    rate = dropout.p if dropout.training else 0.0
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)


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
      loss: (model, batch) -> what is minimized.
      arrays: the batch.
      dtype: of the matrix products; bfloat16 by torch.autocast.
      optimizer: learning rate and other arguments of AdamW.
      compiled: by torch.compile.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor],
        arrays: Mapping[str, np.ndarray],
        dtype: str,
        optimizer: Mapping[str, Any],
        *,
        compiled: bool = False,
    ):
        self._model, self._dtype = model, getattr(torch, dtype)
        self._inputs = tensors_of(arrays)
        self._loss = torch.compile(loss) if compiled else loss
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **optimizer)

    def __call__(self, dropout: bool) -> torch.Tensor:
        """One step; returns the loss before it."""
        self._model.train(dropout)
        low = self._dtype != torch.float32
        device = next(iter(self._inputs.values())).device.type
        with torch.autocast(device, self._dtype, enabled=low):
            loss = self._loss(self._model, self._inputs)
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
