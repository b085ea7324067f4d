"""BRIGHT's tasks (https://github.com/xlang-ai/BRIGHT; xlangai/BRIGHT on the hub): long questions.

    documents/TASK-*.parquet   id, content: the documents of a task
    examples/TASK-*.parquet    id, query, gold_ids, excluded_ids, reasoning, gold_answer

`--raw` is a task's file of documents; its examples lie in the folder beside. Each task is a corpus
of its own. A question has documents that are not to be found, because it was made from them: they
are taken out of its ranking (retrievers.py, get_scores).

    bright/ndcg@10   trec_eval's nDCG, as run.py computes it: equal scores (as float32) are in
                     descending order of their ids

A task's score is the mean over its questions, the benchmark's the mean over the twelve tasks, which
stands in a note. A question without a ranking counts 0; run.py leaves it out.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats.official import BenchmarkFiles, Entry, parquet_entries, read_entries
from mmqa_jax.data.schema import Material, Prediction, Question, Source
from mmqa_jax.evaluation import retrieval
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

TASKS = (
    *("biology", "earth_science", "economics", "psychology", "robotics", "stackoverflow"),
    *("sustainable_living", "leetcode", "pony", "aops", "theoremqa_questions"),
    "theoremqa_theorems",
)
SCORER, _K = "bright/ndcg@10", 10
EXCLUDED = "excluded"  # key of Question.extra: sources that are taken out of its ranking
MATERIALS = (Material("BRIGHT", "Su et al., ICLR 2025", "CC BY 4.0"),)
_NONE = "N/A"  # in the list of excluded documents of a question that has none
_MORE = ("reasoning", "gold_answer")


def read_bright(path: Path) -> BenchmarkFiles:
    """Reads one task; all questions are of the split `test`, `Question.category` is the task.

    `path`: a file of the task's documents.
    """
    task = path.name.partition("-")[0]
    if not path.is_file() or task not in TASKS:
        raise UserError(
            f"{path}: is no file of a task's documents; give documents/TASK-00000-of-00001.parquet "
            f"of {TASKS[0]}, {TASKS[1]}, ..."
        )
    documents, examples = (
        sorted(folder.glob(f"{task}-*.parquet"))
        for folder in (path.parent, path.parent.parent / "examples")
    )
    if not examples:
        raise UserError(
            f"{path.parent.parent / 'examples'}: holds no {task}-*.parquet; fetch the task's "
            "questions, too."
        )
    rows = parquet_entries(documents, ("id", "content"))
    sources = read_entries(rows, lambda row: _source(task, row), "id")
    rows = parquet_entries(examples, ("id", "query", "gold_ids", "excluded_ids"), _MORE)
    questions = read_entries(rows, lambda row: _question(task, row, sources), "id")
    excluded = sum(bool(question.extra[EXCLUDED]) for question in questions.values())
    return BenchmarkFiles(
        questions=list(questions.values()),
        sources=list(sources.values()),
        counts={
            "documents": len(sources),
            "test questions": len(questions),
            "questions with excluded documents": excluded,
        },
        published={},
        files=[*documents, *examples],
    )


def _source(task: str, row: Entry) -> Source:
    return Source(f"{task}/{row.text('id')}", "text", row.text("content", empty=True))


def _question(task: str, row: Entry, sources: dict[str, Source]) -> Question:
    gold, excluded = (
        tuple(f"{task}/{name}" for name in row.texts(key) if name != _NONE)
        for key in ("gold_ids", "excluded_ids")
    )
    for name in gold:
        if name not in sources:
            raise row.error(f"gold_ids names {name!r}, which is not among the documents")
        if name in excluded:
            raise row.error(f"gold_ids and excluded_ids both name {name!r}")
    return Question(
        id=f"{task}/{row.text('id')}",
        split="test",
        question=row.text("query"),
        category=task,
        positives=tuple(dict.fromkeys(gold)),
        extra={
            EXCLUDED: list(excluded),
            **{key: row[key] for key in _MORE if isinstance(row.get(key), str)},
        },
    )


def score_bright(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """nDCG@10 by task, without each question's excluded documents."""
    scored = scored_split(questions, predictions, retrieval.has_positives, "gold documents")
    ranked = []
    for question, prediction in zip(scored.counted, scored.predictions, strict=True):
        excluded = set(question.extra.get(EXCLUDED, ()))
        ranked.append(
            [name for name in retrieval.as_trec_orders(prediction) if name not in excluded]
        )
    gold = [question.positives for question in scored.counted]
    ndcg = retrieval.score_rankings(gold, ranked, (_K,)).per_question[f"ndcg@{_K}"]
    tasks = np.array([question.category for question in scored.counted])
    groups = {task: tasks == task for task in TASKS if task in tasks}
    evaluation = scored.evaluation({SCORER: ndcg}, groups)
    means = [ndcg[rows].mean() for rows in groups.values()]
    evaluation.notes.append(retrieval.average_note(means, f"{len(TASKS)} tasks", f"nDCG@{_K}"))
    return evaluation


BENCHMARK = Benchmark(
    read=read_bright,
    materials=MATERIALS,
    split="test",
    formats=retrieval.FORMATS,
    read_predictions=retrieval.read_found,
    has_reference=retrieval.has_positives,
    score=score_bright,
    headline="bright",
    ranks=True,
    takes_file=True,
    boards=read_boards("bright", TASKS),
)
