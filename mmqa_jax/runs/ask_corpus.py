"""The corpora that `mmqa ask` answers from, and the sources that it shows beside an answer."""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from mmqa_jax.core.progress import Screen
from mmqa_jax.core.terminal import escaped
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.documents.document import cited_place, shown_place
from mmqa_jax.data.schema import Prediction, Question, Source
from mmqa_jax.runs.originals import Originals

# Key of a trace: why a question was refused before it was asked, `least` similarity, and place and
# `similarity` of the `nearest` passage.
REFUSED = "refusal"


class AskedCorpus(Corpus):
    """A prepared corpus, and the pictures of the questions asked."""

    def __init__(self, prepared: Corpus):
        super().__init__(
            prepared.sources,
            prepared.questions(),
            fingerprint=prepared.fingerprint,
            manifest=prepared.manifest,
            row=prepared.row,
            image_rows=prepared.image_rows,
            materials=prepared.materials,
        )
        self.originals: Originals | None = None  # of a folder of documents
        self._prepared = prepared
        self._numbers = itertools.count(1)
        self._asked: dict[str, bytes] = {}  # question id, which no file has as its name -> picture

    @contextlib.contextmanager
    def asked(self, text: str, picture: bytes | None = None) -> Iterator[Question]:
        """The question, whose encoded picture the corpus has inside the `with` block.

        Several threads may ask at once.
        """
        name = f"\0asked {next(self._numbers)}"
        if picture is not None:
            self._asked[name] = picture
        try:
            yield Question(name, "", text, image=None if picture is None else name)
        finally:
            self._asked.pop(name, None)

    def read_picture(self, name: str | None) -> bytes | None:
        """Encoded picture by its name."""
        asked = None if name is None else self._asked.get(name)
        return self._prepared.read_picture(name) if asked is None else asked


class ShownSource(NamedTuple):
    """A source beside an answer."""

    source: Source  # it
    score: float | None  # its relevance (a demo's reranker) or similarity
    cited: int | None  # the number by which the answer cites it, from 1; None: it does not

    def row(self, answer: str = "") -> dict[str, Any]:
        """The source in the output of `--json`; `file` and `page` are those of a document, and its
        place there is documents/places.cited_place.

        `answer`: whose quote from the source has a place of its own.
        """
        source = self.source
        return {
            "id": source.id,
            "file": source.extra.get("file"),
            "page": source.extra.get("page"),
            "text": source.text,
            "image": source.image,
            "score": self.score,
            "cited": self.cited,
            **cited_place(source.text, source.extra, answer),
        }


def answer_notes(prediction: Prediction) -> list[str]:
    """Returns notes for an answer: sources that the model did not see, and failures."""
    trace, notes = prediction.trace, []
    if reason := trace.get(REFUSED):
        near = "No passage shares a word with the question."
        if "nearest" in reason:
            near = (
                f"The nearest passage ({reason['nearest']}) has a similarity of "
                f"{reason['similarity']:.3f}; at least {reason['least']:.3f} is needed to answer."
            )
        notes.append(f"{near} --least_similarity=-1 has every question answered.")
    if trace.get("picture_not_shown"):
        notes.append(
            "The model was not shown the question's picture: it reads texts alone, or is a "
            "server's, which --pictures=pixels shows pictures."
        )
    if dropped := trace.get("dropped_sources"):
        notes.append(f"Passages that did not fit the model's context: {dropped}.")
    if words := trace.get("cut_to_words"):
        notes.append(f"The first passage was cut to {words} words, which fit the context.")
    if wrong := trace.get("wrong_citations"):
        notes.append(f"Citations of passages that there are not: {wrong}.")
    if bare := [text["text"] for text in trace.get("sentences", ()) if not text["sources"]]:
        notes.append(f"No passage supports: {' '.join(bare)}")
    if unfounded := trace.get("unfounded"):
        numbers = ", ".join(f"[{number}]" for number in unfounded)
        notes.append(f"The model cites {numbers}, on which no sentence rests.")
    reasons = (*trace.get("failed", ()), *trace.get("too_long", ()))
    if prediction.answer:
        notes += [f"Note: {reason}." for reason in trace.get("incomplete", ())]
    else:
        reasons += tuple(f"{reason}." for reason in trace.get("incomplete", ()))
    return [*notes, *(f"The model gave no answer: {reason}" for reason in reasons)]


def shown_sources(
    corpus: Corpus, names: Sequence[str], scores: Sequence[float], *, cited: bool
) -> list[ShownSource]:
    """Sources by their ids, numbered in this order if the answer cites them."""
    return [
        ShownSource(corpus.sources[corpus.row[name]], float(score), number if cited else None)
        for number, (name, score) in enumerate(zip(names, scores, strict=True), start=1)
    ]


# Asked and printed one after the other, as `mmqa ask` does.


def ask_in_turn(
    answerer: Any, questions: Iterable[str], picture: bytes | None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Asks the questions in turn and prints each answer; yields it with what `--json` prints.

    Behind the last one it prints the credits of what may be quoted.
    """
    for text in questions:
        began = time.perf_counter()
        answer = answerer.answer(text, picture)
        seconds = round(time.perf_counter() - began, 2)
        sources = answer.sources_shown(answerer.corpus)
        quoted = answer.quoted(answerer.corpus)
        _show(text, answer, sources, seconds, quoted)
        yield (
            answer,
            {
                "question": text,
                "answer": answer.text,
                "found": answer.found,
                "sources": [source.row(answer.text if answer.found else "") for source in sources],
                "seconds": seconds,
                "quote": quoted,
            },
        )
    for material in answerer.corpus.materials:
        print(material, file=sys.stderr)


def _show(
    question: str,
    answer: Any,
    sources: Sequence[Any],
    seconds: float,
    quoted: Mapping[str, Any] | None,
) -> None:
    """Prints an answer on stderr, because stdout is reserved for the JSON."""
    console = Screen()
    console.print(Text(f"\n{escaped(question)}", "bold"))
    if quoted is not None:
        before, sentence, after = quoted["passage"].partition(quoted["text"])
        place = quoted["file"] or quoted["id"]
        place += f", page {quoted['page']}" if quoted["page"] is not None else ""
        named = (f"  ({escaped(place)})", "cyan")
        answers = (f"“{escaped(sentence)}”", "bold reverse")  # a file keeps the marks alone
        console.print("The passage that answers best, its answer marked:")
        console.print(Text.assemble(escaped(before), answers, escaped(after), named))
        console.print("What the model makes of the passages, of which it is not sure:")
    text = escaped(answer.text or "(no answer)")
    console.print(Text.assemble(text, (f"  ({seconds:.1f} s)", "dim")))
    if not answer.found and sources:
        console.print("The nearest source:" if len(sources) == 1 else "What was read:")
    elif sources and sources[0].cited is None:
        console.print("The answer cites no source. What was read:")
    for source, score, cited in sources:
        number = "-" if cited is None else f"[{cited}]"
        place = shown_place(source.extra) or source.id
        kind = "picture" if source.modality == "image" else "text"
        named, title = (escaped(place), "cyan"), (escaped(source.title), "bold")
        console.print(
            Text.assemble(f"  {number} {kind} ", named, f" ({score:.2f})"),
            Text.assemble(title, ": " if source.title else "", escaped(source.text)),
        )
