"""Opens what answers in words: a run of VLP's reader, or of Fusion-in-Decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality
from mmqa_jax.tasks.answer import Answer, load_reader
from mmqa_jax.tasks.fusion_in_decoder import FusionInDecoder, load_fusion_reader
from mmqa_jax.tasks.opening import Options, read_run


def open_reader(folder: str | Path, corpus: Corpus, options: Options | None = None) -> Any:
    """The trained reader of a run, over a corpus.

    Args:
      options: of the section `inference`, in place of the run's own.

    Raises:
      UserError: another task's run.
    """
    task, _ = read_run(folder, (Answer, FusionInDecoder))
    load = load_fusion_reader if isinstance(task, FusionInDecoder) else load_reader
    return load(folder, corpus, options)


def reader_modality(folder: str | Path) -> Modality | None:
    """The modality of the sources that the reader of a run was trained on, if only one.

    Raises:
      UserError: another task's run.
    """
    task, _ = read_run(folder, (Answer, FusionInDecoder))
    return task.data.modality
