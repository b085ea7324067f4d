"""FactualVQA (lmms-lab/FVQA on the hub), which MMSearch-R1 is trained and tested on.

    fvqa_train.parquet, fvqa_test.parquet    data_id, prompt, images, reward_model, data_source,
                                             category; here or in data/

`prompt` holds the question as a message of the user, `reward_model` the `ground_truth` and, as a
list written in JSON, the `candidate_answers`. `category` says whether the authors' base model
needed a search. FVQA of 2018 (Wang et al.) is another benchmark.

The rewards of the authors' rules (EvolvingLMMs-Lab/multimodal-search-r1, mmsearch_r1_score.py),
without what they take off for searches and wrong formats:

    fvqa/em        the answer is one of those that count, both normalized as SQuAD's
    fvqa/sub_em    one of those that count stands in the answer

A response with `<answer> ... </answer>` is scored by the last of them. The paper's own figures are
a judgment by GPT-4o, which no rule gives.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.data.formats import official
from mmqa_jax.data.formats.official import PictureColumns, parquet_entries
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.multiple_choice import tagged_answer
from mmqa_jax.evaluation.scores import groups_by, read_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers, squad_contained, squad_exact_match

EXACT, CONTAINED = "fvqa/em", "fvqa/sub_em"
DATA_SOURCE = "data_source"  # key of Question.extra
PUBLISHED_COUNTS = {"test questions": 1_800}
MATERIALS = (
    Material("FactualVQA", "Wu et al., 2025"),
    Material("FactualVQA's pictures, of InfoSeek and the web", license="under their own licenses"),
)
_SPLITS = ("train", "test")
_NEEDED = ("data_id", "prompt", "reward_model")


def read_fvqa(folder: Path) -> official.BenchmarkFiles:
    """Reads the splits that there are; `Question.category` is search_free or search_required."""
    files = official.OfficialFiles(folder)
    questions: list[Question] = []
    tables: list[Path] = []
    for split in _SPLITS:
        name = f"fvqa_{split}.parquet"
        path = files.optional(name, f"data/{name}", without=f"there are no {split} questions")
        if path is not None:
            tables.append(path)
            rows = parquet_entries([path], _NEEDED, ("category", DATA_SOURCE))
            read = functools.partial(_question, split)
            questions += official.read_entries(rows, read, "data_id").values()
    files.check_questions(questions, "FactualVQA", "fvqa_test.parquet")
    pictures = PictureColumns(tables, "data_id", (), ("images",))
    pictured = official.with_present_pictures(questions, pictures)
    kinds = {"questions with a picture": lambda q: q.image is not None}
    counts = official.counts_of(pictured, _SPLITS, kinds)
    return files.content(pictured, counts, PUBLISHED_COUNTS, pictures)


def _question(split: str, row: official.Entry) -> Question:
    name, messages = row.text("data_id"), row.get("prompt")
    asked = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    if not asked or not isinstance(asked[0], str) or not asked[0]:
        raise row.wrong("prompt", "a list with a message of the user")
    reward = row.entry("reward_model")
    return Question(
        id=name,
        split=split,
        question=asked[0],
        image=f"{name}/images/0",
        answers=tuple(dict.fromkeys((reward.text("ground_truth"), *_candidates(reward)))),
        category=row.text("category", ""),
        extra={DATA_SOURCE: row.text(DATA_SOURCE, "")},
    )


def _candidates(reward: official.Entry) -> Sequence[str]:
    """The other answers that count: a list, which the files write in JSON."""
    text = reward.get("candidate_answers")
    try:
        answers = json.loads(text) if isinstance(text, str) and text else text or []
    except (ValueError, RecursionError):
        answers = None
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise reward.wrong("candidate_answers", "a list of texts in JSON")
    return answers


def _final(response: str) -> str:
    """Returns the last answer in tags of a response, or the whole of one without."""
    answer = tagged_answer(response)
    return (response if answer is None else answer).strip()


def score_fvqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Both rules overall and by category; a missing prediction is wrong."""
    scored = scored_split(questions, predictions, has_answers, "a published answer")
    rules = {EXACT: squad_exact_match, CONTAINED: squad_contained}
    scores = {
        name: scored.values(lambda q, p, rule=rule: rule(_final(p.answer), q.answers))
        for name, rule in rules.items()
    }
    return scored.evaluation(scores, groups_by(scored.counted, lambda q: q.category))


BENCHMARK = Benchmark(
    read=read_fvqa,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats='predictions.jsonl, or lines {"data_id", "prediction"}',
    read_predictions=functools.partial(read_lines, id_key="data_id", text_key="prediction"),
    has_reference=has_answers,
    score=score_fvqa,
    headline="fvqa",
    verdicts=(EXACT,),
    boards=read_boards("fvqa"),
)
