"""A finished row of `mmqa run` as a system: its setting, parts and options answer one question."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import NOT_FOUND, Prediction, Question, Ranking, prediction_of
from mmqa_jax.evaluation.report import TraceNode
from mmqa_jax.prompting.backends.openai_requests import data_url
from mmqa_jax.retrieval.rankings import ranking_of
from mmqa_jax.runs.ask_corpus import AskedCorpus, answer_notes
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.reports.agents import agent_tree
from mmqa_jax.runs.row import Row
from mmqa_jax.runs.stages import open_parts
from mmqa_jax.serve.systems import (
    Asking,
    Tell,
    Threads,
    Turn,
    answer_row,
    check_question,
    cited_first,
)

_EXAMPLES = 3


class RowSystem:
    """Answers with what a row names. Its parts are opened for the first question.

    A row whose parts know its own questions alone (candidates, captions, gold sources) answers
    those; others answer any.

    Args:
      corpus: the row's, with its questions.
      opened: the parts of all rows over this corpus.
    """

    takes_pictures = True

    def __init__(
        self,
        row: Row,
        corpus: AskedCorpus,
        opened: OpenedParts,
        threads: Threads,
    ):
        self.name, self.label = row.row, f"{row.row} ({row.system})"
        self._row, self._corpus, self._opened = row, corpus, opened
        self._threads = threads
        self._questions = row.questions(corpus)
        self._known = {_key(question.question): question for question in self._questions}
        self._stage = row.stage({}, self._questions, opened)
        self._parts: dict[str, Any] | None = None
        setting = row.answering
        self._takes_any = not (
            row.data.context
            or setting.of_gold
            or setting.of_choices
            or any(part.turn == "file" for part in row.parts.values())
        )
        takes = "any question" if self._takes_any else "the questions of its data"
        self.about = f"The row {row.row}, setting {row.setting}: it answers {takes}."
        self.examples = [question.question for question in self._questions[:_EXAMPLES]]

    def ask(self, question: str, picture: bytes | None, tell: Tell) -> Asking:
        """See System."""
        check_question(question)
        known = self._known.get(_key(question))
        if known is None and not self._takes_any:
            raise UserError(
                f"{self.name} answers the questions of its data alone, whose candidates, captions "
                f"or gold sources it reads; ask one of them, such as {self.examples[0]!r:.200}."
            )

        def answer(turn: Turn) -> dict[str, Any]:
            began = time.perf_counter()
            with self._corpus.asked(question, picture) as asked, turn():
                meant = known if picture is None and known else asked
                prediction, rankings = self._answer(meant)
            row = self._told(question, prediction, rankings, tell, began)
            own_picture = self._corpus.question_picture(meant) if meant is known else None
            return row if own_picture is None else {**row, "picture": data_url(own_picture)}

        return self._threads.start(answer)

    def _answer(self, question: Question) -> tuple[Prediction, Mapping[str, Any]]:
        if self._parts is None:
            self._parts = open_parts(self._stage, self._questions, self._opened)
        (row,) = self._stage.answer([question], self._parts).rows
        return prediction_of(row["prediction"]), row["rankings"]

    def _told(
        self,
        question: str,
        prediction: Prediction,
        rankings: Mapping[str, Any],
        tell: Tell,
        began: float,
    ) -> dict[str, Any]:
        ranked = rankings.get("relevance") or rankings.get("candidates")
        candidates = ranking_of(ranked) if ranked else Ranking("", prediction.read, ())
        rows = cited_first(self._corpus, candidates, prediction)
        tell("sources", rows)
        said = prediction.answer or (NOT_FOUND if self._row.answers else "The sources:")
        marks = "".join(f" [{row['number']}]" for row in rows if row["cited"] is not None)
        whole = answer_row(question, said, said != NOT_FOUND, rows, time.perf_counter() - began)
        notes = answer_notes(prediction)
        return {**whole, "marked": said + marks, "notes": notes, "steps": _steps(prediction)}


def _key(text: str) -> str:
    return " ".join(text.casefold().split())


def _steps(prediction: Prediction) -> list[dict[str, Any]]:
    """How a prompted system came to its answer, as nested steps."""
    trace = prediction.trace
    if "agents" in trace:
        return [_step(node) for node in agent_tree(trace, prediction.answer)]
    prompts: Sequence[str] = trace.get("prompts", ())
    outputs = [str(one.get("text", "")) for one in trace.get("outputs", ())]
    steps = [{"who": "prompt", "prompt": prompt, "steps": []} for prompt in prompts]
    return [*steps, *({"who": f"output: {text}", "prompt": "", "steps": []} for text in outputs)]


def _step(node: TraceNode) -> dict[str, Any]:
    return {"who": node.text, "prompt": node.long, "steps": [_step(one) for one in node.children]}
