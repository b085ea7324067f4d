"""A language model that searches: it thinks, acts and reads what comes back, over several turns.

All questions take their turns together: the model writes as one batch, then the retriever searches
for all that asked. A `Style` is a paper's own: its prompts, the actions it reads in what the model
wrote, and how it words what was found. An interrupted row goes on by the response cache.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from PIL import Image

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.decode import decode
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.prompting.backends import Backend, Choices, Query
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.prompting.backends.thinking import why_empty
from mmqa_jax.prompting.search_actions import (
    Action,
    Answer,
    GiveUp,
    Invalid,
    OpenPage,
    SearchByPicture,
    SearchPictures,
    SearchTexts,
    Zoom,
    cited_answer,
)
from mmqa_jax.retrieval.rankings import Retriever

TURNS = "turns"  # key of a trace
_AROUND = 2  # passages before and after one whose page is opened
_PICTURES_AMONG = 20  # times top_k: sources among which the pictures of a query are looked for
_SHORTEST_SIDE = 448  # pixels of a part of a picture that is shown larger
_PAUSES = (0.1, 1.0)  # seconds before a search that failed is made again


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of one question.

    Attributes:
      text: what the model wrote.
      ranking: the sources that came back; None: it did not search, or had no search left.
      picture: the part of a picture that came back, a PNG file.
      tokens: that the model drew, as far as they are known.
    """

    text: str
    action: Action
    ranking: Ranking | None = None
    picture: bytes | None = dataclasses.field(default=None, repr=False)
    tokens: int = 0

    @property
    def came_back(self) -> bool:
        """Whether there is something that the model has not read yet."""
        return self.ranking is not None or self.picture is not None

    def record(self) -> dict[str, Any]:
        """The entry in trace.jsonl."""
        record: dict[str, Any] = {"text": self.text, "action": self.action.kind}
        if self.action.content:
            record["content"] = self.action.content
        if self.ranking is not None:
            record["sources"] = list(self.ranking.sources)
        return record


@dataclasses.dataclass
class Episode:
    """A question with its turns so far.

    Attributes:
      problem: why it ended without an answer; "": it has not.
      retries: searches that failed, and were made again.
      is_lost: whether it ended because a search failed each time, which is not the model's fault.
      cites: whether brackets in the answer cite sources; else all that came back count as cited.
    """

    question: Question
    turns: list[Turn] = dataclasses.field(default_factory=list)
    problem: str = ""
    retries: int = 0
    is_lost: bool = False
    cites: bool = False

    @property
    def is_running(self) -> bool:
        """Whether the model has to act again."""
        if self.problem:
            return False
        last = self.turns[-1] if self.turns else None
        return last is None or isinstance(last.action, Invalid) or last.came_back

    def count(self, budget: str) -> int:
        """How many actions of a budget had a result."""
        return sum(turn.came_back and turn.action.budget == budget for turn in self.turns)

    def searches(self) -> int:
        """How many searches came back."""
        return self.count("text_searches") + self.count("picture_searches")

    @property
    def tokens(self) -> int:
        """The tokens that the model drew."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def read(self) -> dict[str, float]:
        """The sources that came back -> their scores, in the order in which they were first read,
        which is that of their numbers."""
        scores: dict[str, float] = {}
        for turn in self.turns:
            if turn.ranking is not None:
                for name, score in zip(turn.ranking.sources, turn.ranking.scores, strict=True):
                    scores.setdefault(name, score)
        return scores

    def prediction(self) -> Prediction:
        """The answer of the last turn, "" where there is none, and a trace of every turn."""
        last = self.turns[-1].action if self.turns else Invalid()
        answer = last.text if isinstance(last, Answer) else ""
        trace: dict[str, Any] = {TURNS: [turn.record() for turn in self.turns]}
        trace["searches"] = self.searches()
        if self.retries:
            trace["search_retries"] = self.retries
        if self.problem:
            trace["failed"] = [self.problem]
        elif isinstance(last, GiveUp):
            trace["not_found"] = 1
        elif not answer:
            trace["incomplete"] = ["the turns ended before an answer was given"]
        read = self.read
        cited = tuple(read)
        if self.cites:
            answer, cited = cited_answer(answer, cited)
        scores = tuple(read[name] for name in cited)
        return Prediction(self.question.id, answer, cited, scores, read=tuple(read), trace=trace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that the model may do for a question.

    Attributes:
      turns: times that it writes.
      text_searches, picture_searches, pages, zooms: that are answered; the next one ends the
        question.
      top_k: sources of a search.
      tokens: of all its turns; 0: as many as the turns have.
    """

    turns: int = at_least(1, 4)
    text_searches: int = at_least(0, 3)
    picture_searches: int = at_least(0, 0)
    pages: int = at_least(0, 0)
    zooms: int = at_least(0, 0)
    top_k: int = at_least(1, 3)
    tokens: int = at_least(0, 0)

    def allows(self, episode: Episode) -> bool:
        """Whether the last turn's action has a result: one of its kind and a turn are left."""
        action = episode.turns[-1].action
        if not action.budget or len(episode.turns) >= self.turns:
            return False
        if episode.count(action.budget) >= getattr(self, action.budget):
            return False
        of_own = isinstance(action, SearchByPicture) and not action.picture
        return episode.question.image is not None or not of_own


class Style(Protocol):
    """A paper's prompts and actions."""

    corpus: Corpus

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
    cites = getattr(style, "cites", False)
    episodes = [Episode(question, cites=cites) for question in questions]
    for number in range(budget.turns):
        running = [episode for episode in episodes if episode.is_running]
        if not running:
            break
        _write(running, number, style, llm, budget, quiet)
        _act(running, style.corpus, retriever, budget)
    return episodes


def _write(
    episodes: Sequence[Episode],
    number: int,
    style: Style,
    llm: Backend,
    budget: Budget,
    quiet: bool | None,
) -> None:
    """Adds a turn to each, whose action has no result yet."""
    names = {}
    for episode in episodes:
        if budget.tokens and episode.tokens >= budget.tokens:
            episode.problem = "its tokens ran out before an answer was given"
        else:
            names[episode.question.id, number] = episode
    queries = [_within(style.query(e, name), e, budget) for name, e in names.items()]
    title = f"Turn {number + 1} of at most {budget.turns}"
    answers = answer_all(llm, queries, title, thoughts_apart=False, quiet=quiet)
    for name, episode in names.items():
        if name not in answers.by_id:
            episode.problem = answers.failed.get(name, "the model gave no answer")
            continue
        candidate = answers.by_id[name].candidates[0]
        text, action = style.read(candidate.text or "", stopped=candidate.finish == "stop")
        if isinstance(action, Invalid) and candidate.finish == "length":
            episode.problem = why_empty(candidate)
        episode.turns.append(Turn(text, action, tokens=len(candidate.tokens)))


def _within(query: Query, episode: Episode, budget: Budget) -> Query:
    """The query, which asks for no more tokens than the episode has left."""
    if not budget.tokens or isinstance(query, Choices):
        return query
    most = min(query.decoding.max_new_tokens, budget.tokens - episode.tokens)
    return dataclasses.replace(
        query, decoding=dataclasses.replace(query.decoding, max_new_tokens=most)
    )


# What actions give back.


def _act(episodes: Sequence[Episode], corpus: Corpus, retriever: Retriever, budget: Budget) -> None:
    """Gives the last turns the results that their actions ask for; searches as one batch."""
    acting = [e for e in episodes if not e.problem and budget.allows(e)]
    searching: dict[int, list[tuple[Episode, Question]]] = {}  # by how many sources are asked for
    for episode in acting:
        turn = episode.turns[-1]
        found = _result(episode, turn.action, corpus)
        if isinstance(found, Question):
            many = _PICTURES_AMONG if isinstance(turn.action, SearchPictures) else 1
            searching.setdefault(many * budget.top_k, []).append((episode, found))
        elif isinstance(found, Ranking):
            episode.turns[-1] = dataclasses.replace(turn, ranking=found)
        elif isinstance(found, bytes):
            episode.turns[-1] = dataclasses.replace(turn, picture=found)
        else:
            episode.turns[-1] = dataclasses.replace(turn, action=found)
    for top_k, asked in searching.items():
        for (episode, _), ranking in zip(asked, _searched(asked, retriever, top_k), strict=True):
            if ranking is not None:
                turn = episode.turns[-1]
                if isinstance(turn.action, SearchPictures):
                    ranking = _pictures_of(ranking, corpus, budget.top_k)
                episode.turns[-1] = dataclasses.replace(turn, ranking=ranking)


def _result(
    episode: Episode, action: Action, corpus: Corpus
) -> Question | Ranking | bytes | Action:
    """What an action gives back; a question that is searched for, or Invalid, with a reason."""
    question = episode.question
    # Not the question's own id: a row keeps the rankings of its questions, and this is none.
    name = f"{question.id}, turn {len(episode.turns)}"
    if isinstance(action, SearchTexts | SearchPictures):
        return Question(name, question.split, action.query)
    number = action.source if isinstance(action, OpenPage) else getattr(action, "picture", 0)
    names = list(episode.read)
    if number > len(names) or (isinstance(action, OpenPage) and not number):
        return Invalid(f"{action.kind}: there is no result {number}, but {len(names)} of them")
    if isinstance(action, OpenPage):
        return _page(corpus, names[number - 1], episode.read[names[number - 1]], name)
    image = corpus.sources[corpus.row[names[number - 1]]].image if number else question.image
    if isinstance(action, SearchByPicture):
        if image is None:
            return Invalid(f"{action.kind}: result {number} shows no picture")
        return dataclasses.replace(question, id=name, image=image, more_images=(), choices=())
    assert isinstance(action, Zoom)
    data = corpus.read_picture(image)
    return Invalid(f"zoom: there is no picture {number}") if data is None else _part(data, action)


def _page(corpus: Corpus, source: str, score: float, name: str) -> Ranking:
    """The passages around a source of the same file or title, in their order."""
    row = corpus.row[source]
    sources, here = corpus.sources, corpus.sources[row]

    def belongs(other: int) -> bool:
        if not 0 <= other < len(sources):
            return False
        there = sources[other]
        file = here.extra.get("file")
        if file is not None:
            return there.extra.get("file") == file
        return bool(here.title) and there.title == here.title

    first = last = row
    while first > row - _AROUND and belongs(first - 1):
        first -= 1
    while last < row + _AROUND and belongs(last + 1):
        last += 1
    names = tuple(sources[place].id for place in range(first, last + 1))
    return Ranking(name, names, (score,) * len(names))


def _part(data: bytes, action: Zoom) -> bytes | Action:
    """A part of a picture, as large as a model sees well, as a PNG file."""
    try:
        picture = decode(data)
        box = action.pixels(picture.width, picture.height)
    except (UserError, ValueError) as error:
        return Invalid(f"{action.kind}: {error}")
    size = max(box[2] - box[0], 1), max(box[3] - box[1], 1)
    scale = max(1.0, _SHORTEST_SIDE / min(size))
    wanted = round(size[0] * scale), round(size[1] * scale)
    if max(wanted) > 8 * _SHORTEST_SIDE:
        return Invalid(f"{action.kind}: the box is too narrow")
    file = io.BytesIO()
    part = picture.convert("RGB").resize(wanted, Image.Resampling.BICUBIC, box=box)
    part.save(file, "PNG")
    return file.getvalue()


def _pictures_of(ranking: Ranking, corpus: Corpus, top_k: int) -> Ranking:
    """The best sources with a picture."""
    pairs = zip(ranking.sources, ranking.scores, strict=True)
    pictured = [pair for pair in pairs if corpus.sources[corpus.row[pair[0]]].image is not None]
    names, scores = [x for x, _ in pictured[:top_k]], [x for _, x in pictured[:top_k]]
    return Ranking(ranking.question_id, tuple(names), tuple(scores))


def _searched(
    asked: Sequence[tuple[Episode, Question]], retriever: Retriever, top_k: int
) -> list[Ranking | None]:
    """The rankings of all, as one batch. A search that fails is made again, after a pause, then one
    by one; an episode whose search fails each time is lost (None)."""
    questions = [question for _, question in asked]
    found = _tried(lambda: retriever.search(questions, top_k), [e for e, _ in asked])
    if not isinstance(found, Exception):
        return list(found)
    rankings: list[Ranking | None] = []
    for episode, question in asked:
        alone = _tried(lambda question=question: retriever.search([question], top_k), [episode])
        if isinstance(alone, Exception):
            episode.problem = f"the search failed: {alone!r:.200}"
            episode.is_lost = True
        rankings.append(None if isinstance(alone, Exception) else alone[0])
    return rankings


def _tried(
    search: Callable[[], Sequence[Ranking]], episodes: Sequence[Episode]
) -> Sequence[Ranking] | Exception:
    """What a search gives, or the error of its last try; each try that failed is counted."""
    for pause in (*_PAUSES, None):
        try:
            return search()
        except (UserError, MemoryError):
            raise
        except Exception as error:  # of whatever searches: a server, a disk, a library
            failure = error
        for episode in episodes:
            episode.retries += 1
        if pause is not None:
            time.sleep(pause)
    return failure


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
