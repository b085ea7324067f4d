"""`python -m tests.bench detector`: the detectors beside PyTorch, feature maps and whole.

Same random weights, picture and threads on both sides, in turn. Feature maps are compared with the
restatements of tests/equivalence, which have torchvision's convolutions and frozen norms; each row
first checks that both compute the same. Whole detectors stand beside torchvision's Faster R-CNN of
the same sizes, where it is installed (by no extra); its rules are its own. Processor time is
counted, so that other work on the machine hardly changes a ratio.

Accelerators get whole batches in bfloat16, see detector_batch.py; on a CPU only where `--only` names
these rows.

torch is needed to import this module.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from mmqa_jax.core.flops import traced_flops
from mmqa_jax.core.mesh import platform
from mmqa_jax.inference.region_detector import KINDS, make_find
from mmqa_jax.models.detection.faster_rcnn import DetectorConfig, FasterRCNN, Pictures
from mmqa_jax.models.detection.keys import publish_detector
from tests.bench import Options, detector_batch, torch_reference
from tests.bench.runner import Case, Peak, measure, start_device
from tests.bench.torchvision_detectors import KINDS as OF_TORCHVISION
from tests.bench.torchvision_detectors import importable, torchvision_detector
from tests.equivalence.detectors_torch import TorchDetector

MAPS = ("vlp_x101", "vinvl_x152c4", "bottom_up_r101")
ROWS = (*MAPS, *(f"{name}_whole" for name in OF_TORCHVISION))
BATCHES = detector_batch.names(MAPS, OF_TORCHVISION)
_PEERS = dict(zip(MAPS, ("detectron", "maskrcnn", "detectron2"), strict=True))
_ABOVE = 0.05  # torchvision's default: probabilities below are in no suppression
_SIZES = {"small": (256, 320), "full": (800, 1088)}  # height and width of the picture
_BLOCKS = (1, 1, 3, 1)  # of the stages in the small size: the published widths, less deep
_ROUNDS = 3


def run(options: Options) -> dict[str, Any]:
    """Measures all rows of this kind of device, or those selected; `small` sizes on a CPU, `full`
    elsewhere."""
    size = start_device(options)
    torch_reference.prepare_torch()
    on_cpu = platform() == "cpu"
    square = (1024, "float32") if on_cpu else (8192, "bfloat16")
    peak = Peak(*square, with_torch=True)
    peak.measure(_ROUNDS)
    wanted = options.chosen((*ROWS, *BATCHES) if options.only else ROWS if on_cpu else BATCHES)
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
    kinds = {kind.name: kind for kind in KINDS}
    for row in wanted:
        name = row if row in kinds else row.rpartition("_")[0]
        config = kinds[name].config
        if size == "small":
            backbone = dataclasses.replace(config.backbone, blocks=_BLOCKS)
            config = dataclasses.replace(config, backbone=backbone)
        if row in BATCHES:
            yield detector_batch.case(row, kinds[name]._replace(config=config), size)
        else:
            yield (_maps if row == name else _whole)(name, config, _SIZES[size])


def _drawn(
    config: DetectorConfig, size: tuple[int, int]
) -> tuple[FasterRCNN, Mapping[str, torch.Tensor], np.ndarray]:
    """A detector, its tensors under the published keys, and the pixels of a picture."""
    model = FasterRCNN(config, rngs=nnx.Rngs(0))
    source = publish_detector(config, nnx.state(model)).source
    tensors = {key: torch.from_numpy(np.array(source.read(key))) for key in source.specs()}
    pixels = np.random.default_rng(0).normal(size=(*size, 3)).astype(np.float32)
    return model, tensors, pixels


def _maps(name: str, config: DetectorConfig, size: tuple[int, int]) -> Case:
    """Trunk and pyramid of one picture."""
    model, tensors, pixels = _drawn(config, size)
    theirs = TorchDetector(_PEERS[name], config)
    theirs.tensors.update(tensors)
    graphdef, state = nnx.split(model)
    inputs = jax.device_put((pixels[None], np.asarray([size], np.int32)))

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


def _whole(name: str, config: DetectorConfig, size: tuple[int, int]) -> Case:
    """From the pixels of one picture to its regions."""
    model, tensors, pixels = _drawn(config, size)
    graphdef, state = nnx.split(model)
    sizes = np.asarray([size], np.int32)
    pictures = jax.device_put(Pictures(pixels[None], sizes, sizes, np.ones(1, np.float32)))
    find = make_find(graphdef)
    peer, others, notes = None, {}, {"torchvision": "cannot be imported"}
    if importable():
        theirs = torchvision_detector(config, tensors, size)
        picture = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

        def regions(least: float) -> None:
            theirs.roi_heads.score_thresh = least
            with torch.inference_mode():
                theirs([picture])

        peer = functools.partial(regions, 0.0)
        others = {f"peer_above_{_ABOVE:g}": functools.partial(regions, _ABOVE)}
        notes = {"torchvision": metadata.version("torchvision")}
    blocks = sum(config.backbone.blocks)
    work = f"{blocks} blocks, {size[0]} x {size[1]} px, {config.rpn.after} proposals"
    return Case(
        f"{name}_whole",
        "ms",
        lambda: jax.block_until_ready(find(state, pictures)),
        peer,
        others=others,
        flops=traced_flops(find, state, pictures),
        notes={"work": work, **notes},
        clock=time.process_time,
    )
