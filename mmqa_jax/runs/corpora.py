"""Prepares a corpus: official files, your own documents or interchange files, to ArrayRecord.

`prepare` is what `mmqa prepare` runs. Every function here returns the manifest that it wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.benchmark import open_benchmark
from mmqa_jax.benchmarks.vidore import Pages, read_vidore
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out, no_empty_folders
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.articles import WIKIPEDIA, WIKIPEDIA_PICTURES, WORDS, PassageOptions
from mmqa_jax.data.atlas.build import with_unanswerable
from mmqa_jax.data.folder import FolderOptions, read_folder
from mmqa_jax.data.formats import webqa
from mmqa_jax.data.formats.chats import ChatFiles
from mmqa_jax.data.formats.interchange import read_interchange
from mmqa_jax.data.formats.row_files import parse_columns, read_rows
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.records.streamed_records import write_streamed
from mmqa_jax.data.wikipedia import streams

if TYPE_CHECKING:
    from mmqa_jax.runs.cited import CitedOptions

KEPT = "read"  # subfolder of a folder's corpus: what was read of its files
# Datasets in WebQA's official formats -> prefix of their file names.
_PREFIXES = {"webqa": "WebQA", "atlas": "atlas"}
# Knowledge without questions, of which a file is read as a stream.
STREAMS: dict[str, type[streams.Stream]] = {
    "wikipedia": streams.DumpStream,
    "kilt": streams.KILTStream,
    "dpr": streams.DPRStream,
    "infoseek_wiki": streams.InfoSeekStream,
}


def prepare(
    dataset: str,
    raw: Path | None,
    out: Path,
    *,
    overwrite: bool = False,
    max_broken_pictures: int | None = None,
    folder: FolderOptions | None = None,
    unanswerable: bool = False,
    passage_words: int | None = None,
    columns: str | None = None,
    cited: CitedOptions | None = None,
    balanced: bool = False,
    flag: str = "--raw",
) -> dict[str, Any]:
    """Official files -> ArrayRecord in `out`; Atlas makes its official files in `out`/raw.

    Args:
      dataset: `webqa`, `atlas`, `corpus` for an interchange folder, `folder` for one of documents
        and pictures, `chat` for chat files, `cited` or `searched` for a prepared corpus (cited.py,
        searched.py), `hf` or `webdataset` (row_files.py), a benchmark of benchmarks.NAMES, or
        knowledge of STREAMS.
      raw: folder with the files; of M-BEIR also the file of one pool, of STREAMS and `chat` the
        file itself; None for Atlas.
      overwrite: replace the corpus that is in `out`.
      max_broken_pictures: how many may be broken; see data.pictures.decode.BrokenPictures.
      folder: of `folder`, how documents become sources, of `vidore` its `pages` alone; None: the
        defaults.
      unanswerable: of `atlas`, whether some questions of test have no answer in the collection.
      passage_words: of STREAMS but `dpr`, words of a passage, at most; None: 100.
      cited: of `cited`, how conversations are made of the corpus in `raw`; None: the defaults.
      balanced: of `searched`, see searched.SearchedOptions.
      columns: of `hf` and `webdataset`, what their columns are; see row_files.parse_columns.
      flag: that named `raw`, for messages.
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
    takes_file = dataset == "chat" or dataset in STREAMS
    takes_file = takes_file or (dataset in NAMES and open_benchmark(dataset).takes_file)
    if raw is not None and not (raw.is_dir() or (takes_file and raw.is_file())):
        if raw.is_file():
            raise UserError(f"{flag}={raw}: is a file; give the folder that it is in.")
        what = "file or folder" if takes_file else "folder"
        raise UserError(f"{flag}={raw}: no such {what}; check the path.")
    has_pages = dataset == "vidore" and folder is not None
    has_pages = has_pages and folder == FolderOptions(pages=folder.pages)
    if folder is not None and dataset != "folder" and not has_pages:
        raise UserError(
            "--chunk_words, --chunk_overlap, --pages, --ocr: say how documents become sources; "
            "only `mmqa prepare folder` takes them, and `mmqa prepare vidore` --pages."
        )
    if unanswerable and dataset != "atlas":
        raise UserError("--unanswerable: is a choice of `mmqa prepare atlas`; leave it out.")
    if passage_words is not None and (dataset not in STREAMS or dataset == "dpr"):
        raise UserError(
            "--passage_words: says how articles of wikipedia, kilt, infoseek_wiki are cut; leave "
            "it out."
        )
    if max_broken_pictures is not None and dataset in STREAMS:
        raise UserError(
            f"--max_broken_pictures: pictures of {dataset} are not opened here; leave it out."
        )
    has_rows = dataset in ("hf", "webdataset")
    if has_rows != (columns is not None):
        raise UserError(
            "--columns: says what the columns of hf and webdataset are, such as "
            "question=question,answers=answer,image=image; "
            + ("give it." if has_rows else "leave it out.")
        )
    if cited is not None and dataset != "cited":
        raise UserError(
            "--rankings, --top_k, --pictures: say which sources a conversation of `cited` shows; "
            "leave them out."
        )
    if balanced and dataset != "searched":
        raise UserError("--balanced: is of conversations of `searched`; leave it out.")
    roles = parse_columns(columns) if columns is not None else {}
    check_out(out, folder=True)
    if not overwrite:
        corpus_records.refuse_corpus(out)
    options = {"overwrite": overwrite, "max_broken_pictures": max_broken_pictures}
    with no_empty_folders(out):
        if dataset == "atlas":
            return prepare_atlas(out, unanswerable=unanswerable, **options)
        if dataset in STREAMS:
            return prepare_stream(
                dataset,
                raw,
                out,
                WORDS if passage_words is None else passage_words,
                overwrite=overwrite,
            )
        if dataset == "folder":
            return prepare_folder(raw, out, folder or FolderOptions(), **options)
        with Progress("Preparing", None, "records") as progress:
            options["progress"] = progress.reach
            if dataset == "corpus":
                return prepare_interchange(raw, out, **options)
            if has_rows:
                return prepare_rows(dataset, raw, out, roles, **options)
            if dataset == "chat":
                return prepare_chats(raw, out, **options)
            if dataset == "cited":
                from mmqa_jax.runs.cited import CitedOptions, prepare_cited  # prompts take long

                return prepare_cited(raw, out, cited or CitedOptions(), **options)
            if dataset == "searched":
                from mmqa_jax.runs.searched import SearchedOptions, prepare_searched

                return prepare_searched(raw, out, SearchedOptions(balanced=balanced), **options)
            if has_pages:
                options["pages"] = folder.pages
            if dataset in NAMES:
                return prepare_benchmark(dataset, raw, out, **options)
            return prepare_release(raw, out, **options)


def prepare_atlas(
    out: Path, countries: int = 0, *, unanswerable: bool = False, **options: Any
) -> dict[str, Any]:
    """Builds Atlas in `out`/raw (WebQA's official formats) and prepares it in `out`.

    Args:
      countries: how many countries; 0 = all.
      unanswerable: as `prepare`.
      options: of `prepare`; a finished `out`/raw of an earlier attempt is used as it is.
    """
    from mmqa_jax.data.atlas.build import build_atlas

    raw = out / "raw"
    if not (raw / "summary.json").exists():
        with Progress("Making Atlas", None, "steps") as progress:
            build_atlas(
                raw,
                limit_countries=countries or None,
                progress=lambda stage, done, total: progress.advance(
                    int(done == total), stage=stage
                ),
            )
    with Progress("Preparing", None, "records") as progress:
        options["progress"] = progress.reach
        return prepare_release(raw, out, "atlas", unanswerable=unanswerable, **options)


def prepare_release(
    raw: Path, out: Path, name: str = "webqa", *, unanswerable: bool = False, **options: Any
) -> dict[str, Any]:
    """The official files in `raw` to ArrayRecord in `out`.

    Resumes an interrupted attempt on the same files, with the same result. The manifest's
    `origin` lists the files and what they hold: repeated and reused snippet ids, rows of imgs.tsv,
    and for `webqa` the counts with the published ones.

    Args:
      name: `webqa`, or `atlas`, whose files have the same formats.
      unanswerable: as `prepare`.
      options: of records.write_records.
    """
    prefix = _PREFIXES[name]
    train_val, test = raw / f"{prefix}_train_val.json", raw / f"{prefix}_test.json"
    if not train_val.exists():
        raise UserError(
            f"{train_val}: no such file; put the official files ({prefix}_train_val.json, "
            f"{prefix}_test.json, imgs.tsv, imgs.lineidx) there."
        )
    questions_from = [path for path in (train_val, test) if path.exists()]
    facts_from = [path for path in [raw / f"{prefix}_corpus.json"] if path.exists()]
    materials = corpus_records.materials_beside(raw) or (webqa.MATERIALS if name == "webqa" else ())
    release = webqa.read_release(questions_from, facts_from)
    # By id: in the files' order, gold before negatives, ties would favor gold sources.
    sources = sorted(release.sources, key=lambda source: source.id)
    questions = release.questions
    if unanswerable:
        sources, questions = with_unanswerable(sources, questions)
    tsv, lineidx = raw / "imgs.tsv", raw / "imgs.lineidx"
    pictures = webqa.ImagesTsv(tsv, lineidx)
    pictures.check_ends(source.image for source in sources if source.image is not None)
    origin: dict[str, Any] = {
        "files": [str(path) for path in (*questions_from, *facts_from, tsv, lineidx)],
        "repeated_snippets": release.repeated_snippets,
        "reused_snippet_ids": release.reused_snippet_ids,
        "picture_rows": len(pictures),
    }
    if name == "webqa":
        origin["published_counts"] = webqa.compared_counts(release)
    return corpus_records.write_records(
        out,
        sources,
        questions,
        pictures.read_named,
        name=name,
        materials=materials,
        origin=origin,
        inputs=pictures.signature,
        **options,
    )


def prepare_benchmark(
    name: str, raw: Path, out: Path, *, pages: Pages | None = None, **options: Any
) -> dict[str, Any]:
    """The official files of a question-answering benchmark to ArrayRecord in `out`.

    Args:
      name: of benchmarks.NAMES.
      pages: of `vidore`, what is taken of its pages; None: the default.
      options: of records.write_records.
    """
    benchmark = open_benchmark(name)
    official = benchmark.read(raw) if pages is None else read_vidore(raw, pages)
    return corpus_records.write_records(
        out,
        official.sources,
        official.questions,
        official.read_picture,
        name=name,
        materials=benchmark.materials,
        origin=official.origin(),
        inputs=official.inputs,
        sourceless=not official.sources,
        **options,
    )


def prepare_stream(
    name: str, raw: Path, out: Path, passage_words: int = WORDS, *, overwrite: bool = False
) -> dict[str, Any]:
    """A published file of Wikipedia, one of STREAMS, to sources on disk in `out`, while it is read.

    Resumes an interrupted attempt on the same file, with the same result.
    """
    stream = STREAMS[name](raw, PassageOptions(passage_words))
    materials = [WIKIPEDIA] if stream.pictures is None else [WIKIPEDIA, WIKIPEDIA_PICTURES]
    return write_streamed(out, stream, name=name, materials=materials, overwrite=overwrite)


def prepare_interchange(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """A corpus interchange folder (interchange.py) to ArrayRecord in `out`."""
    folder_content = read_interchange(folder)
    return corpus_records.write_records(
        out,
        folder_content.sources,
        folder_content.questions,
        folder_content.read_picture,
        name=folder.resolve().name,
        materials=folder_content.materials,
        origin={"folder": str(folder)},
        **options,
    )


def prepare_chats(raw: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Chat files (chats.py) to ArrayRecord in `out`; the manifest's `origin` counts ignored
    keys.
    """
    chats = ChatFiles(raw)
    return corpus_records.write_records(
        out,
        (),
        chats.questions,
        chats.read_picture,
        name=raw.resolve().stem,
        origin={"files": list(map(str, chats.files)), "ignored_keys": dict(chats.ignored)},
        sourceless=True,
        **options,
    )


def prepare_rows(
    kind: str, raw: Path, out: Path, columns: Mapping[str, str], **options: Any
) -> dict[str, Any]:
    """Rows of others' data sets (row_files.py) to ArrayRecord in `out`; the manifest's `origin`
    counts the rows that were left out.
    """
    rows = read_rows(kind, raw, columns)
    return corpus_records.write_records(
        out,
        rows.sources,
        rows.questions,
        rows.read_picture,
        name=raw.resolve().name,
        origin={
            "folder": str(raw),
            "columns": dict(columns),
            "left_out_rows": rows.left_out,
            "reasons": rows.reasons,
        },
        sourceless=True,
        **options,
    )


def prepare_folder(folder: Path, out: Path, options: FolderOptions, **more: Any) -> dict[str, Any]:
    """A folder of documents and pictures (data/folder.py) to ArrayRecord in `out`.

    Files that an earlier call with the same `out` has read are not read again, and where nothing
    has changed nothing is written. The manifest's `origin` holds the report of the files. A folder
    with sources.jsonl is an interchange folder, and read as one.

    `more`: of records.write_records.
    """
    if (folder / "sources.jsonl").exists():
        if flag := options.flag:
            raise UserError(
                f"{flag}: {folder} has sources.jsonl, which says what its sources are; leave "
                f"{flag.partition('=')[0]} out."
            )
        with Progress("Preparing", None, "records") as progress:
            return prepare_interchange(folder, out, progress=progress.reach, **more)
    with Progress("Reading", None, "files") as progress:
        content = read_folder(folder, out / KEPT, options, leave_out=out, progress=progress.reach)
    if (out / corpus_records.MANIFEST).exists() and more.get("overwrite"):
        manifest = corpus_records.read_manifest(out)
        if manifest["origin"].get("digest") == content.digest:
            origin = {**manifest["origin"], "opened": content.report.opened}
            return {**manifest, "origin": origin}
    pictures = sum(source.image is not None for source in content.sources)
    more["max_broken_pictures"] = pictures  # all that is broken has been left out and reported
    with Progress("Preparing", None, "records") as progress:
        return corpus_records.write_records(
            out,
            content.sources,
            [],
            content.read_picture,
            name=folder.resolve().name,
            origin={
                "folder": str(folder),
                "digest": content.digest,
                **dataclasses.asdict(content.report),
            },
            progress=progress.reach,
            **more,
        )
