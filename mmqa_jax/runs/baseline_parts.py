"""The parts of the tables' trained baselines: KAT's and Multimodal-CoT's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from mmqa_jax.core.serving import OnModel
from mmqa_jax.data.kat_knowledge import KATKnowledge
from mmqa_jax.data.picture_vectors import PictureVectors
from mmqa_jax.data.schema import Material
from mmqa_jax.runs import identity
from mmqa_jax.runs.opened_parts import OpenedParts, Part


@dataclasses.dataclass(frozen=True)
class FusionReaderSpec(Part):
    """What answers from given passages.

    Attributes:
      model: workdir of a fusion_in_decoder run; with `config` a published T5, as FiD's or KAT's.
      config: config file of task fusion_in_decoder, by which a published model reads; "": a run has
        its own.
      tokenizer: folder of a published model's tokenizer; "": its own.
    """

    answers: ClassVar = True

    model: str
    config: str = ""
    tokenizer: str = ""

    def paths(self) -> list[str]:
        """The folders that it reads."""
        return [self.model, self.tokenizer]

    def open(self, row: OpenedParts) -> Any:
        """The reader over the row's corpus."""

        def load(on_model: OnModel) -> Any:
            from mmqa_jax.core.config import find_config, load_config
            from mmqa_jax.tasks.fusion_in_decoder import load_fusion_reader
            from mmqa_jax.tasks.registry import open_published_reader

            if self.config:
                config = load_config(find_config(self.config))
                reader = open_published_reader(self.model, self.tokenizer, config, row.corpus)
            else:
                reader = load_fusion_reader(self.model, row.corpus, row.inference)
            on_model("model", reader)
            return reader

        made_of = identity.of_folders(self.model, self.tokenizer, text=self.config)
        return row.once("fusion_reader", made_of, load, "fusion_reader")


@dataclasses.dataclass(frozen=True)
class FactsSpec(Part):
    """What KAT knows of questions: its authors' files, see data/kat_knowledge.py.

    Attributes:
      entities: explicit knowledge; "": none.
      answers: implicit knowledge; "": none.
    """

    turn: ClassVar = "file"
    materials: ClassVar = (
        Material(
            "KAT's okvqa.zip, entities of Wikidata and answers of GPT-3", "Gui et al., NAACL 2022"
        ),
    )

    entities: str = ""
    answers: str = ""

    def paths(self) -> list[str]:
        """The files that it reads."""
        return [self.entities, self.answers]

    def open(self, row: OpenedParts) -> KATKnowledge:
        """The knowledge; UserError for a file that is malformed."""
        return KATKnowledge(self.entities, self.answers)


@dataclasses.dataclass(frozen=True)
class MultimodalT5Spec(Part):
    """A stage of Multimodal-CoT.

    Attributes:
      model: workdir of a multimodal_cot run, or mm-cot's folder, published or converted.
      vectors, names: of the questions' pictures, see data/picture_vectors.py.
    """

    answers: ClassVar = True

    model: str
    vectors: str
    names: str = ""

    def paths(self) -> list[str]:
        """The folder and the files that it reads."""
        return [self.model, self.vectors, self.names]

    def open(self, row: OpenedParts) -> Any:
        """What writes texts about the questions."""
        from mmqa_jax.inference.multimodal_t5 import open_multimodal_writer

        writer = open_multimodal_writer(self.model, PictureVectors(self.vectors, self.names))
        row.on_model(Path(self.model).name)("model", writer)
        return writer
