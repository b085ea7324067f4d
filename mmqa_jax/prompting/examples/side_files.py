"""What other models say of questions and their pictures, from side files.

Prophet's answer heuristics are candidates for a prompt and answer-aware examples; captions and tags
stand in place of the questions' own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_text, read_json, write_json
from mmqa_jax.data.formats.coco import read_captions, read_named_captions, read_scored_tsv
from mmqa_jax.data.formats.official import CAPTION
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.prompting.examples.library import ExampleLibrary, Shot, Similarity
from mmqa_jax.prompting.few_shot import OWN_CAPTION

ShotSelection = Literal["answer_aware"] | Similarity


@dataclasses.dataclass(frozen=True)
class AnswerHeuristics:
    """What a VQA model says of questions (`load_candidates`, `load_answer_aware`).

    Attributes:
      candidates: question id -> (answer, confidence), best first.
      examples: question id -> ids of the examples whose latent answers are most similar, nearest
        first; {}: there is no such file.
      checked: the files are known to be of the questions' split (`of_split`).
    """

    candidates: Mapping[str, Sequence[tuple[str, float]]]
    examples: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    checked: bool = False

    def of_split(self, questions: Sequence[Question]) -> AnswerHeuristics:
        """Returns heuristics for use with some of these questions at a time."""
        self.check(questions)
        if self.examples and not any(question.id in self.examples for question in questions):
            raise _other_examples()
        return dataclasses.replace(self, checked=True)

    def listed(self, question: Question, count: int) -> str:
        """`elephant(0.99), trunk(0.70)`, the best `count`; "" where a question has none."""
        pairs = self.candidates.get(question.id, ())[:count]
        return ", ".join(f"{answer}({confidence:.2f})" for answer, confidence in pairs)

    def best(self, question: Question) -> str:
        """The first candidate; "" where a question has none."""
        pairs = self.candidates.get(question.id, ())
        return pairs[0][0] if pairs else ""

    def select(
        self,
        questions: Sequence[Question],
        library: ExampleLibrary,
        count: int,
        selection: ShotSelection,
        *,
        seed: int = 0,
    ) -> list[list[Shot]]:
        """The shots of every question, nearest first: answer-aware, or as the library's.

        A question without answer-aware examples has no shots.
        """
        self.check(questions)
        if selection != "answer_aware":
            return library.select(questions, count, selection, seed=seed)
        shots = [library.named(q, self.examples.get(q.id, ()), count) for q in questions]
        if count and not any(shots) and not (self.checked and self.examples):
            raise _other_examples()
        return shots

    def check(self, questions: Sequence[Question]) -> None:
        """Raises UserError if none of the questions has candidates: it is another split's file."""
        if self.checked or not questions:
            return
        if not any(self.candidates.get(question.id) for question in questions):
            raise UserError(
                f"config key parts.heuristics.candidates: no candidates for any of the "
                f"{len(questions):,} questions there, the first is {questions[0].id}; name the "
                "file of this split."
            )


def _other_examples() -> UserError:
    return UserError(
        "config key parts.heuristics.examples: none of the questions has an example there that is "
        "in the library; name the file of this split, and the split of its examples as "
        "parts.library.split."
    )


# Answer candidates and answer-aware examples of a VQA model, in the files of Prophet's authors.
#
#     candidates.json             {question_id: [{"answer": str, "confidence": float}, ...]}
#     answer_aware_examples.json  {question_id: [question_id of an example, ...]}
#
# Both lists are best first: ten candidates by sigmoid score, a hundred examples by the cosine of
# their latents (prophet/stage1/heuristics.py:79-158).

CANDIDATES, ANSWER_AWARE = "candidates.json", "answer_aware_examples.json"

Candidates = dict[str, list[tuple[str, float]]]


def load_candidates(path: str | os.PathLike) -> Candidates:
    """question_id -> (answer, confidence in 0..1) of each candidate, best first."""
    candidates: Candidates = {}
    for where, question_id, rows in _lists(path, "candidates"):
        pairs = []
        for number, row in enumerate(rows, start=1):
            row = row if isinstance(row, dict) else {}
            answer, confidence = row.get("answer"), row.get("confidence")
            if not isinstance(answer, str) or not _is_share(confidence):
                raise UserError(
                    f'{where}, candidate {number}: {{"answer": text, "confidence": 0..1}} was '
                    "expected; write the file again."
                )
            pairs.append((answer, float(confidence)))
        candidates[question_id] = sorted(pairs, key=lambda pair: -pair[1])
    return candidates


def load_answer_aware(path: str | os.PathLike) -> dict[str, list[str]]:
    """question_id -> ids of its examples, most similar first."""
    examples: dict[str, list[str]] = {}
    for where, question_id, rows in _lists(path, "example ids"):
        for number, row in enumerate(rows, start=1):
            if isinstance(row, bool) or not isinstance(row, str | int):
                raise UserError(
                    f"{where}, example {number}: a question id was expected, found {row!r:.80}; "
                    "write the file again."
                )
        examples[question_id] = [str(row) for row in rows]
    return examples


def write_candidates(
    path: str | os.PathLike, candidates: Mapping[str, Sequence[tuple[str, float]]]
) -> None:
    """Writes what `load_candidates` reads, whole or not at all."""
    write_json(
        path,
        {
            question_id: [{"answer": answer, "confidence": share} for answer, share in pairs]
            for question_id, pairs in candidates.items()
        },
    )


def write_answer_aware(path: str | os.PathLike, examples: Mapping[str, Sequence[str]]) -> None:
    """Writes what `load_answer_aware` reads, whole or not at all."""
    write_json(path, {question_id: list(ids) for question_id, ids in examples.items()})


def _lists(path: str | os.PathLike, of: str) -> Iterator[tuple[str, str, list[Any]]]:
    """(place for messages, question_id, list) of a JSON object of lists."""
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise UserError(
            f"{path}: an object of question id -> list of {of} was expected; give a file of "
            "`mmqa candidates` or of Prophet's authors."
        )
    for question_id, rows in data.items():
        where = f"{path}, question {question_id}"
        if not isinstance(rows, list):
            raise UserError(f"{where}: a list of {of} was expected; write the file again.")
        check_text(rows, where)
        yield where, question_id, rows


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


# Descriptions of pictures from side files, for prompts to a model that does not see.
#
# captions TSV name TAB [{"caption", "conf"}, ...] VinVL's and Oscar+'s (PICa) captions JSON
# {name: {"pred_captions": [...]}} or {name: text} PromptCap's, Prophet's tags TSV name TAB
# [{"class", "conf"}, ...] object tags (PICa)
#
# A name is the id of a question (PromptCap describes a picture for a question), of a picture
# (image_id: VinVL and Prophet) or of a source. A question that PromptCap's file lacks keeps its
# own caption, is marked, and is counted.


class Captions:
    """Captions and tags by name; with `by_picture` a question's caption has the name of its
    picture, not its own."""

    def __init__(
        self,
        captions: Mapping[str, str],
        tags: Mapping[str, tuple[str, ...]] | None = None,
        *,
        by_picture: bool = False,
    ):
        self._captions, self._tags, self._by_picture = captions, tags or {}, by_picture

    def of_question(self, question: Question) -> str | None:
        """The caption of a question's picture; None where there is none."""
        return self._captions.get(_picture(question) if self._by_picture else question.id)

    def of_source(self, source: Source) -> tuple[str, tuple[str, ...]]:
        """Caption and tags of a source's picture; empty where there are none."""
        return self._captions.get(source.id, ""), self._tags.get(source.id, ())


def open_captions(captions: str, tags: str = "", questions: Sequence[Question] = ()) -> Captions:
    """Reads the files; UserError names the one that is malformed. Whether captions have the names
    of questions or of pictures is told by which of the two are more often in the file, since some
    numbers are of both kinds: those of 30 questions of OK-VQA are also of other questions'
    pictures."""
    path = Path(captions)
    if path.suffix == ".json":
        by_name = read_named_captions(path)
    else:
        by_name = {str(name): text for name, text in read_captions(path).items()}
    names: dict[str, tuple[str, ...]] = {}
    if tags:
        for name, rows in read_scored_tsv(Path(tags), "class").items():
            names[str(name)] = tuple(row["class"] for row in rows)
    of_questions = sum(question.id in by_name for question in questions)
    of_pictures = sum(_picture(question) in by_name for question in questions)
    return Captions(by_name, names, by_picture=of_pictures > of_questions)


def _picture(question: Question) -> str:
    """The number of a question's picture in COCO; "" where it has none."""
    return str(question.extra.get("image_id", ""))


def with_captions(
    questions: Sequence[Question], shots: Sequence[Sequence[Shot]], captions: Captions | None
) -> tuple[Sequence[Question], Sequence[Sequence[Shot]]]:
    """Questions and their shots with the file's captions; None: as they are."""
    if captions is None:
        return questions, shots
    return [_captioned(question, captions) for question in questions], [
        [shot._replace(question=_captioned(shot.question, captions)) for shot in chosen]
        for chosen in shots
    ]


def traced(
    predictions: list[Prediction], questions: Sequence[Question], captions: Captions | None
) -> list[Prediction]:
    """The predictions, whose traces say what the file's caption was (None: it has none)."""
    if captions is None:
        return predictions
    return [
        dataclasses.replace(p, trace={**p.trace, "caption": captions.of_question(question)})
        for p, question in zip(predictions, questions, strict=True)
    ]


def check_captions(questions: Sequence[Question], captions: Captions | None) -> None:
    """Raises UserError if the file has a caption for none of the questions: it is of others."""
    if captions is None or not questions:
        return
    if all(captions.of_question(question) is None for question in questions):
        raise UserError(
            f"config key parts.captions.captions: no caption for any of the {len(questions):,} "
            f"questions there, the first is {questions[0].id}; name the file of this split."
        )


def check_no_tags(tags: str) -> None:
    """Raises UserError for a file of tags, which only a setting that shows sources reads."""
    if tags:
        raise UserError(
            f"config key parts.captions.tags={tags}: this setting does not read it; set it to ''. "
            "The tags of questions are those that `mmqa prepare` found."
        )


def caption_sentence(question: Question) -> str:
    """The picture's caption, which ends with a period (Prophet)."""
    caption = str(question.extra.get(CAPTION, "")).strip()
    return caption if not caption or caption.endswith(".") else f"{caption}."


def _captioned(question: Question, captions: Captions) -> Question:
    caption = captions.of_question(question)
    changed = {OWN_CAPTION: True} if caption is None else {CAPTION: caption}
    return dataclasses.replace(question, extra={**question.extra, **changed})
