"""Opens what answers in words: a run of VLP's reader, or of Fusion-in-Decoder."""

from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality
from mmqa_jax.inference.t5_readers import FusionReader
from mmqa_jax.models.t5.network import T5
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.tasks.answer import Answer, load_reader
from mmqa_jax.tasks.fusion_in_decoder import FusionInDecoder, load_fusion_reader
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.tasks.task import Options, read_run
from mmqa_jax.weights.folder import load_converted
from mmqa_jax.weights.published import load_published
from mmqa_jax.weights.record import is_weights_folder


def open_reader(folder: str | Path, corpus: Corpus, options: Options | None = None) -> Any:
    """The trained reader of a run over a corpus, with other `options` of `inference`."""
    task, _ = read_run(folder, (Answer, FusionInDecoder))
    load = load_fusion_reader if isinstance(task, FusionInDecoder) else load_reader
    return load(folder, corpus, options)


def open_published_reader(
    folder: str | Path, tokenizer: str, config: Any, corpus: Corpus
) -> FusionReader:
    """A published or converted T5 as Fusion-in-Decoder.

    Args:
      tokenizer: folder of its tokenizer; "": the model's.
      config: of task fusion_in_decoder, whose passages and inference are used.
    """
    task, path = read_task(config), Path(folder)
    if not isinstance(task, FusionInDecoder):
        raise UserError(
            f"config key parts.fusion_reader.config: describes task {task.task}; name a config of "
            "fusion_in_decoder."
        )
    mesh, text = task.serving_mesh(), open_text_tokenizer(tokenizer or path)
    if is_weights_folder(path):
        model = load_converted(path, mesh=mesh)
    else:
        model = load_published("t5", path, mesh=mesh)
    if not isinstance(model, T5) or text.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{path}: holds no T5, or one with fewer tokens than its tokenizer; name a T5 and its "
            "own tokenizer (parts.fusion_reader.tokenizer)."
        )
    return FusionReader(task, corpus, text, model)


def reader_modality(folder: str | Path) -> Modality | None:
    """The modality of the sources that the reader of a run was trained on, if only one."""
    task, _ = read_run(folder, (Answer, FusionInDecoder))
    return task.data.modality
