"""The small reader of Atlas in the tasks on VLP (ours; configs/atlas).

Its inputs are made by data/atlas/reader.py; its model is models/vlp/atlas_reader.py. All of it is
keys of the sections `model`, `packing`, `masking` and of `new_types`, off unless a config names
them, so that source selection and answers are one task each, and runs of both kinds are opened
alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import mapping, spec_of
from mmqa_jax.data.atlas import reader as atlas_reader
from mmqa_jax.data.batches.packing import Packer, PackingConfig
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.regions import FeatureRegions, PatchRegions
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.vlp.atlas_reader import FRESH, AtlasVLPModel, ProbedInputs, add_types
from mmqa_jax.models.vlp.network import VLPInputs
from mmqa_jax.tasks.initial_weights import Loader, vlp_loader
from mmqa_jax.tasks.task import ANY_VOCABULARY, bools
from mmqa_jax.tasks.vlp import OF_REGIONS, VLPServing, VLPTask, check_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtlasServing(VLPServing):
    """VLP in use; `packing` may hold values of AtlasPackingConfig."""

    packing: Mapping[str, Any] = mapping(
        spec_of(atlas_reader.AtlasPackingConfig, *OF_REGIONS, partial=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtlasVLPTask(VLPTask):
    """VLP on questions and sources, with additions.

    Attributes:
      new_types: token types that BERT weights lack: what they start from (add_types).
    """

    packing_class: ClassVar[type[PackingConfig]] = atlas_reader.AtlasPackingConfig
    packer_class: ClassVar[type[Packer]] = atlas_reader.AtlasPacker

    model: AtlasVLPModel
    packing: Mapping[str, Any] = mapping(
        spec_of(atlas_reader.AtlasPackingConfig, *OF_REGIONS), required=True
    )
    inference: AtlasServing
    new_types: tuple[int, ...] = ()

    def loader(self, tokenizer: Tokenizer) -> Loader | None:
        def after_bert(vlp: Any) -> None:
            add_types(vlp, self.new_types)

        return vlp_loader(self, tokenizer, fresh=FRESH, after_bert=after_bert)

    def _pixel_regions(self) -> PatchRegions:
        model = self.model
        if model.frontend == "clip":
            return super()._pixel_regions()
        options = {"whole": model.whole, "colors": model.colors, "where": model.where}
        return atlas_reader.AtlasRegions(self.pictures.size, model.patch, **options)

    def _reader_class(self, regions: PatchRegions | FeatureRegions) -> Callable[..., SourceReader]:
        if not self.model.tags:
            return super()._reader_class(regions)
        return functools.partial(atlas_reader.TaggedSources, tags=regions.tags)

    def _check(self, files: bool) -> None:
        model = self.model
        if model.written_words and not self.tokenizer.startswith(("minilm:corpus", "corpus:")):
            raise UserError(
                f"config key model.written_words={model.written_words}: writes the first words of "
                f"the vocabulary, but tokenizer {self.tokenizer} does not put common ones first; "
                "set tokenizer to minilm:corpus or leave model.written_words out."
            )
        if model.tags and model.frontend == "clip":
            raise UserError(
                "config key model.tags: the regions of model.frontend=clip have neither colors nor "
                "classes to name; leave it out, or use another frontend."
            )
        super()._check(files)
        types = model.config(ANY_VOCABULARY).bert.types
        check_types("packing.match_types", self.packing_config().match_types, types)
        check_types("new_types", self.new_types, types)


def inputs_class(masking: atlas_reader.AtlasMasking) -> type[VLPInputs]:
    """The class of a training batch of answers."""
    return ProbedInputs if masking.probes else VLPInputs


def with_probes(inputs: VLPInputs, masking: atlas_reader.AtlasMasking) -> VLPInputs:
    """The shapes of a batch (VLPTask.vlp_inputs) as `masking` makes it for training."""
    if not masking.probes:
        return inputs
    return ProbedInputs(**vars(inputs), probe_mask=bools(*inputs.input_ids.shape))
