"""Prompts of solved examples and one open question, with as many examples as fit, and replies.

A prompted system chooses shots for its questions (examples/library.py), says what a template's
fields are, and reads what the model replies. What lies between is the same for all: `ask`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import string
import tomllib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypedDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.official import CAPTION, HAS_PICTURE, SOFT_LABELS
from mmqa_jax.data.formats.webqa import has_keywords
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.decoding.requests import Candidate, Result, TooLong, Unanswerable
from mmqa_jax.prompting.backends import Backend, Completion, Decoding, Message, Picture, Query
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.prompting.backends.thinking import read_answer
from mmqa_jax.prompting.examples.library import Shot, shots_record
from mmqa_jax.prompting.llava_prompt import PLACEHOLDER as IMAGE
from mmqa_jax.retrieval.knowledge import KnowledgeBase, Passage, passages_of

Order = Literal["most_similar_first", "most_similar_last"]
Fields = Callable[[Question], Mapping[str, str]]  # a template's fields of a question, shot or query
MakeQuery = Callable[[Hashable, Question, str], Query]  # of an id, a question and its prompt's text
# Query id -> the shots of that prompt: all prompts of a question.
ShotsOfPrompts = Mapping[Hashable, Sequence[Shot]]
NO_CONTEXT = "N/A"  # what a template's context says where there is none
# Key of Question.extra: a file of captions lacks this question, whose own caption stands in.
OWN_CAPTION = "own_caption"


class Trace(TypedDict, total=False):
    """How a prompted system came to one answer: a line of trace.jsonl, which reports count.

    A system writes the keys that it has something for, and may add others.
    """

    prompts: list[str]  # as they were sent
    shots: list[list[dict[str, Any]]]  # of each prompt: `id` and `similarity`
    dropped_shots: int  # that did not fit
    shots_without_caption: int  # these three over all prompts
    shots_with_own_caption: int
    shots_without_candidates: int
    too_long: list[str]  # why prompts were not sent, which do not fit even without shots
    failed: list[str]  # why other requests have no answer
    outputs: list[dict[str, Any]]  # `text`, and `logprob` where the model says it
    thinking: list[str]  # what it thought before
    thinking_tokens: int  # as far as they are counted
    cut: bool  # the answer's tokens ran out
    option_scores: list[float]  # log-probabilities, in the order of the choices
    calibrated_scores: list[float]  # the same, less the model's liking for an option
    caption: str | None  # of a file of captions; None where that lacks the question
    knowledge: list[list[dict[str, Any]]]  # of each prompt its passages: `id` and `score`
    dropped_passages: int
    vote: dict[str, float]  # answer -> sum of its weights
    fallback: str  # a VQA model's first candidate; "" where it has none
    agents: list[dict[str, Any]]  # of MAVL, see papers/mavl.py:Agent.record
    reader: int  # sources that a question came with; the next ones are of LLMReader
    dropped_sources: int
    cut_to_words: int  # of the only source that was shown
    picture_not_shown: bool
    refused: str  # why the model was not asked
    not_found: bool  # no source answers, as the model says
    uncited: bool
    wrong_citations: int  # markers that name no source
    turns: list[dict[str, Any]]  # of a model that searches, see search_loop.Turn.record
    searches: int  # that it made
    incomplete: list[str]  # why an answer is empty or cut


class FewShot(NamedTuple):
    """A query to a language model that fits its context.

    Attributes:
      query: None where the model cannot take it, even without shots.
      text: of the prompt.
      shots: those in the prompt, most similar first.
      dropped: how many more were chosen.
      reason: why there is no query.
      too_long: whether that is its length.
      passages: those in the prompt's context, best first; None: there is no knowledge base.
      dropped_passages: how many more were found.
      lacking: what shots in the prompt lack -> how many; keys of a trace.
    """

    query: Query | None
    text: str
    shots: Sequence[Shot]
    dropped: int
    reason: str = ""
    too_long: bool = False
    passages: Sequence[Passage] | None = None
    dropped_passages: int = 0
    lacking: Mapping[str, int] = MappingProxyType({})


def few_shot(
    template: PromptTemplate,
    question: Question,
    shots: Sequence[Shot],
    fields: Fields,
    make: Callable[[str], Query],
    check: Callable[[Query], None],
    order: Order = "most_similar_first",
    passages: Sequence[Passage] | None = None,
) -> FewShot:
    """The prompt of a question with as many of its most similar shots as the context holds.

    Args:
      shots: most similar first; the last ones are dropped, but not before all passages.
      fields: the template's fields of a question, shot or query.
      make: the query of a prompt's text.
      check: a backend's `check`, which raises Unanswerable. A server's never raises TooLong: it
        knows no length.
      order: of the shots in the prompt.
      passages: knowledge that follows the question's own context, best first; the last ones are
        dropped. None: there is no knowledge base.
    """
    solved, asked, reason = [fields(shot.question) for shot in shots], fields(question), ""
    best_first, none = passages or (), None if passages is None else ()
    with_passages = [(len(shots), read) for read in range(len(best_first), 0, -1)]
    for count, read in [*with_passages, *((count, 0) for count in range(len(shots), -1, -1))]:
        fitting = solved[:count] if order == "most_similar_first" else solved[:count][::-1]
        text = template.render(fitting, _with_passages(asked, best_first[:read]))
        try:
            query = make(text)
            check(query)
        except TooLong as error:
            reason = str(error)
            continue
        except Unanswerable as error:
            return FewShot(None, text, (), 0, str(error), passages=none)
        return FewShot(
            query,
            text,
            shots[:count],
            len(shots) - count,
            passages=None if passages is None else best_first[:read],
            dropped_passages=len(best_first) - read,
            lacking=_lacking(asked, shots[:count], solved),
        )
    return FewShot(None, "", (), len(shots), reason, True, none, len(best_first))


class Replies(NamedTuple):
    """A question's prompts, the results of those that were answered, in their order, and why the
    others failed."""

    prompts: Sequence[FewShot]
    results: Sequence[Result]
    failed: Sequence[str]

    @property
    def best(self) -> list[Candidate]:
        """The best candidate of every prompt that was answered."""
        return [result.candidates[0] for result in self.results]


def one_prompt(
    questions: Sequence[Question], shots: Sequence[Sequence[Shot]]
) -> list[ShotsOfPrompts]:
    """One prompt per question, with its shots; the query's id is the question's."""
    return [{question.id: chosen} for question, chosen in zip(questions, shots, strict=True)]


def several_prompts(
    questions: Sequence[Question], shots: Sequence[Sequence[Shot]], each: int, count: int
) -> list[ShotsOfPrompts]:
    """`count` prompts per question: the r-th, (question id, r), has its r-th `each` shots."""
    return [
        {(question.id, r): chosen[r * each : (r + 1) * each] for r in range(count)}
        for question, chosen in zip(questions, shots, strict=True)
    ]


def continued(decoding: Decoding) -> MakeQuery:
    """Prompts are texts that the model continues."""
    return lambda key, _, text: Completion(key, text, decoding)


def few_shot_prompts(
    questions: Sequence[Question],
    shots: Sequence[ShotsOfPrompts] | None,
    llm: Backend,
    template: PromptTemplate | Callable[[Question], PromptTemplate],
    fields: Fields,
    make: MakeQuery,
    order: Order = "most_similar_first",
    knowledge: KnowledgeBase | None = None,
) -> list[list[FewShot]]:
    """The prompts of every question, each with as many of its shots as the context holds.

    Args:
      shots: of every question its prompts (`one_prompt`, `several_prompts`); None: one prompt
        without shots.
      template: of all questions, or the one of each.
      make: the query of a prompt (`continued`, or a system's own).
      knowledge: whose passages follow a question's context; None: there are none.
    """

    def prompts_of(
        question: Question, shots_of: ShotsOfPrompts, passages: Sequence[Passage] | None
    ) -> list[FewShot]:
        of_question = template if isinstance(template, PromptTemplate) else template(question)
        return [
            few_shot(
                of_question, question, chosen, fields, functools.partial(make, key, question),
                llm.check, order, passages,
            )
            for key, chosen in shots_of.items()
        ]  # fmt: skip

    shots = one_prompt(questions, [()] * len(questions)) if shots is None else shots
    passages = passages_of(knowledge, questions)
    return [prompts_of(*each) for each in zip(questions, shots, passages, strict=True)]


def ask(
    questions: Sequence[Question],
    shots: Sequence[ShotsOfPrompts] | None,
    llm: Backend,
    template: PromptTemplate | Callable[[Question], PromptTemplate],
    fields: Fields,
    make: MakeQuery,
    order: Order = "most_similar_first",
    knowledge: KnowledgeBase | None = None,
) -> list[Replies]:
    """Asks all prompts of `few_shot_prompts` as one stream; returns each question's replies."""
    prompts = few_shot_prompts(questions, shots, llm, template, fields, make, order, knowledge)
    return replies_to(prompts, llm)


def replies_to(prompts: Sequence[Sequence[FewShot]], llm: Backend) -> list[Replies]:
    """Asks the prompts of every question as one stream; returns each question's replies."""
    queries = [p.query for of_question in prompts for p in of_question if p.query is not None]
    answers = answer_all(llm, queries, checked=True)

    def replies(of_question: Sequence[FewShot]) -> Replies:
        ids = [prompt.query.id for prompt in of_question if prompt.query is not None]
        results = [answers.by_id[name] for name in ids if name in answers.by_id]
        failed = [answers.failed[name] for name in ids if name in answers.failed]
        return Replies(of_question, results, failed)

    return list(map(replies, prompts))


def read_one(question: Question, replies: Replies) -> Prediction:
    """The model's text in reply to a question's only prompt; "" where there is none."""
    trace = prompts_record(replies.prompts, replies.failed)
    if not replies.results:
        return Prediction(question.id, trace=trace)
    (best,) = replies.best
    trace["outputs"] = [output_record((best.text or "").strip(), best.total)]
    text = read_answer(best, trace)
    return citing_passages(Prediction(question.id, text, trace=trace), replies.prompts)


def citing_passages(prediction: Prediction, prompts: Iterable[FewShot]) -> Prediction:
    """The prediction with the passages of its prompts as sources, in the order of the first prompt.

    A model that continues a prompt does not say which passage it used: its answer cites all.
    """
    scores: dict[str, float] = {}
    for passage in (passage for prompt in prompts for passage in prompt.passages or ()):
        scores.setdefault(passage.id, passage.score)
    answered = prediction.answer.strip() or prediction.choice is not None
    cited = scores if answered else {}
    return dataclasses.replace(
        prediction, sources=tuple(cited), source_scores=tuple(cited.values()), read=tuple(scores)
    )


def pictures_of(corpus: Corpus, question: Question) -> tuple[Picture, ...]:
    """The question's picture, to be shown to a model that sees; none where it is absent."""
    data = corpus.question_picture(question)
    return () if data is None else (Picture(data, question.image or ""),)


def lacks_caption(question: Question) -> bool:
    """Whether nothing describes the picture of a question that has one."""
    return bool(question.extra.get(HAS_PICTURE, True)) and not question.extra.get(CAPTION)


def _lacking(
    asked: Mapping[str, str], shots: Sequence[Shot], solved: Sequence[Mapping[str, str]]
) -> dict[str, int]:
    """What shots lack that their prompt is to show, candidates only if the question has some."""
    lacking: collections.Counter[str] = collections.Counter()
    for shot, fields in zip(shots, solved, strict=False):
        if "context" in fields:
            lacking["shots_without_caption"] += lacks_caption(shot.question)
            lacking["shots_with_own_caption"] += OWN_CAPTION in shot.question.extra
        if asked.get("candidates"):
            lacking["shots_without_candidates"] += not fields["candidates"]
    return {name: count for name, count in lacking.items() if count}


def _with_passages(fields: Mapping[str, str], passages: Sequence[Passage]) -> Mapping[str, str]:
    """The fields with the passages behind the context."""
    if not passages:
        return fields
    context = fields["context"].strip()
    if context == NO_CONTEXT:
        context = ""
    elif context and context[-1] not in ".!?":
        context += "."
    texts = (context, *(passage.text for passage in passages))
    return {**fields, "context": " ".join(filter(None, texts))}


def majority_answer(question: Question, *, last: bool = False) -> str:
    """The answer that most annotators gave; of equally frequent ones the first, or the last.

    Of soft labels the heaviest. Of a question without answers the correct option; where answers
    are sentences (WebQA, Atlas) their keywords.
    """
    if has_keywords(question):
        return question.keywords
    counts = collections.Counter(answer for answer in question.answers if answer)
    if counts:
        known = question.extra.get(SOFT_LABELS, counts)
        weights = {answer: known.get(answer, 0) for answer in counts}
        most = max(weights.values())
        tied = [answer for answer, weight in weights.items() if weight == most]
        return tied[-1 if last else 0]
    return "" if question.answer_index is None else question.choices[question.answer_index]


def prompts_record(prompts: Sequence[FewShot], failed: Iterable[str] = ()) -> Trace:
    """Returns what trace.jsonl keeps of a question's prompts: why requests `failed`, and the
    reasons of prompts that were not sent, too."""
    reasons = [p.reason for p in prompts if p.query is None and not p.too_long]
    reasons += failed
    record: Trace = {
        "prompts": [p.text.replace(MARK, IMAGE) for p in prompts],
        "shots": [shots_record(p.shots) for p in prompts],
        "dropped_shots": sum(p.dropped for p in prompts),
        "too_long": [p.reason for p in prompts if p.too_long],
        **sum((collections.Counter(p.lacking) for p in prompts), collections.Counter()),
        **({"failed": reasons} if reasons else {}),
    }
    if any(p.passages is not None for p in prompts):
        record["knowledge"] = [passages_record(p.passages or ()) for p in prompts]
        record["dropped_passages"] = sum(p.dropped_passages for p in prompts)
    return record


def passages_record(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """What trace.jsonl keeps of passages."""
    return [{"id": passage.id, "score": round(passage.score, 6)} for passage in passages]


def output_record(text: str | None, logprob: float) -> dict[str, Any]:
    """What trace.jsonl keeps of an output; a server may give no log-probability (NaN)."""
    return {"text": text, **({} if math.isnan(logprob) else {"logprob": logprob})}


def outputs_record(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """What trace.jsonl keeps of several outputs."""
    return [
        output_record(output.text, output.total)
        | ({"thinking": output.thinking} if output.thinking else {})
        for output in candidates
    ]


# Few-shot prompts: templates as TOML beside the systems that use them.


_PACKAGE = "mmqa_jax.papers"
_FOLDER = "templates"


@dataclasses.dataclass(frozen=True)
class PromptTemplate:
    """A prompt of solved examples and one open question.

    Attributes:
      head: in front of everything; without `$` fields.
      shot: of one solved example, with fields such as `$question` and `$answer`.
      query: of the open question; the model continues it.
      single_spaces: whether two spaces that follow each other become one, once: in the template's
        text where a field is empty, and in the fields.
    """

    head: str
    shot: str
    query: str
    single_spaces: bool = False

    def without_head(self) -> PromptTemplate:
        """Returns its shots and its query alone."""
        return dataclasses.replace(self, head="")

    def render(self, shots: Sequence[Mapping[str, str]], query: Mapping[str, str]) -> str:
        """Fills in the fields of the shots and of the query; KeyError for one that is missing."""
        parts = [self._filled(self.shot, shot) for shot in shots]
        return "".join((self.head, *parts, self._filled(self.query, query)))

    def solve(self, example: Mapping[str, str]) -> str:
        """What completes the query of a solved example: its shot without its query."""
        shot, query = (self._filled(text, example) for text in (self.shot, self.query))
        if not shot.startswith(query):
            raise UserError(
                "option template: a shot of it does not begin with its query, so that nothing "
                "can be learned from it; use one whose shots do, such as rmr.rationale."
            )
        return shot.removeprefix(query).rstrip()

    def spaced(self, text: str) -> str:
        """A text with its spaces as this template's prompts have them."""
        return text.replace("  ", " ") if self.single_spaces else text

    def _filled(self, text: str, fields: Mapping[str, str]) -> str:
        return self.spaced(string.Template(text).substitute(fields))


@functools.cache
def load_template(name: str) -> PromptTemplate:
    """The template `FILE.TABLE`: a table of papers/templates/FILE.toml."""
    file, _, table = name.partition(".")
    folder = resources.files(_PACKAGE) / _FOLDER
    known = {
        f"{path.name.removesuffix('.toml')}.{title}": values
        for path in folder.iterdir()
        if path.name.endswith(".toml")
        for title, values in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }
    if name not in known:
        raise UserError(
            f"option template={name}: no such prompt template; use one of "
            f"{', '.join(sorted(known))}."
        )
    return PromptTemplate(**known[f"{file}.{table}"])


# Sources and their pictures in prompts: what LLMReader and LLMReranker show a model alike.
#
# A text is written with a mark where each picture goes; `as_prompt` makes of it a message with
# the pictures in it, or a text that a model continues.


MARK = "\ufffc"  # the object replacement character stands where a picture goes, or IMAGE
MARKED = f" {MARK}"
Pictures = Literal["auto", "pixels", "captions"]


def prompt_text(source: Source) -> str:
    """A source as prompts quote it: its title, then its text or caption."""
    return ": ".join(filter(None, (source.title, source.text))).replace(MARK, " ")


def source_picture(corpus: Corpus, row: int, shown: bool) -> Picture | None:
    """A source's picture, if pictures are shown and it has one."""
    encoded = corpus.picture(row) if shown else None
    return None if encoded is None else Picture(encoded, corpus.sources[row].id)


def mark_of(picture: Picture | None) -> str:
    """What a template's field of a picture says: where it goes, or nothing."""
    return "" if picture is None else MARKED


def shows_pictures(llm: Backend, pictures: Pictures) -> bool:
    """Whether prompts show pictures; see LLMReaderOptions."""
    return pictures == "pixels" or (pictures == "auto" and llm.takes_pictures is True)


def is_chat(llm: Backend, chat: bool | None) -> bool:
    """Whether a prompt is a message; see LLMReaderOptions."""
    return llm.takes_messages if chat is None else chat


def without_places(text: str, pictures: Sequence[Picture]) -> str:
    """A text to be continued with pictures, none of whose places is an `<image>` of a source."""
    return text.replace(IMAGE, "< image>") if pictures else text


def as_prompt(
    marked: str, pictures: Sequence[Picture], *, chat: bool
) -> tuple[str | tuple[Message, ...], tuple[Picture, ...]]:
    """Returns a query's prompt of a text with a mark for each picture, and the query's images: a
    user's message with the pictures in it, or a text with `<image>` in their places, whose images
    are apart."""
    if not chat:
        return without_places(marked, pictures).replace(MARK, IMAGE), tuple(pictures)
    first, *rest = marked.split(MARK)
    content: list[str | Picture] = [first]
    for picture, text in zip(pictures, rest, strict=True):
        content += [picture, text]
    return (Message("user", tuple(part for part in content if part != "")),), ()
