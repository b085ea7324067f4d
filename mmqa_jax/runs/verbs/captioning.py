"""`mmqa caption`: Oscar+'s captions of pictures from a detector's regions (run_captioning.py).

Written as VinVL's captions TSV, which every benchmark's reader takes; the detector's own labels as
a tags TSV.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from tokenizers import decoders

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import atomic_write, check_out
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, loading_mesh, serve, tower_bytes
from mmqa_jax.core.store import Store, check_no_older
from mmqa_jax.data import regions
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer, load_tokenizer
from mmqa_jax.decoding.masked_lm import write_captions
from mmqa_jax.decoding.requests import Unanswerable
from mmqa_jax.models.oscar.network import OscarConfig, OscarLayout
from mmqa_jax.prompting.backends import Chat, Decoding, Message, Picture
from mmqa_jax.prompting.backends.cache import Cached
from mmqa_jax.prompting.backends.thinking import split_thoughts
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.record import read_metadata


def caption_pictures(
    features: Path,
    model: Path,
    tokenizer: Path,
    out: Path,
    *,
    tags: Path | None = None,
    sizes: Path | None = None,
    names: Path | None = None,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
    num_beams: int = 5,
) -> dict[str, Any]:
    """Captions every picture of a TSV of VinVL's regions; continues an interrupted job.

    A picture without readable regions gets an empty list, and is counted.

    Args:
      tokenizer: Oscar's tokenizer.json.
      out, tags: TSVs of captions and of object labels to write.
      sizes, names: hw.tsv and the detector's class names, where the rows do not hold them.
      batch_size, mesh: pictures of a call, over all devices; see core.serving.serving_mesh.
    """
    check_out(out)
    if tags is not None:
        check_out(tags, flag="--tags")
    rows = regions.VinVLRows(features)
    known = {} if sizes is None else regions.read_sizes(sizes)
    words = None if names is None else regions.read_class_names(names, regions.VinVLFeatures)
    captioner = OscarCaptioner(model, load_tokenizer(tokenizer), num_beams, batch_size, mesh)
    batch_size = captioner.serving.batch_size
    status = features.stat()
    inputs = {
        "features": [str(features.resolve()), status.st_size, status.st_mtime_ns],
        "model": read_metadata(model),
        "beams": num_beams,
    }
    check_no_older(out.with_name(f".{out.name}.journal"))
    with (
        Store(out.with_name(f".{out.name}.kept"), inputs) as store,
        Progress("Captions", len(rows), "pictures") as progress,
    ):
        store.check()
        for start in range(0, len(rows), batch_size):
            numbers = range(start, min(start + batch_size, len(rows)))
            if not all(str(number) in store for number in numbers):
                batch = [_complete(rows[number], known, words) for number in numbers]
                store.add(_captioned(captioner, numbers, batch))
            progress.advance(len(numbers))
        done = [store[str(number)] for number in range(len(rows))]
    _write_tsv(out, ((row["name"], row["captions"]) for row in done))
    if tags is not None:
        _write_tsv(tags, ((row["name"], row["tags"]) for row in done))
    store.remove()
    missing = {row["name"]: row["problem"] for row in done if row["problem"]}
    print(f"{len(done):,} pictures, {len(missing):,} of them without regions: {out}")
    print(f"caption: {captioner.serving}", file=sys.stderr)
    counts = {"pictures": len(done), "without_regions": len(missing), "captions": str(out)}
    return {**counts, **captioner.serving.to_json()}


class OscarCaptioner:
    """Regions and their labels to captions, by a converted Oscar and its tokenizer.

    `num_beams`: see decoding.masked_lm; `mesh`: see core.serving.serving_mesh. Its `serving` tells
    devices and batches, of `batch_size` pictures over all devices.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        num_beams: int,
        batch_size: BatchSize = AUTO,
        mesh: Mapping[str, int] | None = None,
    ):
        record = read_record(folder)
        if record.architecture.name != "oscar":
            raise UserError(
                f"--model={folder}: holds a model of kind {record.architecture.name!r}, oscar was "
                "expected; convert one with `mmqa convert --model=oscar`."
            )
        self._graphdef, self._state = nnx.split(load_converted(folder, mesh=loading_mesh(mesh)))
        self.serving = serve(batch_size, _cost(record.config, num_beams), self._state)
        self._tokenizer, self._num_beams = tokenizer, num_beams
        self._layout = OscarLayout(
            region_features=record.config.region_features,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            mask_id=tokenizer.mask_id,
        )

    def __call__(
        self, pictures: Sequence[tuple[regions.Detections, tuple[int, int]]]
    ) -> list[dict]:
        """The best caption of each picture of a batch, {"caption", "conf"}."""
        labels, inputs = [], []
        for detections, size in pictures:
            order = np.argsort(-detections.scores, kind="stable")
            inputs.append(regions.oscar_regions(detections, size)[order])
            words = regions.tag_words(detections)
            labels.append(self._tokenizer.encode(" ".join(words[n] for n in order)))
        tokenizer, placement = self._tokenizer, self.serving.placement
        result = placement.call(
            write_captions,
            self._graphdef,
            self._state,
            placement.put(self._layout.prompt(labels, inputs)),
            mask_id=tokenizer.mask_id,
            sep_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            num_beams=self._num_beams,
            only_best=True,
        )
        tokens, lengths, scores = map(fetch, (result.tokens, result.lengths, result.scores))
        return [
            {
                "caption": self._text(tokens[row, 0, : lengths[row, 0]]),
                "conf": math.exp(scores[row, 0]),
            }
            for row in range(len(pictures))
        ]

    def _text(self, tokens: np.ndarray) -> str:
        """Joins words as the original's tokenizer does: no space before punctuation."""
        special = {self._tokenizer.sep_id, self._tokenizer.cls_id, self._tokenizer.pad_id}
        words = [self._tokenizer.token(int(i)) for i in tokens if int(i) not in special]
        return decoders.WordPiece(cleanup=True).decode(words)


def _cost(config: OscarConfig, num_beams: int) -> RowCost:
    """The cost of a picture, with the words of its beams."""
    beams = num_beams * config.bert.vocab_size * 3 * 4.0
    return RowCost("pictures", 64, 64, tower_bytes(config.bert, config.bert.positions) + beams)


def _complete(
    row: regions.PictureRow, known: Mapping[str, tuple[int, int]], names: Sequence[str] | None
) -> regions.PictureRow:
    """The row with the picture's size and its regions' words."""
    size = known.get(row.name, row.size)
    if isinstance(row.detections, regions.RegionError):
        return row
    if size is None:
        raise UserError(
            f"picture {row.name}: its height and width are in no row of the features; give VinVL's "
            "hw.tsv with --sizes."
        )
    detections = row.detections._replace(words=regions.tag_words(row.detections, names))
    return row._replace(size=size, detections=detections)


def _captioned(
    captioner: OscarCaptioner, numbers: Iterable[int], batch: Sequence[regions.PictureRow]
) -> dict[str, dict[str, Any]]:
    """Returns row number -> its columns in the store."""
    readable = [
        (row.detections, row.size)
        for row in batch
        if not isinstance(row.detections, regions.RegionError)
    ]
    captions = iter(())
    if readable:
        # One shape: the last batch is filled up.
        filled = [*readable, *[readable[-1]] * (captioner.serving.batch_size - len(readable))]
        captions = iter(captioner(filled))
    values = {}
    for number, row in zip(numbers, batch, strict=True):
        if isinstance(row.detections, regions.RegionError):
            columns = {"captions": [], "tags": [], "problem": str(row.detections)}
        else:
            words, scores = regions.tag_words(row.detections), row.detections.scores.tolist()
            tags = [{"class": w, "conf": s} for w, s in zip(words, scores, strict=True)]
            tags.sort(key=lambda tag: -tag["conf"])
            columns = {"captions": [next(captions)], "tags": tags, "problem": ""}
        values[str(number)] = {"name": row.name, **columns}
    return values


def _write_tsv(path: Path, rows: Iterable[tuple[str, list[dict]]]) -> None:
    with atomic_write(path) as file:
        for name, objects in rows:
            file.write(f"{name}\t{json.dumps(objects, ensure_ascii=False)}\n")


# `mmqa caption --data`: a vision-language model describes the pictures of questions.
#
# Written as PromptCap's file, `{question id: caption}`, which `parts.captions` of PICa, Prophet
# and MAVL reads. PromptCap (Hu et al. 2022) describes a picture for its question; another prompt
# without `{question}` gives a caption of the picture alone.


# github.com/Yushi-Hu/PromptCap, README.md
PROMPT = "please describe this image according to the given question: {question}"
QUESTION = "{question}"
_AT_ONCE = 128  # questions whose pictures are in memory
_NAMED = 3  # questions without a caption


def caption_questions(
    data: Path,
    out: Path,
    model: Cached,
    *,
    split: str | None = None,
    prompt: str = PROMPT,
    max_new_tokens: int = 64,
) -> dict[str, Any]:
    """Captions the pictures of a prepared corpus's questions, by a model that takes pictures.

    What was answered before is in the model's cache. The JSON file is written whole or not at all;
    in the prompt QUESTION is replaced by a question's text. Returns counts: `captions`,
    `without_picture` and `failed`; RunError where no caption came of any question.
    """
    check_out(out)
    corpus = open_corpus(data)
    asked = corpus.questions(split)
    pictured = [question for question in asked if question.image is not None]
    if not pictured:
        where = "" if split is None else f" of split {split}"
        raise UserError(
            f"--data={data}: none of its {len(asked):,} questions{where} has a picture; name "
            "another split, or a corpus with pictures."
        )
    decoding = Decoding(max_new_tokens=max_new_tokens)
    captions: dict[str, str] = {}
    reasons: dict[str, str] = {}
    with Progress("Captioning", len(pictured), "pictures") as progress:
        for start in range(0, len(pictured), _AT_ONCE):
            chats = []
            for question in pictured[start : start + _AT_ONCE]:
                try:
                    chat = _chat(question, corpus.question_picture(question), prompt, decoding)
                    model.check(chat)
                    chats.append(chat)
                except Unanswerable as error:
                    reasons[question.id] = str(error)
            for answer in model.answer(chats):
                captions[answer.id] = split_thoughts(answer.candidates[0].text or "")[1]
            reasons |= {failure.id: failure.reason for failure in model.failures}
            progress.advance(min(_AT_ONCE, len(pictured) - start))
    failed = [question.id for question in pictured if question.id not in captions]
    if not captions:
        raise RunError(f"no picture was captioned; question {failed[0]}: {reasons[failed[0]]}")
    _warn(failed, reasons)
    with atomic_write(out) as file:
        json.dump({q.id: captions[q.id] for q in pictured if q.id in captions}, file, indent=1)
    counts = {"captions": len(captions), "without_picture": len(asked) - len(pictured)}
    return {"out": str(out), **counts, "failed": len(failed)}


def _chat(question: Question, picture: bytes | None, prompt: str, decoding: Decoding) -> Chat:
    if picture is None:
        raise Unanswerable(f"{question.image}: cannot be read")
    text = prompt.replace(QUESTION, question.question)
    encoded = Picture(picture, question.image or "")
    return Chat(question.id, (Message("user", (encoded, text)),), decoding)


def _warn(failed: Sequence[str], reasons: dict[str, str]) -> None:
    """Says which questions have no caption."""
    if not failed:
        return
    named = "; ".join(f"{name}: {reasons[name]}" for name in failed[:_NAMED])
    more = f"; and {len(failed) - _NAMED:,} more" if len(failed) > _NAMED else ""
    print(f"{len(failed):,} questions have no caption ({named}{more})", file=sys.stderr)
