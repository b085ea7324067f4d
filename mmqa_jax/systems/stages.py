"""One stage at a time: what the verbs prepare and answer do.

Every stage reads the files of the one before it and writes its own; retrieval_stages.py has embed,
index and search, selection.py rerank, scoring.py is the last one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError, first_names
from mmqa_jax.core.files import (
    check_out,
    no_empty_folders,
    read_jsonl,
    read_text,
    write_jsonl,
)
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.corpus import Corpus, open_corpus, prepare_interchange, prepare_webqa_format
from mmqa_jax.data.records import refuse_corpus
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.systems import webqa


def prepare(
    dataset: str,
    raw: Path | None,
    out: Path,
    *,
    overwrite: bool = False,
    max_broken_pictures: int | None = None,
) -> dict[str, Any]:
    """Official files -> ArrayRecord in `out`; Atlas makes its official files in `out`/raw.

    Args:
      overwrite: replace the corpus that lies in `out`.
      max_broken_pictures: how many may be broken; see data.images.BrokenPictures.
    """
    if max_broken_pictures is not None and max_broken_pictures < 0:
        raise UserError(
            f"--max_broken_pictures={max_broken_pictures}: 0 or more was expected; give a larger "
            "number."
        )
    if dataset == "atlas" and raw is not None:
        raise UserError("--raw: Atlas is made from installed packages; leave --raw out.")
    if dataset != "atlas" and raw is None:
        raise UserError(f"--raw: name the folder with the files of {dataset}.")
    if raw is not None and not raw.is_dir():
        raise UserError(f"--raw={raw}: no such folder; check the path.")
    check_out(out, folder=True)
    if not overwrite:
        refuse_corpus(out)
    options = {"overwrite": overwrite, "max_broken_pictures": max_broken_pictures}
    with no_empty_folders(out):
        if dataset == "atlas":
            return prepare_atlas(out, **options)
        with Progress("Preparing", None, "records") as progress:
            if dataset == "corpus":
                manifest = prepare_interchange(raw, out, progress=progress.reach, **options)
            else:
                manifest = _prepare_official(raw, "WebQA", out, progress, **options)
    return _summary(manifest, out)


def prepare_atlas(out: Path, countries: int = 0, **options: Any) -> dict[str, Any]:
    """Builds Atlas in `out`/raw (WebQA's official formats) and prepares it in `out`.

    Args:
      countries: how many countries; 0 = all.
      options: of `prepare`; what an earlier attempt left in `out`/raw is taken as it is.
    """
    from mmqa_jax.data.datasets.atlas import build_atlas

    raw = out / "raw"
    if not (raw / "summary.json").exists():
        with Progress("Making Atlas", None, "steps") as progress:
            build_atlas(raw, limit_countries=countries or None, progress=_stage(progress))
    with Progress("Preparing", None, "records") as progress:
        manifest = _prepare_official(raw, "atlas", out, progress, name="atlas", **options)
    return _summary(manifest, out)


def answer(
    data: Path,
    model: Path,
    sources: str,
    out: Path,
    *,
    split: str,
    threshold: float,
    select: str = "best",
) -> dict[str, Any]:
    """Answers every question of a split from its gold, given or no sources.

    A model of one modality (VLP_I, VLP_T) answers its questions alone, from such sources alone.

    Args:
      sources: `oracle`, `none`, or a file of relevance, of which those are cited that `threshold`
        and `select` (a name of webqa.SELECTIONS) choose.
    """
    from mmqa_jax.core import startup
    from mmqa_jax.retrieval.rankings import read_rankings
    from mmqa_jax.systems.loading import load_reader
    from mmqa_jax.training.recipes import of_modality

    if not 0 <= threshold <= 1:
        raise UserError(
            f"--threshold={threshold}: a probability from 0 to 1 was expected; give one, such as "
            "0.2."
        )
    check_out(out)
    startup.start()
    corpus = open_corpus(data)
    questions = split_questions(corpus, data, split)
    relevance = []
    if sources not in ("oracle", "none"):  # mistakes in it show before the model loads
        relevance = read_rankings(sources, [q.id for q in questions], corpus.row)
    reader = load_reader(model, corpus)
    if sources == "oracle":
        cited = [webqa.gold_ranking(question) for question in questions]
    elif sources == "none":
        cited = [webqa.cited_nothing(question) for question in questions]
    else:
        least, most = webqa.SELECTIONS[select]
        cited = webqa.select_sources(relevance, threshold, most, least)
    if reader.modality is not None:
        asked = of_modality(questions, corpus, reader.modality)
        print(
            f"{model} was trained on {reader.modality} sources alone: it answers the {len(asked)} "
            f"of {len(questions)} questions that need them.",
            file=sys.stderr,
        )
        names = {question.id for question in asked}
        cited = [ranking for ranking in cited if ranking.question_id in names]
        questions = asked
    predictions = webqa.answer_cited(questions, corpus, reader, cited)
    write_predictions(out, predictions)
    print(f"{len(predictions):,} answers: {out}")
    return {"questions": len(predictions), "predictions": str(out)}


def split_questions(corpus: Corpus, data: Path, split: str) -> list[Question]:
    """The questions of a split; UserError where there are none."""
    questions = corpus.questions(split)
    if not questions:
        known = sorted({question.split for question in corpus.questions()})
        remedy = f"choose one of {', '.join(known)}"
        if not known:
            remedy = "the corpus has no questions at all, prepare it with some"
        raise UserError(f"--split={split}: {data} has no such questions; {remedy}.")
    return questions


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """predictions.jsonl: one Prediction a line."""
    write_jsonl(path, map(dataclasses.asdict, predictions))


def read_predictions(path: Path, source_ids: Container[str] | None = None) -> list[Prediction]:
    """Reads predictions.jsonl; `question_id` is needed, `answer` and `sources` may be absent.

    Args:
      source_ids: the corpus's source ids; None: cited sources are not checked.

    Raises:
      UserError: names file and line of a malformed row or an unknown source.
    """
    names = {field.name for field in dataclasses.fields(Prediction)}
    predictions = []
    for number, row in read_jsonl(path):
        if not isinstance(row, dict) or not isinstance(row.get("question_id"), str):
            raise UserError(
                f'{path}, line {number}: expected an object with a text "question_id"; correct '
                "that line."
            )
        if not isinstance(row.get("answer", ""), str):
            raise UserError(f'{path}, line {number}: "answer" must be text; correct that line.')
        sources = row.get("sources", [])
        if not isinstance(sources, list) or not all(isinstance(name, str) for name in sources):
            raise UserError(
                f'{path}, line {number}: "sources" must be a list of id strings; correct that line.'
            )
        for name in sources:
            if source_ids is not None and name not in source_ids:
                raise UserError(
                    f"{path}, line {number}: source {name!r} is not in the corpus; the file is of "
                    "another corpus."
                )
        known = {name: _tuples(value) for name, value in row.items() if name in names}
        predictions.append(Prediction(**known))
    return predictions


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def check_top_k(top_k: int) -> None:
    """UserError for a --top_k below 1."""
    if top_k < 1:
        raise UserError(f"--top_k={top_k}: at least 1 was expected; give a larger number.")


def _prepare_official(
    raw: Path,
    prefix: str,
    out: Path,
    progress: Progress,
    name: str = "webqa",
    **options: Any,
) -> dict[str, Any]:
    train_val, test = raw / f"{prefix}_train_val.json", raw / f"{prefix}_test.json"
    if not train_val.exists():
        raise UserError(
            f"{train_val}: no such file; put the official files ({prefix}_train_val.json, "
            f"{prefix}_test.json, imgs.tsv, imgs.lineidx) there."
        )
    extra, notice = raw / f"{prefix}_corpus.json", raw / "ATTRIBUTION.txt"
    return prepare_webqa_format(
        train_val,
        test if test.exists() else None,
        raw / "imgs.tsv",
        raw / "imgs.lineidx",
        out,
        corpus_json=extra if extra.exists() else None,
        name=name,
        attribution=read_text(notice) if notice.exists() else "",
        progress=progress.reach,
        **options,
    )


def _stage(progress: Progress) -> Any:
    """A (stage, done, total) callback that counts finished stages."""

    def advance(stage: str, done: int, total: int) -> None:
        progress.advance(int(done == total), stage=stage)

    return advance


def _summary(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    """What `prepare` returns; says on stderr what a user may not expect."""
    if attribution := manifest["attribution"].strip():
        print(attribution)  # with its line break: JSON may follow
    counts, origin = manifest["counts"], manifest["origin"]
    said = []
    if broken := manifest["broken_pictures"]:
        are = "picture is" if len(broken) == 1 else "pictures are"
        said.append(f"{len(broken)} {are} broken and left out: {first_names(broken)}")
    if lone := counts["questions_without_sources"]:
        said.append(f"{lone} of {counts['questions']} questions list no sources at all; kept")
    if reused := origin.get("reused_snippet_ids"):
        said.append(f"{reused} snippet ids stand for two facts; the later has a number behind its")
    for line in said:
        print(line, file=sys.stderr)
    _show_counts(manifest, out)
    kept = ("name", "fingerprint", "counts", "splits", "broken_pictures")
    result = {**{key: manifest[key] for key in kept}, "data": str(out)}
    if compared := origin.get("published_counts"):
        differing = {what: n for what, n in compared.items() if n["found"] != n["published"]}
        result["published_differences"] = differing
    return result


def _show_counts(manifest: Mapping[str, Any], out: Path) -> None:
    """Prints what a corpus holds, WebQA's beside the counts of the published release."""
    from mmqa_jax.evaluation.tables import Table, show

    compared = manifest["origin"].get("published_counts")
    if compared:
        columns = ("", "found", "published", "difference")
        rows = [
            (what, n["found"], n["published"], n["found"] - n["published"])
            for what, n in compared.items()
        ]
        same = all(difference == 0 for *_, difference in rows)
        note = "As published." if same else "Not the whole published release."
        show(Table(f"{manifest['name']}: {out}", columns, rows, note))
        return
    rows = [(f"{split} questions", n) for split, n in manifest["splits"].items()]
    rows += [(f"{modality} sources", n) for modality, n in manifest["modalities"].items()]
    show(Table(f"{manifest['name']}: {out}", ("", "found"), rows))
