"""`mmqa prepare`: runs corpora.py and prints a summary of the corpus."""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError, first_names
from mmqa_jax.core.files import write_json
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.records.corpus_records import holds_corpus, materials_of
from mmqa_jax.evaluation import corpus_statistics as statistics
from mmqa_jax.evaluation.report import ReportData, write_report
from mmqa_jax.evaluation.tables import Table, show
from mmqa_jax.runs import corpora

_NAMED = 5  # files that a line names
_OWN = (
    "corpus",
    "folder",
    "chat",
    "cited",
    "searched",
    "hf",
    "webdataset",
)  # whose corpora are named by their folders
# Of a folder's report, what `--json` prints.
FILES_KEPT = (
    *("documents", "pictures", "pages", "opened", "bad", "same_content", "scanned_pages"),
    *("broken_figures", "ledger", "left_out", "hidden"),
)


def prepare(
    dataset: str,
    raw: Path | None,
    out: Path,
    *,
    report: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Prepares a corpus and prints its counts; returns what `--json` prints.

    `report`: also writes statistics; of a corpus that `out` already holds only these.
    """
    if report and not overwrite and holds_corpus(out):
        return report_corpus(dataset, out)
    manifest = corpora.prepare(dataset, raw, out, overwrite=overwrite, **options)
    summary = corpus_summary(manifest, out)
    return {**summary, **report_corpus(dataset, out)} if report else summary


def report_corpus(dataset: str, out: Path) -> dict[str, Any]:
    """Prints the statistics of the corpus in `out`; writes its statistics.json and report.html."""
    corpus = open_corpus(out)
    name = corpus.manifest.get("name")
    if dataset not in _OWN and name != dataset:
        raise UserError(
            f"--out={out}: holds the corpus {name}, not {dataset}; name that, or another folder."
        )
    counted = statistics.corpus_statistics(corpus)
    tables = statistics.statistics_tables(counted, published=dataset == "webqa")
    for table in tables:
        show(table)
    write_json(out / "statistics.json", counted.to_json())
    data = ReportData(
        title=f"{name}: statistics",
        description=f"{len(corpus.questions()):,} questions, {len(corpus):,} sources.",
        line_plots=statistics.statistics_plots(counted),
        tables=tables,
        materials=corpus.materials,
    )
    write_report(out / "report.html", data)
    print(f"Report: {out / 'report.html'}")
    return {"statistics": counted.to_json(), "report": str(out / "report.html")}


def prepare_atlas(out: Path, countries: int, **options: Any) -> dict[str, Any]:
    """Prepares Atlas with this many countries (0 = all)."""
    return corpus_summary(corpora.prepare_atlas(out, countries, **options), out)


def corpus_summary(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    """Prints a corpus's counts, with warnings on stderr; returns what `prepare` returns."""
    for material in materials_of(manifest):
        print(material)
    counts, origin = manifest["counts"], manifest["origin"]
    missing_files = origin.get("missing_files", {})
    warnings = []
    if broken := manifest["broken_pictures"]:
        subject = "picture is" if len(broken) == 1 else "pictures are"
        warnings.append(f"{len(broken)} {subject} broken and left out: {first_names(broken)}")
    sourceless = counts["questions_without_sources"]
    if sourceless and counts["sources"]:  # in a corpus without sources it needs no words
        warnings.append(
            f"{sourceless} of {counts['questions']} questions list no sources at all; kept"
        )
    if reused := origin.get("reused_snippet_ids"):
        warnings.append(
            f"{reused} snippet ids are used for two facts; a number is appended to the later id"
        )
    if ignored := origin.get("ignored_keys"):
        keys = first_names(f"{key} ({count})" for key, count in ignored.items())
        warnings.append(f"keys of conversations that are not read: {keys}")
    if left_out := origin.get("left_out_rows"):
        reasons = " ".join(origin["reasons"][:_NAMED])
        warnings.append(f"{left_out} rows or members are left out: {reasons}")
    warnings += folder_notes(origin)
    warnings += stream_notes(origin)
    warnings += [f"{file}: not found; {lack}" for file, lack in missing_files.items()]
    for line in warnings:
        print(line, file=sys.stderr)
    _show_counts(manifest, out)
    names = ("name", "fingerprint", "counts", "splits", "broken_pictures")
    result = {**{key: manifest[key] for key in names}, "data": str(out)}
    if "same_content" in origin:  # of `prepare folder`
        result["files"] = {name: origin[name] for name in FILES_KEPT}
    if "left_out_items" in origin:
        names = ("items", "articles", "left_out_items", "broken")
        result["file"] = {name: origin[name] for name in names}
    if compared := origin.get("published_counts"):
        differing = {what: n for what, n in compared.items() if n["found"] != n["published"]}
        result["published_differences"] = differing
    if "missing_files" in origin:
        result |= {"files": origin["files"], "missing_files": missing_files}
        result["found"] = {k: n["found"] for k, n in compared.items()} | origin["other_counts"]
    return result


def stream_notes(origin: Mapping[str, Any]) -> list[str]:
    """Returns notes on a file that was read as a stream, one a line."""
    left_out = {what: n for what, n in origin.get("left_out_items", {}).items() if what != "header"}
    notes = []
    if broken := left_out.pop("broken", 0):
        subject = "item is" if broken == 1 else "items are"
        named = "; ".join(origin["broken"][:_NAMED])
        more = f"; and {broken - _NAMED} more" if broken > _NAMED else ""
        notes.append(f"{broken:,} {subject} broken and left out: {named}{more}")
    if left_out:
        reasons = ", ".join(f"{n:,} {what}" for what, n in left_out.items())
        notes.append(f"{sum(left_out.values()):,} items have no passages: {reasons}")
    return notes


def folder_notes(origin: Mapping[str, Any]) -> list[str]:
    """Returns notes on a folder's files (data/folder.py, FolderReport), one a line.

    Nothing for the origin of another corpus.
    """
    notes = []
    if bad := origin.get("bad"):
        subject = "file is" if len(bad) == 1 else "files are"
        reasons = "; ".join(f"{file}: {reason}" for file, reason in list(bad.items())[:_NAMED])
        more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        notes.append(f"{len(bad)} {subject} left out: {reasons}{more}")
    if same := origin.get("same_content"):
        pairs = first_names(f"{file} as {first}" for file, first in same.items())
        notes.append(f"{len(same)} with the content of another file, kept once: {pairs}")
    if scanned := origin.get("scanned_pages"):
        pages = sum(map(len, scanned.values()))
        subject = "page is" if pages == 1 else "pages are"
        files = first_names(f"{file} ({len(places)})" for file, places in scanned.items())
        notes.append(f"{pages} scanned {subject} without text, and not read: {files}")
    if broken := origin.get("broken_figures"):
        figures = [f"{file}: {reason}" for file, places in broken.items() for reason in places]
        notes.append(
            f"{len(figures)} broken in documents, left out: {first_names(figures, _NAMED)}"
        )
    notes += _ledger_notes(origin.get("ledger", {}))
    if left_out := origin.get("left_out"):
        endings = first_names(f"{n} {ending or 'without ending'}" for ending, n in left_out.items())
        notes.append(f"{sum(left_out.values())} files of other kinds are not read: {endings}")
    return notes


def _ledger_notes(ledger: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Notes the documents' letters that were not read (data/folder.py, Ledger), one a line."""
    notes = []
    if missing := {file: row for file, row in ledger.items() if row["missing"]}:
        files = first_names(
            f"{file} ({row['missing']:,} of {row['held']:,})" for file, row in missing.items()
        )
        count = sum(row["missing"] for row in missing.values())
        notes.append(f"{count:,} letters of documents were not read: {files}")
    causes: Counter[str] = Counter()
    for row in ledger.values():
        causes.update(row["left_out"])
    if causes:
        named = first_names(f"{cause} ({count:,})" for cause, count in causes.most_common())
        notes.append(f"{causes.total():,} letters of documents are left out on purpose: {named}")
    return notes


def _show_counts(manifest: Mapping[str, Any], out: Path) -> None:
    """Prints a corpus's counts, for a benchmark beside those of the published release."""
    compared = manifest["origin"].get("published_counts")
    if compared:
        columns = ("", "found", "published", "difference")
        rows: list[tuple] = [
            (what, n["found"], n["published"], n["found"] - n["published"])
            for what, n in compared.items()
        ]
        same = all(difference == 0 for *_, difference in rows)
        other = manifest["origin"].get("other_counts", {})
        rows += [(what, count, None, None) for what, count in other.items()]
        note = "As published." if same else "Not the whole published release."
        show(Table(f"{manifest['name']}: {out}", columns, rows, note))
        return
    rows = [(f"{split} questions", n) for split, n in manifest["splits"].items()]
    rows += [(f"{modality} sources", n) for modality, n in manifest["modalities"].items()]
    show(Table(f"{manifest['name']}: {out}", ("", "found"), rows))
