"""MMEB-V2's image tasks (https://github.com/TIGER-AI-Lab/VLM2Vec), of which MMEB consists too.

    TASK/test-*.parquet    ziyjiang/MMEB_Test_Instruct on the hub: qry_inst, qry_text, qry_img_path,
                           tgt_inst, tgt_text, tgt_img_path; a folder for each task
    image-tasks/           TIGER-Lab/MMEB-V2: the pictures by those paths; beside TASK/, or in it

A row is a query with its own candidates, about a thousand, of which the first is the right one:
texts (classes, answers, captions) or pictures, with a text or without. Each task is a corpus.
A video is eight frames to the authors, and a source one picture here, so that the video tasks are
refused by name; the tasks of pages are ViDoRe's (vidore.py) and VisRAG's.

    mmeb/hit@1    whether the right candidate is the best of a query's own (eval.py)

The score of the image tasks is the mean over the 36, which stands in a note.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.official import hub_tables, parquet_entries
from mmqa_jax.data.schema import Material, Prediction, Question, Source
from mmqa_jax.evaluation.retrieval import FORMATS, has_positives, read_found
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

# Kind of task -> its tasks.
KINDS = {
    "classification": (
        *("ImageNet-1K", "N24News", "HatefulMemes", "VOC2007", "SUN397", "Place365", "ImageNet-A"),
        *("ImageNet-R", "ObjectNet", "Country211"),
    ),
    "question answering": (
        *("OK-VQA", "A-OKVQA", "DocVQA", "InfographicsVQA", "ChartQA", "Visual7W", "ScienceQA"),
        *("VizWiz", "GQA", "TextVQA"),
    ),
    "retrieval": (
        *("VisDial", "CIRR", "VisualNews_t2i", "VisualNews_i2t", "MSCOCO_t2i", "MSCOCO_i2t"),
        *("NIGHTS", "WebQA", "FashionIQ", "Wiki-SS-NQ", "OVEN", "EDIS"),
    ),
    "grounding": ("MSCOCO", "RefCOCO", "RefCOCO-Matching", "Visual7W-Pointing"),
}
TASKS = tuple(task for tasks in KINDS.values() for task in tasks)
# The authors' experiments/public/eval/video.yaml.
VIDEO_TASKS = (
    *("SmthSmthV2", "HMDB51", "UCF101", "K700", "Breakfast", "MSR-VTT", "MSVD", "DiDeMo"),
    *("YouCook2", "VATEX", "QVHighlight", "Charades-STA", "MomentSeeker", "Video-MME", "NExTQA"),
    *("EgoSchema", "MVBench", "ActivityNetQA"),
)
SCORER = "mmeb/hit@1"
MATERIALS = (
    Material("MMEB-V2", "Jiang et al., ICLR 2025; Meng et al., 2025", "Apache-2.0"),
    Material("MMEB's pictures, of 36 data sets", license="under their own licenses"),
)
_PICTURES = "image-tasks"
_NEEDED = ("qry_inst", "qry_text", "qry_img_path", "tgt_text", "tgt_img_path")
_MARK = "<|image_1|>"  # where a picture stands in an instruction


def read_mmeb(folder: Path) -> official.BenchmarkFiles:
    """Reads one task, by whose name its folder is called; all questions are of the split `test`.

    `Question.category` is the task, `positives` the right candidate, `negatives` the others.
    """
    task = folder.name
    if task in VIDEO_TASKS:
        raise UserError(
            f"{folder}: {task} is a task of videos, of which an encoder sees eight frames, but a "
            "source here is one picture; give the folder of one of the 36 image tasks."
        )
    if task not in TASKS:
        raise UserError(
            f"{folder}: is no task's folder; give one that is called {TASKS[0]}, {TASKS[1]}, ..."
        )
    tables = hub_tables(folder, "test")
    if not tables:
        raise UserError(f"{folder}: holds no test-*.parquet; put the task's files there.")
    files = official.OfficialFiles(folder)
    files.read_files += tables
    root = folder if (folder / _PICTURES).is_dir() else folder.parent
    sources: dict[str, Source] = {}
    questions = [
        _question(f"{task}/{number}", task, row, sources)
        for number, row in enumerate(parquet_entries(tables, _NEEDED))
    ]
    entries = (*questions, *sources.values())
    places = {name: (f"{_PICTURES}/{name}",) for name in official.picture_names(entries)}
    pictures = official.PictureFiles(root, places)
    counts = {"test questions": len(questions), "candidates": len(sources)}
    if not all(name in pictures for name in places):
        files.missing[f"{_PICTURES}/"] = "some or all pictures of the task"
    asked = official.with_present_pictures(questions, pictures)
    listed = official.with_present_pictures(sources.values(), pictures)
    return files.content(asked, counts, {}, pictures, listed)


def _question(name: str, task: str, row: official.Entry, sources: dict[str, Source]) -> Question:
    picture = row.text("qry_img_path", "")
    texts = row.texts("tgt_text")
    paths = row["tgt_img_path"] if isinstance(row.get("tgt_img_path"), list) else []
    paths = list(paths) or [""] * len(texts)
    if not texts or len(paths) != len(texts) or not all(isinstance(path, str) for path in paths):
        raise row.error("tgt_text and tgt_img_path are not lists of as many texts and paths")
    candidates = [
        _candidate(task, path, text, picture, sources)
        for path, text in zip(paths, texts, strict=True)
    ]
    asked = f"{row.text('qry_inst', '').replace(_MARK, '').strip()} {row.text('qry_text', '')}"
    return Question(
        id=name,
        split="test",
        question=asked.strip(),
        image=picture or None,
        category=task,
        positives=(candidates[0],),
        negatives=tuple(dict.fromkeys(x for x in candidates[1:] if x != candidates[0])),
    )


def _candidate(task: str, path: str, text: str, picture: str, sources: dict[str, Source]) -> str:
    """The id of a candidate, which may be new; the authors tell candidates apart by their text, by
    their picture, or, of a query with a picture, by both."""
    key = text if not path else path if not picture else f"{path}:{text.strip(chr(34))}"
    name, kind = f"{task}/{len(sources)}", "image" if path else "text"
    return sources.setdefault(key, Source(name, kind, text.strip(), image=path or None)).id


def score_mmeb(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Hit@1 among a query's own candidates, by task and kind; a missing ranking counts 0."""
    scored = scored_split(questions, predictions, has_positives, "a right candidate")

    def hit(question: Question, prediction: Prediction) -> float:
        candidates = {*question.positives, *question.negatives}
        best = next((name for name in prediction.sources if name in candidates), None)
        return float(best in question.positives)

    hits = scored.values(hit)
    tasks = np.array([question.category for question in scored.counted])
    of_tasks = {task: tasks == task for task in TASKS if task in tasks}
    kinds: Mapping[str, np.ndarray] = {
        f"kind: {kind}": np.isin(tasks, names) for kind, names in KINDS.items()
    }
    groups = of_tasks | {name: rows for name, rows in kinds.items() if rows.any()}
    evaluation = scored.evaluation({SCORER: hits}, groups)
    average = float(np.mean([hits[rows].mean() for rows in of_tasks.values()]))
    evaluation.notes.append(
        f"average of {len(of_tasks)} of {len(TASKS)} image tasks, hit@1: {100 * average:.2f} %"
    )
    return evaluation


BENCHMARK = Benchmark(
    read=read_mmeb,
    materials=MATERIALS,
    split="test",
    formats=FORMATS,
    read_predictions=read_found,
    has_reference=has_positives,
    score=score_mmeb,
    headline="mmeb",
    ranks=True,
    boards=read_boards("mmeb", TASKS),
)
