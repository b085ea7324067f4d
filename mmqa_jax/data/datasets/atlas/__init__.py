"""Atlas: this project's own multimodal benchmark, built from two installed packages.

Flags and emoji of OpenMoji, prose of the World Factbook, questions over both, in WebQA's
official file formats. Its numbers are never WebQA's.
"""

from mmqa_jax.data.datasets.atlas.augment import permute_palette, replace_entities
from mmqa_jax.data.datasets.atlas.build import build_atlas
from mmqa_jax.data.datasets.atlas.factbook import place_names
from mmqa_jax.data.datasets.atlas.summary import AtlasSummary

__all__ = ["AtlasSummary", "build_atlas", "permute_palette", "place_names", "replace_entities"]
