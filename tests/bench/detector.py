"""`python -m tests.bench detector`: the feature maps of the detectors beside PyTorch's convolutions.

Same random weights, picture and threads on both sides, in turn; each row first checks that both
compute the same. The peers are the restatements of tests/equivalence: torchvision's Faster R-CNN,
which no extra installs, has the same convolutions and frozen norms. Processor time is counted, so
that other work on the machine hardly changes a ratio.

torch is needed to import this module.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from mmqa_jax.core.flops import traced_flops
from mmqa_jax.inference.region_detector import KINDS
from mmqa_jax.models.detection.faster_rcnn import DetectorConfig, FasterRCNN
from mmqa_jax.weights.models.detector import publish_detector
from tests.bench import Options, torch_reference
from tests.bench.runner import Case, Peak, measure, start_device
from tests.equivalence.detectors_torch import TorchDetector

ROWS = ("vlp_x101", "vinvl_x152c4", "bottom_up_r101")
_PEERS = dict(zip(ROWS, ("detectron", "maskrcnn", "detectron2"), strict=True))
_SIZES = {"small": (256, 320), "full": (800, 1088)}  # height and width of the picture
_BLOCKS = (1, 1, 3, 1)  # of the stages in the small size: the published widths, less deep
_ROUNDS = 3


def run(options: Options) -> dict[str, Any]:
    """Measures all rows, or those selected; `small` sizes on a CPU, `full` elsewhere."""
    size = start_device(options)
    torch_reference.prepare_torch()
    peak = Peak(1024, "float32", with_torch=True)
    peak.measure(_ROUNDS)
    wanted = options.chosen(ROWS)
    return measure(
        "detector",
        cases(size, wanted),
        wanted,
        options.rounds or _ROUNDS,
        peak=peak,
        threads=torch.get_num_threads(),
    )


def cases(size: str, wanted: tuple[str, ...]) -> Iterator[Case]:
    """The rows `wanted`, each built when it is needed."""
    for kind in KINDS:
        if kind.name in wanted:
            config = kind.config
            if size == "small":
                backbone = dataclasses.replace(config.backbone, blocks=_BLOCKS)
                config = dataclasses.replace(config, backbone=backbone)
            yield _maps(kind.name, config, _SIZES[size])


def _maps(name: str, config: DetectorConfig, size: tuple[int, int]) -> Case:
    """Trunk and pyramid of one picture."""
    model = FasterRCNN(config, rngs=nnx.Rngs(0))
    theirs = TorchDetector(_PEERS[name], config)
    source = publish_detector(config, nnx.state(model)).source
    for key in source.specs():
        theirs.tensors[key] = torch.from_numpy(np.array(source.read(key)))
    pixels = np.random.default_rng(0).normal(size=(*size, 3)).astype(np.float32)
    graphdef, state = nnx.split(model)
    inputs = jnp.asarray(pixels[None]), jnp.asarray([size], jnp.int32)

    @jax.jit
    def levels(state: nnx.State, pixels: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        return [level[0] for level in nnx.merge(graphdef, state).levels(pixels, sizes)[0]]

    @torch.inference_mode()
    def peer() -> torch.Tensor:
        return theirs.maps(pixels)[0][0].permute(1, 2, 0)

    blocks = config.backbone.blocks
    return Case(
        name,
        "ms",
        lambda: jax.block_until_ready(levels(state, *inputs))[0],
        peer,
        flops=traced_flops(levels, state, *inputs),
        agreement=1e-3,
        notes={"work": f"{sum(blocks)} blocks, {size[0]} x {size[1]} px"},
        clock=time.process_time,
    )
