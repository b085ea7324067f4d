"""LiveVQA's files (https://github.com/fumingyang2004/LIVEVQA, liveVQA_benchmarks/): fresh facts.

    News/benchmark.json     pictures in News/News_imgs/
    Video/benchmark.json    frames in Video/Video_images/
    Paper/benchmark.json    figures in Paper/Paper_images/

An entry has a picture and two questions: level 1 on what it shows, level 2 on what is known of that
(`question`, `question_type`, `options`, `Ground_Truth`, `Ground_Truth_List`). The options are not
shown to a model by the authors' prompt; they stand in `Question.extra`.

    livevqa/em        the answer is one of those that count, both normalized as SQuAD's
    livevqa/sub_em    one of those that count stands in the answer

The authors' script has a language model judge the answers, which no rule gives.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mmqa_jax.benchmarks.benchmark import Benchmark, read_boards
from mmqa_jax.data.formats import official
from mmqa_jax.data.schema import Material, Prediction, Question
from mmqa_jax.evaluation.scores import groups_by, read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split
from mmqa_jax.evaluation.vqa import has_answers, squad_contained, squad_exact_match

EXACT, CONTAINED = "livevqa/em", "livevqa/sub_em"
# Keys of Question.extra: 1 or 2; what is asked for; the authors' options; when the news was.
LEVEL, KIND, OPTIONS, TIME = "level", "question_type", "options", "time"
SETS = {"News": "News_imgs", "Video": "Video_images", "Paper": "Paper_images"}  # folder: pictures
# Of the repository in October 2025.
PUBLISHED_COUNTS = {"News entries": 350, "Video entries": 342, "Paper entries": 500}
MATERIALS = (
    Material("LiveVQA", "Fu et al., 2025", "MIT"),
    Material("LiveVQA's pictures, of news and papers", license="under their own licenses"),
)
_BELOW = "liveVQA_benchmarks"


def read_livevqa(folder: Path) -> official.BenchmarkFiles:
    """Reads the sets that there are; all questions are of the split `test`, `Question.category` is
    the set.

    `folder`: the authors' repository, or its folder liveVQA_benchmarks.
    """
    files = official.OfficialFiles(folder)
    questions: dict[str, Question] = {}
    counts: dict[str, int] = {}
    places: dict[str, list[str]] = {}
    for name, pictures_folder in SETS.items():
        file = f"{name}/benchmark.json"
        path = files.optional(file, f"{_BELOW}/{file}", without=f"there are no {name} questions")
        if path is None:
            continue
        below = path.parent.relative_to(folder) / pictures_folder
        rows = list(official.json_entries(path))
        counts[f"{name} entries"] = len(rows)
        for row in rows:
            for question in _questions(name, row):
                if questions.setdefault(question.id, question) is not question:
                    raise row.error(f"id {row['id']!r} is there twice")
            picture = row.text("img_path")
            places[f"{name}/{picture}"] = [str(below / picture)]
    files.check_questions(questions, "LiveVQA", "liveVQA_benchmarks of the authors' repository")
    pictures = official.PictureFiles(folder, places)
    pictured = official.with_present_pictures(questions.values(), pictures)
    counts["questions"] = len(pictured)
    counts["questions with a picture"] = sum(question.image is not None for question in pictured)
    return files.content(pictured, counts, PUBLISHED_COUNTS, pictures)


def _questions(name: str, row: official.Entry) -> Iterator[Question]:
    """The questions of an entry: one or both levels."""
    for level in (1, 2):
        if row.get(f"level{level}_qa") is None:
            continue
        asked = row.entry(f"level{level}_qa")
        answers = asked.texts("Ground_Truth_List")
        if not answers:
            raise asked.wrong("Ground_Truth_List", "a list of answers")
        kind = asked.text(KIND, "")
        yield Question(
            id=f"{name}/{row.text('id')}/{level}",
            split="test",
            question=asked.text("question"),
            image=f"{name}/{row.text('img_path')}",
            answers=tuple(dict.fromkeys(answers)),
            category=name,
            extra={
                LEVEL: level,
                # Papers' say how they were generated.
                KIND: "" if kind.startswith("generated") else kind,
                OPTIONS: list(asked.texts(OPTIONS)),
                TIME: row.text(TIME, ""),
            },
        )


def score_livevqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """Both rules overall, by set, level and what is asked for; a missing prediction is wrong."""
    scored = scored_split(questions, predictions, has_answers, "a published answer")
    scores = {
        name: scored.values(lambda q, p, rule=rule: rule(p.answer, q.answers))
        for name, rule in ((EXACT, squad_exact_match), (CONTAINED, squad_contained))
    }
    groups = groups_by(scored.counted, lambda q: q.category)
    groups |= groups_by(scored.counted, lambda q: str(q.extra[LEVEL]), title="level {}")
    groups |= groups_by(scored.counted, lambda q: q.extra[KIND], title="type: {}")
    return scored.evaluation(scores, groups)


BENCHMARK = Benchmark(
    read=read_livevqa,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats="predictions.jsonl",
    read_predictions=read_own_lines,
    has_reference=has_answers,
    score=score_livevqa,
    headline="livevqa",
    verdicts=(EXACT,),
    boards=read_boards("livevqa"),
)
