"""MMSearch's files (https://github.com/CaraJ7/MMSearch; CaraJ/MMSearch on the hub): search engines.

    end2end.parquet     sample_id, query, query_image, area, subfield, gt_requery, gt_answer,
                        alternative_gt_answers, ...; here or in data/, in one or several files

The question is asked of the whole web; its picture may be null. The files of the tasks in between
(rerank, summarization) are not read: they judge stages of the authors' own engine.

MMSearch's score of the end-to-end task (score/f1_score.py, get_result_summary):

    mmsearch/f1    SQuAD's F1 of the answer, of the published answer that gives most

The leaderboard's final score has it with the weight .75, beside the three stages.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.official import PictureColumns, parquet_entries
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.scores import groups_by, read_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers, squad_f1

SUBFIELD, REQUERY = "subfield", "gt_requery"  # keys of Question.extra
SCORER = "mmsearch/f1"
AREAS = ("news", "knowledge")
PUBLISHED_COUNTS = {"test questions": 300}
MATERIALS = (
    Material("MMSearch", "Jiang et al., ICLR 2025"),
    Material("MMSearch's pictures, of the web", license="under their own licenses"),
)
_PICTURE = "query_image"
_NEEDED = ("sample_id", "query", "area", SUBFIELD, REQUERY, "gt_answer", "alternative_gt_answers")


def read_mmsearch(folder: Path) -> official.BenchmarkFiles:
    """Reads the end-to-end task, all of the split `test`; `Question.category` is the area."""
    files = official.OfficialFiles(folder)
    tables = sorted(folder.glob("end2end*.parquet")) or sorted(folder.glob("*/end2end*.parquet"))
    if not tables:
        raise UserError(
            f"{folder}: holds no end2end.parquet; put the hub's file of MMSearch there."
        )
    files.read_files += tables
    pictures = PictureColumns(tables, "sample_id", (_PICTURE,))
    rows = parquet_entries(tables, _NEEDED)
    questions = official.read_entries(rows, _question, "sample_id").values()
    pictured = official.with_present_pictures(questions, pictures)
    kinds = {f"{area} questions": lambda q, area=area: q.category == area for area in AREAS}
    kinds["questions with a picture"] = lambda q: q.image is not None
    counts = official.counts_of(pictured, ("test",), kinds)
    return files.content(pictured, counts, PUBLISHED_COUNTS, pictures)


def _question(row: official.Entry) -> Question:
    name, area = str(row["sample_id"]), row.text("area").lower()
    if area not in AREAS:
        raise row.wrong("area", " or ".join(AREAS))
    answers = (row.text("gt_answer"), *row.texts("alternative_gt_answers"))
    return Question(
        id=name,
        split="test",
        question=row.text("query"),
        image=f"{name}/{_PICTURE}",
        answers=tuple(dict.fromkeys(answers)),
        category=area,
        extra={key: row.text(key, "") for key in (SUBFIELD, REQUERY)},
    )


def score_mmsearch(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """F1 overall, by area and by subfield; a missing prediction counts 0."""
    scored = scored_split(questions, predictions, has_answers, "a published answer")
    f1 = scored.values(lambda q, p: squad_f1(p.answer, q.answers))
    areas = groups_by(scored.counted, lambda q: q.category, AREAS)
    subfields = groups_by(scored.counted, lambda q: q.extra[SUBFIELD], title="subfield: {}")
    return scored.evaluation({SCORER: f1}, areas | subfields)


BENCHMARK = Benchmark(
    read=read_mmsearch,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats='predictions.jsonl, or the authors\' lines {"sample_id", "prediction"}',
    read_predictions=functools.partial(read_lines, id_key="sample_id", text_key="prediction"),
    has_reference=has_answers,
    score=score_mmsearch,
    headline="mmsearch",
    boards=read_boards("mmsearch"),
)
