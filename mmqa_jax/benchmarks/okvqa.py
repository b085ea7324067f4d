"""OK-VQA's official files (https://okvqa.allenai.org), and captions and tags that others released.

    OpenEnded_mscoco_{train,val}2014_questions.json     questions
    mscoco_{train,val}2014_annotations.json             ten answers and a category each
    {train,val}_soft_labels.json                        where annotations are absent
    vinvl_captions_{train,val}2014.tsv                  VinVL's captions
    captions_okvqa.json                                 captions of Prophet's authors
    tags_*.tsv                                          object tags
    captions_{train,val}2014.json                       COCO's captions by people
    train2014/ val2014/                                 COCO's pictures

All are optional but the questions, which the soft labels hold as well. The questions on val2014's
pictures are the benchmark's test split.

Its scores are VQA's (evaluation/vqa.py), its prediction files VQA's results format,
[{"question_id": number, "answer": text}, ...]. Null is an empty answer.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.benchmarks.benchmark import Benchmark
from mmqa_jax.core.array_pickle import load_arrays
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.answers import official_of_weight
from mmqa_jax.data.formats import coco, official
from mmqa_jax.data.formats.coco import Reference, check_same, read_annotations, read_questions
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.schema import Material, Prediction, Question, Source
from mmqa_jax.evaluation import vqa
from mmqa_jax.evaluation.scores import read_own_lines
from mmqa_jax.evaluation.scoring import Evaluation, scored_split

Pairs = Sequence[tuple[str, str]]
_LAST_NUMBER = re.compile(r"(?<!\d)(\d{1,19})(?:\.\w+)?$")  # of COCO_val2014_000000297147.jpg, too


class KATKnowledge:
    """Passages of explicit (`entities`) and implicit knowledge (`answers`); a file may be ""."""

    def __init__(self, entities: str = "", answers: str = ""):
        if not entities and not answers:
            raise UserError(
                "config keys parts.facts.entities and parts.facts.answers: are both empty; name a "
                "file of KAT's knowledge in one of them, or in both."
            )
        self._entities_file, self._answers_file = entities, answers
        self._entities = _read(entities, _picture_of, lambda value: value[0]) if entities else None
        self._answers = _read(answers, _question_of, lambda value: value) if answers else None

    def passages(self, question: Question, entities: int) -> list[str]:
        """Returns the passages for a question: its picture's entities, then the answers of GPT-3.

        Fewer entities than `entities` are repeated from the first, as KAT does, so that all
        questions have as many.
        """
        passages: list[str] = []
        if self._entities is not None:
            picture = str(question.extra.get("image_id", ""))
            known = self._of(self._entities, picture, question, self._entities_file)
            repeated = itertools.islice(itertools.cycle(known), entities)
            passages += [entity_passage(*pair) for pair in repeated]
        if self._answers is not None:
            known = self._of(self._answers, question.id, question, self._answers_file)
            passages += [answer_passage(*pair) for pair in known]
        return passages

    def _of(self, known: Mapping[str, Pairs], key: str, question: Question, file: str) -> Pairs:
        if key not in known:
            raise UserError(
                f"{file}: has nothing on question {question.id!r} (picture "
                f"{question.extra.get('image_id')!r}); name the file of this split."
            )
        return known[key]


def _picture_of(key: str) -> str | None:
    """A picture's COCO id, by its id or file name."""
    match = _LAST_NUMBER.search(key)
    return str(int(match[1])) if match else None


def _question_of(key: str) -> str | None:
    """A question's id, behind its picture's."""
    _, _, question = key.rpartition("#")
    return question or None


def _pair(pair: Any) -> tuple[str, str]:
    """The first two texts; TypeError or ValueError where there are none."""
    first, second, *_ = pair
    if isinstance(pair, str) or not all(isinstance(text, str | None) for text in (first, second)):
        raise TypeError  # also of a text, which would be cut into its characters
    # Descriptions may be missing: None in Wikidata's dump is "None" in KAT's passages.
    return str(first), str(second)


def _read(
    path: str, name: Callable[[str], str | None], pairs_of: Callable[[Any], Any]
) -> dict[str, Pairs]:
    """A file's pairs of texts by the id that `name` reads out of its keys."""
    content = read_json(path) if Path(path).suffix == ".json" else load_arrays(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a mapping from ids to pairs; give a file of KAT's.")
    known: dict[str, Pairs] = {}
    for key, value in content.items():
        key_name = name(str(key))
        try:
            pairs = [_pair(pair) for pair in pairs_of(value)]
        except (TypeError, ValueError, LookupError):
            pairs = None
        if key_name is None or pairs is None:
            raise UserError(
                f"{path}, key {key!r}: expected an id with pairs of texts; give a file of KAT's."
            )
        known[key_name] = pairs
    return known


# The texts that Fusion-in-Decoder encodes: a question with one passage each.


def source_passage(source: Source, text: str = "") -> str:
    """A source as FiD's passage; `text` in place of its own."""
    return f"title: {source.title} context: {text or source.text}"


def entity_passage(name: str, description: str) -> str:
    """An entity of Wikidata as KAT's passage of explicit knowledge."""
    return f"title: {name} context: {name} is a {description}"


def answer_passage(candidate: str, evidence: str) -> str:
    """A language model's answer with its evidence as KAT's passage of implicit knowledge."""
    return f"candidate: {candidate} evidence: {evidence}"


def question_texts(question: str, passages: Sequence[str]) -> list[str]:
    """Returns the texts to encode: the question with each passage, or alone where there is none."""
    asked = f"question: {question}"
    return [f"{asked} {passage}" for passage in passages] or [asked]


# Split -> COCO's split, which names the files.
COCO_SPLIT = {"train": "train", "test": "val"}
# question_type of the annotations (their `question_types`), in the order of the soft labels' class.
CATEGORIES = {
    "other": "Other",
    "one": "Vehicles and Transportation",
    "two": "Brands, Companies and Products",
    "three": "Objects, Material and Clothing",
    "four": "Sports and Recreation",
    "five": "Cooking and Food",
    "six": "Geography, History, Language and Culture",
    "seven": "People and Everyday life",
    "eight": "Plants and Animals",
    "nine": "Science and Technology",
    "ten": "Weather and Climate",
}
# Questions: the paper, section 3; pictures: its table 2 (14,031 in all).
PUBLISHED_COUNTS = {"train questions": 9_009, "test questions": 5_046, "pictures": 14_031}
MATERIALS = (
    Material("OK-VQA", "Marino et al., CVPR 2019", "annotations CC BY 4.0"),
    coco.PICTURES,
    coco.VINVL,
    Material("captions_okvqa.json", "Prophet's release", "Apache-2.0"),
)


def read_okvqa(folder: Path) -> official.BenchmarkFiles:
    """Reads what there is of the official files in `folder`.

    `Question.answers` are the annotators' ten answers as the official evaluation reads them
    (`answer`; their `raw_answer` is in `extra`), or the soft labels, heaviest first, with
    `extra["soft_labels"]`. Captions and tags are in `extra` under `caption`, `tags` and
    `coco_captions`.
    """
    files = official.OfficialFiles(folder)
    pictures = official.PictureFolders(folder, coco.FOLDERS_2014)
    descriptions = coco.read_descriptions(files, "captions_okvqa.json")
    questions: list[Question] = []
    for split, coco_split in COCO_SPLIT.items():
        for question_id, (image_id, text, known) in _split(files, coco_split).items():
            name = coco.picture_of(f"{coco_split}2014", image_id)
            questions.append(
                Question(
                    id=str(question_id),
                    split=split,
                    question=text,
                    image=name if name in pictures else None,
                    answers=known.answers,
                    category=known.category,
                    extra={"image_id": image_id, **known.extra, **descriptions.extra(image_id)},
                )
            )
    files.check_questions(
        questions,
        "OK-VQA",
        "OpenEnded_mscoco_val2014_questions.json and mscoco_val2014_annotations.json",
    )
    pictured = len(official.picture_names(questions))
    if not pictured:
        files.missing["train2014/, val2014/"] = "no pictures; captions stand for them"
    return files.content(questions, _counts(questions, pictured), PUBLISHED_COUNTS, pictures)


def _split(files: official.OfficialFiles, coco_split: str) -> dict[int, tuple[int, str, Reference]]:
    """question_id -> (image_id, question, reference) of one of COCO's splits; {} if absent."""
    asked_in = files.optional(
        f"OpenEnded_mscoco_{coco_split}2014_questions.json",
        without=f"{coco_split}2014 questions are those of the soft labels, if there are any",
    )
    annotated_in = files.optional(
        f"mscoco_{coco_split}2014_annotations.json",
        without=f"{coco_split}2014 has soft labels at most, not the annotators' ten answers",
    )
    labels_in = None
    if annotated_in is None:
        labels_in = files.optional(
            f"{coco_split}_soft_labels.json", without=f"{coco_split}2014 has no answers"
        )
    labelled = {} if labels_in is None else _soft_labels(labels_in)
    asked = {q: (image_id, text) for q, (image_id, text, _) in labelled.items()}
    known = {question_id: reference for question_id, (_, _, reference) in labelled.items()}
    if asked_in is not None:
        asked = read_questions(asked_in)
        if annotated_in is not None:
            known = read_annotations(annotated_in, "question_type", CATEGORIES)
        check_same(known, asked, annotated_in or labels_in, asked_in)
    elif annotated_in is not None:
        raise UserError(
            f"{annotated_in}: its questions are missing; put "
            f"OpenEnded_mscoco_{coco_split}2014_questions.json beside it."
        )
    hidden = Reference(0, (), "", {})
    return {q: (image_id, text, known.get(q, hidden)) for q, (image_id, text) in asked.items()}


def _soft_labels(path: Path) -> dict[int, tuple[int, str, Reference]]:
    """question_id -> (image_id, question, soft labels and the category)."""
    names = list(CATEGORIES.values())
    labelled: dict[int, tuple[int, str, Reference]] = {}
    for question_id, row in coco.by_question(path, None).items():
        labels = row.get("label")
        if not isinstance(labels, dict) or not all(
            isinstance(weight, int | float) and 0 <= weight <= 1 for weight in labels.values()
        ):
            raise row.error("`label` must be an object of answer -> weight in 0..1")
        image_id = whole_number(row.text("img_id").rpartition("_")[2])
        if image_id is None:
            raise row.error("img_id ends in no number")
        kind = row.get("class")
        known = type(kind) is int and 0 <= kind < len(names)
        ordered = sorted(labels, key=lambda answer: -labels[answer])
        reference = Reference(
            image_id, tuple(ordered), names[kind] if known else "", {official.SOFT_LABELS: labels}
        )
        labelled[question_id] = (image_id, row.text("sent", empty=True), reference)
    return labelled


def _counts(questions: list[Question], picture_files: int) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for question in questions:
        counts[f"{question.split} questions"] += 1
        for key in (*coco.DESCRIPTIONS, official.SOFT_LABELS):
            counts[f"{question.split} questions with {key}"] += key in question.extra
        ten = bool(question.answers) and official.SOFT_LABELS not in question.extra
        counts[f"{question.split} questions with annotators' answers"] += ten
    counts["pictures"] = len({question.extra["image_id"] for question in questions})
    counts["picture files"] = picture_files
    return counts


def read_okvqa_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads VQA's results format or predictions.jsonl."""
    if path.suffix == ".jsonl":
        return read_own_lines(path, questions)
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UserError(
            f"{path}: a list of {{question_id, answer}} was expected; give OK-VQA's results format "
            "or predictions.jsonl."
        )
    predictions: dict[str, Prediction] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, entry {number}"
        name = _question_id(row)
        if name is None or not isinstance(row.get("answer", 0), str | None):
            raise UserError(
                f'{where}: {{"question_id": number, "answer": text}} was expected; correct that '
                "entry."
            )
        answer = row["answer"] or ""
        if name in predictions:
            raise UserError(
                f"{where}: question {name} is answered twice; keep one prediction per question."
            )
        predictions[name] = Prediction(name, answer)
    return list(predictions.values())


def write_okvqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes VQA's results format, which needs an entry for every question.

    Missing answers are empty.
    """
    answers = {prediction.question_id: prediction.answer for prediction in predictions}
    write_json(
        path, [{"question_id": int(q.id), "answer": answers.get(q.id, "")} for q in questions]
    )


def _question_id(row: Any) -> str | None:
    """The id of an entry, a whole number in any form; None where it has none."""
    number = whole_number(row.get("question_id")) if isinstance(row, dict) else None
    return None if number is None else str(number)


def score_okvqa(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """VQA accuracy by category, from annotators' answers or from soft labels."""
    scored = scored_split(questions, predictions, vqa.has_answers, "reference answers")
    soft = [official.SOFT_LABELS in question.extra for question in scored.counted]
    if any(soft) and not all(soft):
        raise UserError(
            "some questions have annotators' answers and some soft labels; score a split whose "
            "references are of one kind."
        )
    if not any(soft):
        rules = {
            "official": vqa.official_accuracy,
            "paper": vqa.paper_accuracy,
            "prophet": vqa.prophet_accuracy,
            "kat": vqa.kat_accuracy,
        }
        return scored.evaluation(
            {
                f"vqa_accuracy/{name}": scored.values(
                    lambda q, p, rule=rule: rule(p.answer, q.answers)
                )
                for name, rule in rules.items()
            }
        )
    weights = scored.values(
        lambda q, p: vqa.soft_label_accuracy(p.answer, q.extra[official.SOFT_LABELS])
    )
    note = (
        "references are soft labels, not the annotators' ten answers: vqa_accuracy/official needs "
        "the official annotations"
    )
    return scored.evaluation(
        {
            "vqa_accuracy/soft_labels": weights,
            "vqa_accuracy/official_from_soft_labels": np.array([*map(official_of_weight, weights)]),
        },
        notes=[note],
    )


BENCHMARK = Benchmark(
    read=read_okvqa,
    materials=MATERIALS,
    reads_folders_alone=True,
    split="test",
    formats="predictions.jsonl, or the official list of {question_id, answer} as JSON",
    read_predictions=read_okvqa_predictions,
    has_reference=vqa.has_answers,
    score=score_okvqa,
    write_submission=write_okvqa_submission,
)
