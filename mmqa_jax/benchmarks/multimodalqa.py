"""MultimodalQA's official files (https://github.com/allenai/multimodalqa): a corpus with questions.

    MMQA_{train,dev,test}.jsonl(.gz)   questions; without answers and supporting context in test
    MMQA_texts.jsonl(.gz)              paragraphs of Wikipedia
    MMQA_tables.jsonl(.gz)             tables of Wikipedia
    MMQA_images.jsonl(.gz)             titles and file names of pictures
    final_dataset_images/              the pictures

A question lists its own context, paragraphs, pictures and one table (24 sources in the mean of
dev), of which the supporting ones are gold. A table becomes a text source: its page's title, its
name, and a line for each row with the cells under their columns' names. A picture has no caption
but the title of its page.

MultimodalQA's scores and its prediction file (allenai/multimodalqa, baselines/evaluate.py).

    multimodalqa/list_em   the predicted items are the answer's, in any order, after normalization
    multimodalqa/list_f1   F1 of the items' words, items paired one to one for the best sum; an item
                           with numbers must share one; rounded to two decimals, a question each

The file is {qid: text, or a list of texts}, whose texts are kept whole in the traces. Our
predictions give a list as one text, with SEPARATOR between its items.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import write_json
from mmqa_jax.data.articles import WIKIPEDIA, WIKIPEDIA_PICTURES
from mmqa_jax.data.formats import official
from mmqa_jax.data.schema import Material, Prediction, Question, Source
from mmqa_jax.evaluation.multiple_choice import list_em, list_f1
from mmqa_jax.evaluation.scores import group_of, groups_by, paired, read_object, read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

# Between the items of an answer that is a list; no answer of dev holds it.
SEPARATOR = "; "
# Keys of Question.extra: the items of the answer, where it is found, and what the question needs.
ANSWER_LIST, ANSWER_MODALITY, MODALITIES = "answer_list", "answer_modality", "modalities"
# Key of Source.extra: which of the three collections a source is from.
DOC_PART = "doc_part"
TYPES = (
    *("TextQ", "TableQ", "ImageQ", "ImageListQ"),
    *("Compose(TableQ,ImageListQ)", "Compose(TextQ,ImageListQ)", "Compose(ImageQ,TableQ)"),
    *("Compose(ImageQ,TextQ)", "Compose(TextQ,TableQ)", "Compose(TableQ,TextQ)"),
    *("Intersect(TableQ,TextQ)", "Intersect(ImageListQ,TableQ)", "Intersect(ImageListQ,TextQ)"),
    "Compare(Compose(TableQ,ImageQ),TableQ)",
    "Compare(Compose(TableQ,ImageQ),Compose(TableQ,TextQ))",
    "Compare(TableQ,Compose(TableQ,TextQ))",
)
# The types that need one modality alone (baselines/common_utils.py).
SINGLE_MODAL = ("TextQ", "TableQ", "ImageQ", "ImageListQ")
PICTURES = "final_dataset_images"

# The repository's page; its files of dev, test and pictures were counted.
PUBLISHED_COUNTS = {
    "train questions": 23_817,
    "val questions": 2_441,
    "test questions": 3_660,
    "pictures": 57_058,
}
MATERIALS = (Material("MultiModalQA", "Talmor et al., ICLR 2021"), WIKIPEDIA, WIKIPEDIA_PICTURES)

_SPLITS = {"train": "train", "dev": "val", "test": "test"}
_CONTEXT = ("text_doc_ids", "image_doc_ids")


def read_multimodalqa(folder: Path) -> official.BenchmarkFiles:
    """Reads the questions that there are, and the sources that they may be answered from.

    `Question.category` is its type (one of TYPES); `positives` are the supporting sources,
    `negatives` the rest of its context. `answers` has the answer's items in one text, with
    SEPARATOR between them, and `extra[ANSWER_LIST]` the items.
    """
    files = official.OfficialFiles(folder)
    pictures = official.PictureFolders(folder, (PICTURES, "images"))
    sources: dict[str, Source] = {}
    for part, text_of in (("text", _paragraph), ("table", _table), ("image", lambda row: "")):
        rows = official.line_entries(_file(files, f"{part}s", required=True))
        sources |= official.read_entries(
            rows, lambda row, part=part, text_of=text_of: _source(row, part, text_of(row)), "id"
        )
    names = [source.image for source in sources.values() if source.image is not None]
    present = [name for name in names if name in pictures]
    if not present:
        files.missing[f"{PICTURES}/"] = "no pictures; their titles stand for them"
        sources = {k: dataclasses.replace(source, image=None) for k, source in sources.items()}
    questions: dict[str, Question] = {}
    for split in _SPLITS:
        path = _file(files, split, required=False)
        rows = () if path is None else official.line_entries(path)
        questions |= official.read_entries(
            rows, lambda row, split=split: _question(row, split, sources), "qid"
        )
    files.check_questions(questions, "MultimodalQA", "MMQA_dev.jsonl.gz, or another split's file,")
    listed = sorted(sources.values(), key=lambda source: source.id)
    counts = _counts(list(questions.values()), listed, len(present))
    return files.content(questions.values(), counts, PUBLISHED_COUNTS, pictures, listed, present)


def _file(files: official.OfficialFiles, part: str, *, required: bool) -> Path | None:
    names = f"MMQA_{part}.jsonl.gz", f"MMQA_{part}.jsonl"
    if required:
        return files.required(*names, remedy="fetch the folder `dataset` of allenai/multimodalqa")
    return files.optional(*names, without=f"there are no {_SPLITS[part]} questions")


def _source(row: official.Entry, part: str, text: str) -> Source:
    modality, picture = ("image", row.text("path")) if part == "image" else ("text", None)
    extra = {DOC_PART: part, **({"url": row["url"]} if isinstance(row.get("url"), str) else {})}
    return Source(row.text("id"), modality, text, row.text("title"), picture, extra=extra)


def _paragraph(row: official.Entry) -> str:
    return row.text("text")


def _table(row: official.Entry) -> str:
    table = row.get("table")
    try:
        columns = [str(column["column_name"]) for column in table["header"]]
        rows = [[str(cell["text"]) for cell in cells] for cells in table["table_rows"]]
        name = str(table.get("table_name") or "")
    except (TypeError, KeyError, AttributeError) as error:
        raise row.error("`table` has not the form of the release (header, table_rows)") from error
    return table_text(name, columns, rows)


def table_text(name: str, columns: list[str], rows: list[list[str]]) -> str:
    """A table as text: its name, then a line for each row, `column: cell` where it has a cell."""
    lines = [name] if name else []
    for cells in rows:
        # A row may have more cells than the header has columns.
        named = [columns[n] if n < len(columns) else "" for n in range(len(cells))]
        texts = [
            f"{column}: {cell}" if column else cell
            for column, cell in zip(named, cells, strict=True)
            if cell.strip()
        ]
        lines.append(", ".join(texts))
    return "\n".join(lines)


def _question(row: official.Entry, split: str, sources: dict[str, Source]) -> Question:
    metadata = row.entry("metadata")
    context = [name for key in _CONTEXT for name in metadata.texts(key)]
    if metadata.get("table_id") is not None:
        context.append(metadata.text("table_id"))
    try:
        gold = dict.fromkeys(str(item["doc_id"]) for item in row.get("supporting_context", []))
        items = [str(item["answer"]) for item in row.get("answers", [])]
        found_in = sorted({str(item["modality"]) for item in row.get("answers", [])})
    except (TypeError, KeyError) as error:
        raise row.error(
            "`answers` or `supporting_context` has not the form of the release"
        ) from error
    unknown = next((name for name in (*gold, *context) if name not in sources), None)
    if unknown is not None:
        raise row.error(f"names source {unknown}, which is in none of the files of sources")
    kind = metadata.get("type", "")
    if kind not in ("", *TYPES):
        raise metadata.wrong("type", "one of the release's")
    extra: dict[str, Any] = {}
    if metadata.get("modalities"):
        extra[MODALITIES] = list(metadata.texts("modalities"))
    if items:
        extra |= {ANSWER_LIST: items, ANSWER_MODALITY: SEPARATOR.join(found_in)}
    return Question(
        id=row.text("qid"),
        split=_SPLITS[split],
        question=row.text("question"),
        answers=(SEPARATOR.join(items),) if items else (),
        category=kind,
        positives=tuple(gold),
        negatives=tuple(name for name in dict.fromkeys(context) if name not in gold),
        extra=extra,
    )


def _counts(questions: list[Question], sources: list[Source], picture_files: int) -> dict[str, int]:
    splits = Counter(f"{question.split} questions" for question in questions)
    parts = Counter(source.extra[DOC_PART] for source in sources)
    kinds = Counter(question.category for question in questions if question.category)
    return {
        **{name: splits[name] for name in PUBLISHED_COUNTS if name.endswith("questions")},
        "pictures": parts["image"],
        "picture files": picture_files,
        "texts": parts["text"],
        "tables": parts["table"],
        **{f"{kind} questions": kinds[kind] for kind in TYPES},
    }


def has_answer_list(question: Question) -> bool:
    """Whether a question's answer is published."""
    return ANSWER_LIST in question.extra


def answer_items(prediction: Prediction) -> Sequence[str]:
    """Returns an official file's items, or the items of the text; an empty text is one item."""
    return prediction.trace.get(ANSWER_LIST, prediction.answer.split(SEPARATOR))


def score_multimodalqa(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> Evaluation:
    """Both scores by type of question, by number of modalities, and by where the answer is."""
    scored = scored_split(questions, predictions, has_answer_list, "an answer")
    per_question = {
        f"multimodalqa/{name}": scored.values(
            lambda q, prediction, score=score: score(answer_items(prediction), q.extra[ANSWER_LIST])
        )
        for name, score in (("list_em", list_em), ("list_f1", list_f1))
    }
    return scored.evaluation(per_question, _groups(scored.counted))


def read_multimodalqa_predictions(
    path: Path, questions: Sequence[Question] = ()
) -> list[Prediction]:
    """Reads the official file, or predictions.jsonl."""
    if path.suffix == ".jsonl":
        return read_own_lines(path, questions)
    rows = read_object(
        path,
        "one object of qid -> answer was expected; give MultimodalQA's format or predictions.jsonl",
    )
    predictions = []
    for name, answer in rows.items():
        items = answer if isinstance(answer, list) else ["" if answer is None else answer]
        if not all(isinstance(item, str | int | float) for item in items):
            raise UserError(
                f"{path}, {name}: the answer must be a text or a list of texts; correct it."
            )
        texts = list(map(str, items))
        predictions.append(Prediction(name, SEPARATOR.join(texts), trace={ANSWER_LIST: texts}))
    return predictions


def write_multimodalqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the official file: every question, a list where the answer has several items."""
    rows: dict[str, str | list[str]] = {}
    for question, prediction in paired(questions, predictions):
        items = answer_items(prediction)
        rows[question.id] = items[0] if len(items) == 1 else items
    write_json(path, rows)


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """The groups that the official script prints: modalities, types, places of the answer."""
    kinds = sorted({question.category for question in questions})
    single = group_of(questions, lambda q: q.category in SINGLE_MODAL)
    return {
        "single-modal": single,
        "multi-modal": ~single,
        **groups_by(questions, lambda q: q.category, kinds),
        **groups_by(questions, lambda q: q.extra[ANSWER_MODALITY], title="answer in {}"),
    }


BENCHMARK = Benchmark(
    read=read_multimodalqa,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="val",
    formats="predictions.jsonl, or the official {qid: answer, or list of answers} as JSON",
    read_predictions=read_multimodalqa_predictions,
    has_reference=has_answer_list,
    score=score_multimodalqa,
    headline="multimodalqa",
    write_submission=write_multimodalqa_submission,
    split_names={"dev": "val"},
    boards=read_boards("multimodalqa"),
)
