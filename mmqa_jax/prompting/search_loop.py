"""A language model that searches: it thinks, acts and reads what comes back, over several turns.

All questions take their turns together: the model writes as one batch, then the retriever searches
for all that asked. A `Style` is a paper's own: its prompts, the actions it reads in what the model
wrote, and how it words what was found. An interrupted row goes on by the response cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.prompting.backends import Backend, Query
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.prompting.backends.thinking import why_empty
from mmqa_jax.retrieval.rankings import Retriever

SEARCHES = ("search_texts", "search_picture")
Kind = Literal["search_texts", "search_picture", "answer", "invalid"]
TURNS = "turns"  # key of a trace


class Action(NamedTuple):
    """An action says what the model does in a turn.

    Attributes:
      kind: it searches by a text of its own, searches with the question's picture, answers, or
        does nothing that can be read.
      text: the query or the answer.
    """

    kind: Kind
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of one question.

    Attributes:
      text: what the model wrote.
      ranking: the sources that came back; None: it did not search, or had no search left.
    """

    text: str
    action: Action
    ranking: Ranking | None = None

    def record(self) -> dict[str, Any]:
        """The entry in trace.jsonl."""
        record: dict[str, Any] = {"text": self.text, "action": self.action.kind}
        if self.action.text:
            record["content"] = self.action.text
        if self.ranking is not None:
            record["sources"] = list(self.ranking.sources)
        return record


@dataclasses.dataclass
class Episode:
    """A question with its turns so far.

    Attributes:
      problem: why it ended without an answer; "": it has not.
    """

    question: Question
    turns: list[Turn] = dataclasses.field(default_factory=list)
    problem: str = ""

    @property
    def is_running(self) -> bool:
        """Whether the model has to act again."""
        if self.problem:
            return False
        last = self.turns[-1] if self.turns else None
        return last is None or last.action.kind == "invalid" or last.ranking is not None

    def searches(self, kind: Kind | None = None) -> int:
        """How many searches came back, of one kind or of both."""
        kinds = SEARCHES if kind is None else (kind,)
        return sum(t.ranking is not None and t.action.kind in kinds for t in self.turns)

    @property
    def read(self) -> dict[str, float]:
        """The sources that came back -> their scores, in the order in which they were first read;
        all of them count as cited, since the styles name no sources."""
        scores: dict[str, float] = {}
        for turn in self.turns:
            if turn.ranking is not None:
                for name, score in zip(turn.ranking.sources, turn.ranking.scores, strict=True):
                    scores.setdefault(name, score)
        return scores

    def prediction(self) -> Prediction:
        """The answer of the last turn, "" where there is none, and a trace of every turn."""
        last = self.turns[-1].action if self.turns else Action("invalid")
        answer = last.text if last.kind == "answer" else ""
        trace: dict[str, Any] = {TURNS: [turn.record() for turn in self.turns]}
        trace["searches"] = self.searches()
        if self.problem:
            trace["failed"] = [self.problem]
        elif not answer:
            trace["incomplete"] = ["the turns ended before an answer was given"]
        names, scores = tuple(self.read), tuple(self.read.values())
        return Prediction(self.question.id, answer, names, scores, read=names, trace=trace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that the model may do for a question.

    Attributes:
      turns: times that it writes.
      text_searches, picture_searches: that are answered; the next one ends the question.
      top_k: sources of a search.
    """

    turns: int = at_least(1, 4)
    text_searches: int = at_least(0, 3)
    picture_searches: int = at_least(0, 0)
    top_k: int = at_least(1, 3)

    def allows(self, episode: Episode) -> bool:
        """Whether the last turn's search is made: a search of its kind and a turn are left."""
        kind = episode.turns[-1].action.kind
        is_text = kind == "search_texts"
        most = self.text_searches if is_text else self.picture_searches
        return (
            kind in SEARCHES
            and len(episode.turns) < self.turns
            and episode.searches(kind) < most
            and (is_text or episode.question.image is not None)
        )


class Style(Protocol):
    """A paper's prompts and actions."""

    def query(self, episode: Episode, query_id: Any) -> Query:
        """Returns the query of the model's next turn."""

    def read(self, text: str, *, stopped: bool) -> tuple[str, Action]:
        """Returns what the model wrote, as the next turn shows it, and its action in it.

        Args:
          stopped: it was ended at a stop string, which `text` lacks.
        """


def run_episodes(
    questions: Sequence[Question],
    style: Style,
    llm: Backend,
    retriever: Retriever,
    budget: Budget,
    *,
    quiet: bool | None = None,
) -> list[Episode]:
    """Lets the model search and answer; all episodes have ended. `quiet`: see Progress."""
    episodes = [Episode(question) for question in questions]
    for number in range(budget.turns):
        running = [episode for episode in episodes if episode.is_running]
        if not running:
            break
        _write(running, number, style, llm, budget, quiet)
        _search(running, retriever, budget)
    return episodes


def _write(
    episodes: Sequence[Episode],
    number: int,
    style: Style,
    llm: Backend,
    budget: Budget,
    quiet: bool | None,
) -> None:
    """Adds a turn to each, whose search is not made yet."""
    names = {(episode.question.id, number): episode for episode in episodes}
    queries = [style.query(episode, name) for name, episode in names.items()]
    title = f"Turn {number + 1} of at most {budget.turns}"
    answers = answer_all(llm, queries, title, thoughts_apart=False, quiet=quiet)
    for name, episode in names.items():
        if name not in answers.by_id:
            episode.problem = answers.failed.get(name, "the model gave no answer")
            continue
        candidate = answers.by_id[name].candidates[0]
        text, action = style.read(candidate.text or "", stopped=candidate.finish == "stop")
        if action.kind == "invalid" and candidate.finish == "length":
            episode.problem = why_empty(candidate) or "what it wrote was cut before an action"
        episode.turns.append(Turn(text, action))


def _search(episodes: Sequence[Episode], retriever: Retriever, budget: Budget) -> None:
    """Makes the searches that the last turns ask for, as one batch."""
    asking = [e for e in episodes if not e.problem and budget.allows(e)]
    if not asking:
        return
    rankings = retriever.search([_asked(episode) for episode in asking], budget.top_k)
    for episode, ranking in zip(asking, rankings, strict=True):
        episode.turns[-1] = dataclasses.replace(episode.turns[-1], ranking=ranking)


def _asked(episode: Episode) -> Question:
    """The search as a question: a text alone, or the picture with the question's own words."""
    question, action = episode.question, episode.turns[-1].action
    # Not the question's own id: a row keeps the rankings of its questions, and this is none.
    name = f"{question.id}, turn {len(episode.turns)}"
    if action.kind == "search_texts":
        return Question(name, question.split, action.text)
    return dataclasses.replace(question, id=name, choices=())


def first_tag(text: str, tags: Sequence[str]) -> tuple[str, str] | None:
    """The first of the tags that is opened and closed, and what stands between; None: none is."""
    places = [(text.find(f"<{tag}>"), tag) for tag in tags]
    for begin, tag in sorted(place for place in places if place[0] >= 0):
        inner = text[begin + len(tag) + 2 :]
        end = inner.find(f"</{tag}>")
        if end >= 0:
            return tag, inner[:end].strip()
    return None


def check_sees(llm: Backend, setting: str) -> None:
    """UserError for a model that reads texts alone."""
    if llm.takes_pictures is False:
        raise UserError(
            f"setting {setting}: its prompts show pictures, and the model reads texts alone; name "
            "one that sees as parts.llm.model, or use the setting search_r1."
        )
