"""The base of the tasks on VLP: source selection (rerank) and answers (answer).

They train the published system, and the small reader of Atlas (ours; configs/atlas). Its inputs are
made by data/atlas/reader.py; its model is models/vlp/atlas_reader.py. All of it is keys of the
sections `model`, `packing`, `masking` and of `new_types`, off unless a config names them, so that
source selection and answers are one task each, and runs of both kinds are opened alike.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.local_copies import REGION_CACHE, local_copy
from mmqa_jax.core.paths import as_path, in_store
from mmqa_jax.core.serving import AUTO, BatchSize, tower_bytes
from mmqa_jax.core.typed import at_least, mapping, spec_of
from mmqa_jax.data.atlas import reader as atlas_reader
from mmqa_jax.data.batches.packing import Bucket, Packer, PackingConfig
from mmqa_jax.data.batches.source_reader import SourceReader
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.region_records import REGIONS, Precision, RecordDetections, RegionRecords
from mmqa_jax.data.regions import (
    BOX,
    FEATURES,
    FeatureRegions,
    PatchRegions,
    RegionReader,
    VinVLFeatures,
    X101Features,
    feature_ids,
    read_class_names,
    read_id_map,
)
from mmqa_jax.data.tokenizers import Tokenizer
from mmqa_jax.models.vlp.atlas_reader import FRESH, AtlasVLPModel, ProbedInputs, add_types
from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs, VLPModel
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.initial_weights import Loader, check_clip_frontend, vlp_loader
from mmqa_jax.tasks.task import ANY_VOCABULARY, bools
from mmqa_jax.training.best_weights import BEST
from mmqa_jax.training.state import WEIGHT, OfLayers
from mmqa_jax.weights.record import read_metadata

if TYPE_CHECKING:
    from mmqa_jax.inference.region_detector import RegionCache


@dataclasses.dataclass(frozen=True)
class RerankObjective:
    """WebQA equation 3 as the original computes it (modeling.py:1088): -log p(class), class 0
    for relevant sources, averaged over a question's choices and then over questions.

    Batches hold pairs (question, source) of many questions. `weights` makes every question count
    alike: it is proportional to 1 / choices and 1 in the mean over an epoch. The loss is divided
    by the number of pairs, not by the batch's own weights: then a pair would count for more or
    less by what it happens to be drawn with.
    """

    config: VLPConfig
    # The model reads question and source apart (TwoSidedVLP); None: VLP itself.
    sides: TwoSides | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized VLP."""
        if self.sides is not None:
            return TwoSidedVLP(self.config, self.sides, rngs=nnx.Rngs(key))
        return self.config.build(rngs=nnx.Rngs(key))

    def outline(self) -> nnx.Module:
        """The model of zeros; no initializer is traced."""
        return self.init(None)

    def loss(
        self, model: VLP, batch: dict, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean over the pairs of the weighted cross-entropy, and the weighted accuracy."""
        inputs: VLPInputs = batch["inputs"]
        logits = model.source_logits(inputs, dropout_key=dropout_key)  # [B, 2]
        relevant = batch["labels"]  # [B] 1 = relevant
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, 1 - relevant)
        weights = batch["weights"]
        correct = (logits.argmax(axis=1) == 1 - relevant).astype(jnp.float32)
        accuracy = (correct * weights).sum() / (weights.sum() + 1e-8)
        return (losses * weights).mean(), {"accuracy": accuracy}


@dataclasses.dataclass(frozen=True)
class AnswerObjective(OfLayers):
    """Cross-entropy over the masked answer tokens (VLP, equation 2; WebQA section 5.2).

    Normalized as in the original (modeling.py:1162-1190): summed over its micro-batch, divided by
    the number of masked tokens + 1e-5; where tokens have weights (MaskingConfig.weights),
    by their sum. Then the mean over the micro-batches of an update.
    """

    config: VLPConfig
    # Questions of such a micro-batch, a divisor of the batch; None: the batch.
    questions_per_mean: int | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized VLP."""
        return self.config.build(rngs=nnx.Rngs(key))

    def loss(
        self, model: VLP, batch: dict, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean loss per masked token, and the share of tokens with a probability above
        0.5.

        Both weighted by the tokens' weights, the loss within `questions_per_mean` questions.
        """
        positions, ids = batch["masked_positions"], batch["masked_ids"]  # [B, P]
        log_probs, sayable = model.answer_log_probs(
            batch["inputs"], positions, ids, dropout_key=dropout_key
        )  # [B, P]
        # A model that only copies names cannot produce a name that is in no source.
        weights = batch["masked_weights"] * sayable
        rows, masks = weights.shape

        def sums(x: jax.Array) -> jax.Array:  # [B, P] -> [groups of questions]
            return x.reshape(-1, (self.questions_per_mean or rows) * masks).sum(axis=1)

        loss = -(sums(log_probs * weights) / (sums(weights) + 1e-5)).mean()
        correct = (log_probs > jnp.log(0.5)).astype(jnp.float32)
        metrics = {"accuracy": (correct * weights).sum() / (weights.sum() + 1e-5)}
        if self.questions_per_mean is None:
            metrics[WEIGHT] = weights.sum()
        return loss, metrics


# Frontend with precomputed detector features -> reader of its files.
READERS = {"x101": X101Features, "vinvl": VinVLFeatures}
_NEEDS = {"x101": "root", "vinvl": "files", "clip": "root"}  # frontend -> key of `features`
DETECTOR = "detector"  # key of model.json
# Keys of PackingConfig that follow from other sections.
OF_REGIONS = ("slots_per_picture", "region_dim", "position_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectionSection:
    """How a detector looks at pictures beside training; the flags of `mmqa features`."""

    regions: tuple[int, int] | None = None  # fewest and most of a picture; None: the detector's
    # Of resized pictures, the short one and what the long one has at most; None: its own.
    sides: tuple[int, int] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the convolutions
    precision: Precision = "float16"  # of the large arrays of a cached record
    batch_size: BatchSize = at_least(1, AUTO)  # pictures of a call

    def __post_init__(self):
        for key, values, least in (("regions", self.regions, 0), ("sides", self.sides, 1)):
            if values is not None and not least <= values[0] <= values[1]:
                raise UserError(
                    f"config key features.detection.{key}={values}: two numbers from {least} were "
                    "expected, the second not below the first; correct it."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesSection:
    """Features of pictures: precomputed, or detected in the corpus's pictures beside training."""

    # Folder of X101 features, or of the converted CLIP of the frontend clip. For x101 and vinvl it
    # may be one of `mmqa features`, which stands in place of files and id_map.
    root: str = ""
    # File or folder of the detector of x101 or vinvl, in place of root, files and id_map.
    detector: str = ""
    # Folder of what it found; "": `region_cache` in the run's workdir. Runs may share one.
    cache: str = ""
    detection: DetectionSection = DetectionSection()  # how it looks at pictures
    files: Mapping[str, str] = mapping(dict)  # image_id // 10,000,000 -> TSV of VinVL features
    id_map: str = ""  # file that maps the corpus's pictures to image ids
    names: str = ""  # file of the detector's class names, for tags; "": those that records hold
    slots: int = at_least(1, 100)  # regions of a picture
    # Pictures without features that a run tolerates; None: see BrokenPictures.
    max_missing: int | None = None

    @functools.cached_property
    def for_x101(self) -> RegionCache:
        """The detector's output for VLP's X101, features in front of fc6's ReLU."""
        return self._open(unrectified=True)

    @functools.cached_property
    def for_vinvl(self) -> RegionCache:
        """The detector's output for VinVL."""
        return self._open(unrectified=False)

    def _open(self, *, unrectified: bool) -> RegionCache:
        from mmqa_jax.inference.region_detector import DetectorChoice, RegionCache, open_detector

        look = self.detection
        choice = DetectorChoice(
            str(local_copy(self.detector)),
            regions=look.regions,
            sides=look.sides,
            unrectified=unrectified,
            dtype=look.dtype,
            key="config key features.detector",
            unrectified_key="config key model.frontend=x101",
        )
        detector = open_detector(choice, look.batch_size, beside_training=True)
        return RegionCache(detector, self.cache, look.precision, self.detector)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VLPServing(tasks.ServingSection):
    """VLP in use."""

    always_truncate_tail: bool = True  # see inference.batches.coin_ids
    # Values of the section `packing` that differ.
    packing: Mapping[str, Any] = mapping(spec_of(PackingConfig, *OF_REGIONS, partial=True))


class RegionSizes(NamedTuple):
    """Regions per picture, and the lengths of a region's feature and position vectors."""

    slots: int
    dim: int
    position_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VLPTask(tasks.Task):
    """VLP on questions and sources."""

    limits: ClassVar[tuple[str, ...]] = (
        *("packing.buckets", "packing.max_source_tokens", "packing.max_question_tokens"),
        "packing.max_answer_tokens",
    )

    packing_class: ClassVar[type[PackingConfig]] = PackingConfig
    packer_class: ClassVar[type[Packer]] = Packer

    data: tasks.DataSection
    model: VLPModel
    pictures: tasks.PicturesSection
    # Of PackingConfig, what does not follow from the regions.
    packing: Mapping[str, Any] = mapping(spec_of(PackingConfig, *OF_REGIONS), required=True)
    inference: VLPServing
    # Of a frontend with features; None where it reads pixels.
    features: FeaturesSection | None = None
    augment: Mapping[str, Any] = mapping(dict)  # `factory` and its arguments (tasks.task)

    # --- Regions and sequences ---------------------------------------------------------------

    def region_sizes(self) -> RegionSizes:
        """Sizes of the regions that the model takes; opens no files."""
        reader = READERS.get(self.model.frontend)
        if reader is not None:
            assert self.features is not None
            return RegionSizes(self.features.slots, FEATURES, BOX + reader.classes)
        regions = self._pixel_regions()
        return RegionSizes(regions.slots, regions.dim, regions.position_dim)

    def regions(self, corpus: Corpus) -> PatchRegions | FeatureRegions:
        """A picture's regions as the model takes them."""
        if self.model.frontend not in READERS:
            return self._pixel_regions()
        section = self.features
        assert section is not None
        reader: RegionReader
        ids: Sequence[int | str | None]
        names: Sequence[str] | None = None
        find, remedy = None, "fetch their features or raise features.max_missing"
        if section.detector:
            from mmqa_jax.inference.region_detector import CorpusRegions

            detected = CorpusRegions(corpus, self._region_cache())
            reader = RecordDetections(detected, self.model.frontend)
            ids = [s.id if s.modality == "image" else None for s in corpus.sources]
            find, remedy = detected.find, "run `mmqa prepare` again or raise features.max_missing"
        elif section.root and (self.model.frontend == "vinvl" or REGIONS.is_at(section.root)):
            records = RegionRecords(section.root)
            reader = RecordDetections(records, self.model.frontend)
            ids = [s.id if s.modality == "image" else None for s in corpus.sources]
            names = records.facts.class_names or None
        else:
            reader = (
                X101Features(section.root)
                if self.model.frontend == "x101"
                else VinVLFeatures({int(number): path for number, path in section.files.items()})
            )
            id_map = read_id_map(section.id_map) if section.id_map else None
            ids = feature_ids(corpus.sources, id_map)
        if section.names:
            names = read_class_names(section.names, reader)
        missing = BrokenPictures(
            sum(number is not None for number in ids),
            section.max_missing,
            remedy,
            "have no region features",
        )
        return FeatureRegions(
            reader, ids, slots=section.slots, names=names, missing=missing, find=find
        )

    def _region_cache(self) -> RegionCache:
        """The detector's cache, opened once for training and validation."""
        section = self.features
        assert section is not None
        return section.for_x101 if self.model.frontend == "x101" else section.for_vinvl

    def regions_facts(self) -> dict[str, str]:
        """The facts about regions in model.json: the detector's fingerprint, if a run has one."""
        if self.features is None or not self.features.detector:
            return {}
        return {DETECTOR: self._region_cache().facts.model}

    def in_folder(self, folder: str | os.PathLike) -> Self:
        if self.features is None or not self.features.detector or self.features.cache:
            return self
        run = as_path(folder)
        if run.name == BEST and (run.parent / "config.json").exists():
            run = run.parent  # the best step's weights are used with what the run has found
        cache = os.fspath(run / REGION_CACHE)
        return dataclasses.replace(self, features=dataclasses.replace(self.features, cache=cache))

    def _pixel_regions(self) -> PatchRegions:
        """The regions of a frontend that reads pixels; the model computes CLIP's itself."""
        model = self.model
        side = model.clip_vision().patch_size if model.frontend == "clip" else model.patch
        return PatchRegions(self.pictures.size, side)

    def _reader_class(self, regions: PatchRegions | FeatureRegions) -> Callable[..., SourceReader]:
        """The class that reads the sources."""
        return SourceReader

    def packing_config(self, *, inference: bool = False) -> PackingConfig:
        """Shapes of the sequences for the task's pictures and token limits.

        `inference` applies the overrides of the section `inference.packing`.
        """
        regions = self.region_sizes()
        changes = self.inference.packing if inference else {}
        return self.packing_class(
            slots_per_picture=regions.slots,
            region_dim=regions.dim,
            position_dim=regions.position_dim,
            **{**self.packing, **changes},
        )

    def packer(self, tokenizer: Tokenizer, *, inference: bool = False) -> Packer:
        """The packer of sequences; see `packing_config`."""
        return self.packer_class(tokenizer, self.packing_config(inference=inference))

    def source_reader(
        self, corpus: Corpus, tokenizer: Tokenizer, *, on_demand: bool = False
    ) -> SourceReader:
        """Tokens and pixels of the corpus's sources as the model takes them.

        `on_demand` tokenizes each source when it is first read (see SourceReader).
        """
        has_features = self.model.frontend in READERS  # needs no pixels
        pictures = None if has_features else self.pictures.open(corpus)
        regions = self.regions(corpus)
        return self._reader_class(regions)(
            corpus, tokenizer, pictures, regions, self.data.text_of, on_demand=on_demand
        )

    def loader(self, tokenizer: Tokenizer) -> Loader | None:
        """Puts the weights that the run starts from into its model."""
        return vlp_loader(self, tokenizer)

    def vlp_config(self, vocab_size: int) -> VLPConfig:
        """The model, with the position size of its regions and a tokenizer's words."""
        return self.model.config(vocab_size, self.region_sizes().position_dim)

    def vlp_inputs(self, rows: int, *, inference: bool = False) -> VLPInputs:
        """Shapes of packed sequences of the bucket with the most columns."""
        packing = self.packing_config(inference=inference)
        bucket = largest_bucket(packing)
        slots = bucket.pictures * packing.slots_per_picture
        columns = slots + bucket.text
        return VLPInputs(
            input_ids=tasks.ints(rows, columns),
            token_type_ids=tasks.ints(rows, columns),
            position_ids=tasks.ints(rows, columns),
            context_mask=tasks.bools(rows, columns),
            answer_mask=tasks.bools(rows, columns),
            region_features=tasks.floats(rows, slots, packing.region_dim),
            region_positions=tasks.floats(rows, slots, packing.position_dim),
        )

    # --- Checks ------------------------------------------------------------------------------

    def _check(self, files: bool) -> None:
        model = self.model
        vlp = model.config(tasks.ANY_VOCABULARY)
        self._check_features()
        self._check_detector(files)
        if model.frontend == "clip":
            side = model.clip_vision().image_size
            if self.pictures.size != side:
                raise UserError(
                    f"config key pictures.size={self.pictures.size}: model.clip={model.clip} takes "
                    f"{side}; set pictures.size to it, or model.clip to another CLIP."
                )
            if files:
                check_clip_frontend(self)
        for key, inference in (("packing", False), ("inference.packing", True)):
            packing = self.packing_config(inference=inference)
            if packing.positions > vlp.bert.positions:
                raise UserError(
                    f"config key {key}.buckets: the longest sequence has {packing.positions} "
                    f"positions, the model {vlp.bert.positions}; use shorter buckets."
                )
        check_types("packing.segments", self.packing_config().segments, vlp.bert.types)

    def _check_features(self) -> None:
        frontend = self.model.frontend
        if frontend not in _NEEDS:
            if self.features is not None:
                raise UserError(
                    f"config key features: model.frontend={frontend} reads pixels; set it to one "
                    f"of {', '.join(_NEEDS)} or leave features out."
                )
            return
        needed = _NEEDS[frontend]
        features = self.features
        if features is None or not (
            getattr(features, needed)
            or (frontend in READERS and (features.root or features.detector))
        ):
            raise UserError(f"config key features.{needed} is missing; add it.")
        for number in self.features.files:
            if not number.isdecimal():
                raise UserError(
                    f"config key features.files.{number}: a number was expected, image_id // "
                    "10,000,000 of the pictures in that TSV; change the key."
                )

    def _check_detector(self, files: bool) -> None:
        features = self.features
        if features is None:
            return
        place = f"config key features.detector={features.detector}"
        if not features.detector:
            if features.cache or features.detection != DetectionSection():
                key = "cache" if features.cache else "detection"
                raise UserError(
                    f"config key features.{key}: is used with features.detector alone; name a "
                    "detector, or leave it out."
                )
            return
        if self.model.frontend not in READERS:
            raise UserError(
                f"{place}: model.frontend={self.model.frontend} reads no detector's regions; set "
                f"it to one of {', '.join(READERS)}, or leave the detector out."
            )
        if features.root:
            raise UserError(
                f"{place}: features.root={features.root} names features that are already there; "
                "set one of them to ''."
            )
        if self.batches.workers:
            raise UserError(
                f"{place}: batches.workers={self.batches.workers} processes cannot share the "
                "accelerator with the run; set it to 0, or make records with `mmqa features` and "
                "name them in features.root."
            )
        if in_store(features.cache):
            raise UserError(
                f"config key features.cache={features.cache}: a folder of a file system was "
                "expected; leave it out, and the cache lies in the run's --workdir, wherever it is."
            )
        if files and not in_store(features.detector) and not os.path.exists(features.detector):
            raise UserError(
                f"{place}: no such file or folder; give a detector's published file or a folder of "
                "`mmqa convert --model=detector`, or make records with `mmqa features` and name "
                "them in features.root."
            )

    # --- In use ------------------------------------------------------------------------------

    def vlp_bytes(self) -> float:
        """Inputs and activations of a sequence of the largest shape, estimated.

        As in retrieval/embedder.py; compiled for a v5e the programs of configs/webqa use 0.5
        to 0.9 of them.
        """

        model = self.vlp_config(tasks.ANY_VOCABULARY)
        packing = self.packing_config(inference=True)
        pictures = max(Bucket(*sizes).pictures for sizes in packing.buckets)
        regions = pictures * packing.slots_per_picture * (packing.region_dim + packing.position_dim)
        tower = 0.0
        if self.model.frontend == "clip":
            vision = self.model.clip_vision()
            tower = pictures * tower_bytes(vision, packing.slots_per_picture + 1)
        return max(tower_bytes(model.bert, most_columns(packing)), tower) + 2 * 4.0 * regions

    def planned_model(self) -> VLP:
        """The model with `vocabulary_size`, of whose weights the shapes are meant."""
        return self.vlp_config(self.vocabulary_size()).build(rngs=nnx.Rngs())

    def open_vlp(self, folder: str | Path, tokenizer: Tokenizer, *, one_shape: bool = False) -> VLP:
        """The trained model of the run in a folder; `one_shape`: see `in_one_shape`."""
        facts = self.regions_facts()
        if facts and read_metadata(folder).get(DETECTOR) != facts[DETECTOR]:
            assert self.features is not None
            raise UserError(
                f"{self.features.detector}: is another detector than the one whose regions "
                f"{folder} was trained on; put that one there again."
            )
        config = self.vlp_config(tokenizer.vocab_size)
        mesh = None if one_shape else self.serving_mesh()
        return self.load(folder, type(config).build, config, mesh)

    def in_one_shape(self) -> VLPTask:
        """The task with each function traced and compiled once, quickly.

        All inputs have the longest bucket's shape, and the layers run in a loop, on one device.
        That suits a process that answers a few questions, most of whose time would go into tracing.
        """
        buckets = self.inference.packing.get("buckets", self.packing["buckets"])
        longest = max(pictures for pictures, _ in buckets), max(text for _, text in buckets)
        packing = {**self.inference.packing, "buckets": (longest,)}
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, changes={**self.model.changes, "unroll": 1}),
            inference=dataclasses.replace(self.inference, packing=packing),
        )


def largest_bucket(packing: PackingConfig) -> Bucket:
    """The one with the most columns, region slots included; of several that with most pictures."""
    slots = packing.slots_per_picture
    buckets = [Bucket(*b) for b in packing.buckets]
    return max(buckets, key=lambda b: (b.pictures * slots + b.text, b.pictures))


def most_columns(packing: PackingConfig) -> int:
    """Columns of the largest bucket."""
    bucket = largest_bucket(packing)
    return bucket.pictures * packing.slots_per_picture + bucket.text


def check_types(key: str, numbers: Iterable[int], count: int) -> None:
    """Raises UserError if one of the numbers is no token type of a model that has `count`."""
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong:
        raise UserError(
            f"config key {key}: the model has no token type {wrong[0]}; use 0 to {count - 1}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtlasServing(VLPServing):
    """VLP in use; `packing` may hold values of AtlasPackingConfig."""

    packing: Mapping[str, Any] = mapping(
        spec_of(atlas_reader.AtlasPackingConfig, *OF_REGIONS, partial=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtlasVLPTask(VLPTask):
    """VLP on questions and sources, with additions."""

    packing_class: ClassVar[type[PackingConfig]] = atlas_reader.AtlasPackingConfig
    packer_class: ClassVar[type[Packer]] = atlas_reader.AtlasPacker

    model: AtlasVLPModel
    packing: Mapping[str, Any] = mapping(
        spec_of(atlas_reader.AtlasPackingConfig, *OF_REGIONS), required=True
    )
    inference: AtlasServing
    # Token types that BERT weights lack: what they start from (add_types).
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
