"""Answers single questions with what a row of `mmqa run` names: its setting, parts and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.progress import Screen
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, prediction_of
from mmqa_jax.evaluation.report import TraceNode
from mmqa_jax.runs import ask_corpus
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.row import Row, recorded_row
from mmqa_jax.runs.stages import open_parts
from mmqa_jax.runs.traces import trace_tree


@dataclasses.dataclass
class RowAnswerer:
    """A row whose parts are opened for the first question, among those of all rows over its corpus.
    A row whose parts know its own questions alone (candidates, captions, gold sources) answers
    those; others answer any."""

    row: Row
    corpus: ask_corpus.AskedCorpus
    opened: OpenedParts

    def __post_init__(self):
        self.questions = self.row.questions(self.corpus)
        self._known = {_key(question.question): question for question in self.questions}
        self._stage = self.row.stage({}, self.questions, self.opened)
        self._parts: dict[str, Any] | None = None
        setting = self.row.answering
        self.takes_any = not (
            self.row.data.context
            or setting.of_gold
            or setting.of_choices
            or any(part.turn == "file" for part in self.row.parts.values())
        )

    def known(self, text: str) -> Question | None:
        """The row's own question of these words; UserError where it answers no other."""
        question = self._known.get(_key(text))
        if question is None and not self.takes_any:
            raise UserError(
                f"{self.row.row} answers the questions of its data alone, whose candidates, "
                "captions or gold sources it reads; ask one of them, such as "
                f"{self.questions[0].question!r:.200}."
            )
        return question

    def predict(self, question: Question) -> tuple[Prediction, Mapping[str, Any]]:
        """The answer to a question, and the rankings that it was made from by their names."""
        if self._parts is None:
            self._parts = open_parts(self._stage, self.questions, self.opened)
        (row,) = self._stage.answer([question], self._parts).rows
        return prediction_of(row["prediction"]), row["rankings"]

    def answer(self, text: str, picture: bytes | None = None) -> RowAnswer:
        """Answers a question, perhaps with an encoded picture of its own."""
        known = self.known(text)
        with self.corpus.asked(text, picture) as asked:
            return RowAnswer(self.predict(known if picture is None and known else asked)[0])


class RowAnswer(NamedTuple):
    """What a row answered, as `ask_in_turn` shows it."""

    prediction: Prediction

    @property
    def text(self) -> str:
        """The answer in words."""
        return self.prediction.answer or NOT_FOUND

    @property
    def found(self) -> bool:
        """Whether there is an answer."""
        return bool(self.prediction.answer)

    def quoted(self, corpus: Corpus) -> None:
        """Its words stand for themselves, see FolderAnswer.quoted."""

    def sources_shown(self, corpus: Corpus) -> list[ask_corpus.ShownSource]:
        """The cited sources, numbered, or else what was read."""
        prediction = self.prediction
        if prediction.sources:
            names, scores = prediction.sources, prediction.source_scores
            return ask_corpus.shown_sources(corpus, names, scores, cited=True)
        return [
            ask_corpus.ShownSource(corpus.sources[corpus.row[n]], None, None)
            for n in prediction.read
        ]


def open_row(workdir: Path) -> RowAnswerer:
    """The row of a workdir; UserError where its inputs are gone."""
    row = recorded_row(workdir)
    if missing := row.missing_inputs():
        raise UserError(
            f"--workdir={workdir}: inputs of the row are missing: {', '.join(missing)}; put "
            "them back, or start where the row was run if their paths are relative."
        )
    corpus = ask_corpus.AskedCorpus(row.open_corpus())
    corpus.materials = row.materials(corpus)
    return RowAnswerer(row, corpus, OpenedParts(corpus))


def ask_row(
    workdir: Path, questions: Sequence[str], picture: bytes | None = None
) -> Iterator[dict[str, Any]]:
    """Answers questions in turn as a row does; yields what `--json` prints of each."""
    for answer, row in ask_corpus.ask_in_turn(open_row(workdir), questions, picture):
        nodes, notes = trace_tree(answer.prediction), ask_corpus.answer_notes(answer.prediction)
        for line in (*_lines(nodes), *notes):
            Screen().print(line, markup=False, soft_wrap=True)
        yield {**row, "steps": steps_of(answer.prediction), "notes": notes}


def steps_of(prediction: Prediction) -> list[dict[str, Any]]:
    """How a prompted system came to its answer, as nested steps."""
    trace = prediction.trace
    if nodes := trace_tree(prediction):
        return list(map(_step, nodes))
    prompts: Sequence[str] = trace.get("prompts", ())
    outputs = [str(output.get("text", "")) for output in trace.get("outputs", ())]
    steps = [{"who": "prompt", "prompt": prompt, "steps": []} for prompt in prompts]
    return [*steps, *({"who": f"output: {text}", "prompt": "", "steps": []} for text in outputs)]


def _step(node: TraceNode) -> dict[str, Any]:
    return {"who": node.text, "prompt": node.long, "steps": list(map(_step, node.children))}


def _lines(nodes: Sequence[TraceNode], depth: int = 0) -> Iterator[str]:
    for node in nodes:
        yield "  " * depth + node.text
        yield from _lines(node.children, depth + 1)


def _key(text: str) -> str:
    return " ".join(text.casefold().split())
