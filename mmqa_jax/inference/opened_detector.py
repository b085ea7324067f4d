"""Opens a detector: its published file, a converted folder, or a preset of random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import init_sharded
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.inference.region_detector import RegionDetector, kind_of
from mmqa_jax.models.detection.faster_rcnn import (
    DetectorConfig,
    FasterRCNN,
    bottom_up_r101,
    vinvl_x152c4,
    vlp_x101,
)
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder

_PRESETS = {"vlp_x101": vlp_x101, "vinvl": vinvl_x152c4, "bua": bottom_up_r101}


@dataclasses.dataclass(frozen=True)
class DetectorChoice:
    """Which detector, and with which rules.

    Attributes:
      model: folder of `mmqa convert`, published file, or a name of _PRESETS for random weights.
      random: seed of random weights; None: the weights are read.
      regions: fewest and most of a picture; None: the detector's.
      sides: of resized pictures, the short one and what the long one has at most; None: its own.
      unrectified: features in front of fc6's ReLU, as WebQA's VLP reads them.
      dtype: of the convolutions.
      key, unrectified_key: the flags or config keys that `model` and `unrectified` come from.
    """

    model: str
    random: int | None = None
    regions: tuple[int, int] | None = None
    sides: tuple[int, int] | None = None
    unrectified: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    key: str = "--model"
    unrectified_key: str = "--unrectified"

    def changed(self, config: DetectorConfig) -> DetectorConfig:
        """The config with these rules; UserError where they do not fit the detector."""
        if self.unrectified and not config.head:
            raise UserError(
                f"{self.unrectified_key}: {kind_of(config).name} has no fc6, its features are "
                "means of res5; leave it out, or give another detector."
            )
        changes: dict[str, Any] = {"dtype": self.dtype}
        if self.regions is not None:
            changes["fewest"], changes["most"] = self.regions
        if self.unrectified:
            changes["rectified"] = False
        return replace_fields(config, **changes)


def open_detector(
    choice: DetectorChoice,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
    *,
    beside_training: bool = False,
) -> RegionDetector:
    """The detector of a choice, on the devices.

    Args:
      batch_size: pictures of a call, over all devices.
      mesh: see core.serving.serving_mesh.
      beside_training: on the first device of this process alone. A thread can then call it while
        the step runs: programs of several devices wait for one another, in an order that must be
        the same on all, those of one device for nobody.
    """
    model = _opened(choice, None if beside_training else loading_mesh(mesh))
    pictures = kind_of(model.config).pictures
    if choice.sides is not None:
        shorter, longer = choice.sides
        pictures = dataclasses.replace(pictures, shorter=shorter, longer=longer)
    return RegionDetector(model, pictures, batch_size, beside_training=beside_training)


def _opened(choice: DetectorChoice, placed: Mesh | None) -> FasterRCNN:
    path = Path(choice.model)
    if choice.model in _PRESETS and not path.exists():
        if choice.random is None:
            raise UserError(
                f"{choice.key}={choice.model}: its weights are needed; give their file or a folder "
                "of `mmqa convert --model=detector`, or --random=0 for random ones, which prove "
                "only the plumbing."
            )
        config = choice.changed(_PRESETS[choice.model]())

        def build() -> FasterRCNN:
            return FasterRCNN(config, rngs=nnx.Rngs(choice.random))

        return build() if placed is None else init_sharded(build, placed)
    if choice.random is not None:
        raise UserError(
            f"--random: is for the names {', '.join(_PRESETS)}, and --model={choice.model} is a "
            "file or folder; leave one of them out."
        )
    if not path.exists():
        raise UserError(
            f"{choice.key}={choice.model}: no such file or folder; give a detector's weights, "
            f"or one of {', '.join(_PRESETS)} with --random."
        )
    if is_weights_folder(path):
        record = read_record(path)
        if record.architecture.name != "detector":
            raise UserError(
                f"{choice.key}={path}: holds a model of kind {record.architecture.name!r}, "
                "detector was expected; convert one with `mmqa convert --model=detector`."
            )
        return load_converted(path, mesh=placed, config=choice.changed(record.config))
    return _read_published(path, choice, placed)


def _read_published(path: Path, choice: DetectorChoice, mesh: Mesh | None) -> FasterRCNN:
    from mmqa_jax.models.detection.keys import open_detector as open_checkpoint

    config = choice.changed(open_checkpoint(path).config)
    rule = config.rule
    return load_published(
        "detector",
        path,
        mesh=mesh,
        dtype=choice.dtype,
        fewest=rule.fewest,
        most=rule.most,
        rectified=config.rectified,
    )
