"""`python -m tests.bench evidence --data=DIR`: five folders, asked 20 questions each, as a newcomer
would: is the answer right, its passage, the place that is shown, and is refused what no file has?

DIR gets the folders markdown, pdf, office, pictures and code, if it lacks them: files of ../shared,
two manuals of Debian's packages and modules of Python's library. evidence_questions.tsv has for
each 16 questions with words of the passage that answers and the answer, and 4 without an answer.
MiniLM and BM25 find five passages, which SmolLM2-135M reads; its answers have at most 32 tokens.
What the reader answered is kept in DIR/NAME.asked.jsonl, so that a run goes on where one has ended;
delete these files to measure anew. Quotes are found anew by each run. A row a folder and measure, of the
questions with an even number among their folder's (test) but for the rows `val`, and of all for
`refused`. An answer is right that has the answer's words.

| row | ours | peer |
|---|---|---|
| answer | what stands first is right: the model's words, or below `at` the best sentence | the words |
| passage | the share of questions whose passage is among the five | the nearest one is it |
| place | the best sentence's place holds the answer, where the sentence does | that it does, of all |
| cited | by cause: the passage is cited where the words are right | asked: the same |
| refused | questions without an answer that are refused | those with one |
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.config import find_config, load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import device_name
from mmqa_jax.data.schema import Prediction, Ranking, Source, source_text
from mmqa_jax.prompting.backends.config import open_backend
from mmqa_jax.prompting.causes import SENTENCES
from mmqa_jax.prompting.citations import read_citations
from mmqa_jax.prompting.llm_reader import LLMReader, LLMReaderOptions
from mmqa_jax.prompting.quotes import CONFIDENCE, best_quote
from mmqa_jax.runs.ask_folder import AskOptions, FolderAnswer, FolderAnswerer, open_folder
from tests.bench import Options
from tests.shared_data import SHARED as DATA

FOLDERS = ("markdown", "pdf", "office", "pictures", "code")
_SHARED = DATA.parent
_QUESTIONS = Path(__file__).with_name("evidence_questions.tsv")
_PAGES = ("design.md", "reference.md", "house.md", "data/README.md")
_MANUALS = ("libtasn1-doc/libtasn1.pdf", "shared-mime-info/shared-mime-info-spec.pdf")
_MODULES = (
    "textwrap", "fnmatch", "secrets", "sched", "shlex", "csv", "graphlib", "colorsys", "heapq",
    "zipapp", "json/encoder", "json/decoder", "bisect", "queue", "netrc",
)  # fmt: skip
_PICTURES, _BOOK = 100, "astronomy"
_SURE = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Asked(NamedTuple):
    """A question.

    Attributes:
      file: of the passage; of a picture a part of its name; "": no file answers.
      words: of the passage.
      answers: any of which makes an answer right.
    """

    file: str
    words: str
    answers: tuple[str, ...]
    question: str

    def is_in(self, text: str) -> bool:
        """Whether a text has the answer."""
        return any(f" {_plain(answer)} " in f" {_plain(text)} " for answer in self.answers)

    def is_passage(self, source: Source) -> bool:
        """Whether a source is the passage that answers."""
        name = source.image if source.image else str(source.extra.get("file"))
        return self.file in (name or "") and _plain(self.words) in _plain(source_text(source))


class Fact(NamedTuple):
    """What came of a question with an answer."""

    is_val: bool
    found: bool
    nearest: bool
    said: bool
    quoted: bool
    placed: bool | None
    confidence: float
    cause: bool
    asked: bool
    refused: bool

    def first(self, sure: float) -> bool:
        """Whether what stands first is right, where the words need a confidence of `sure`."""
        return self.said if self.confidence >= sure else self.quoted


def run(options: Options) -> dict[str, Any]:
    """The rows of all folders; the confidence is chosen on the val halves of all."""
    if options.data is None:
        raise UserError("--data: name a folder for the five folders, which are made if absent.")
    config = load_config(find_config("configs/prompt/default.py"), {"engine.length": 2048})
    llm = open_backend("engine", "smollm2", None, config, "--model")
    facts: dict[str, list[Fact]] = {}
    foreign: dict[str, list[bool]] = {}
    for name in options.chosen(FOLDERS):
        folder = Path(options.data) / name
        if not folder.is_dir():
            _MAKERS[name](folder)
        facts[name], foreign[name] = _facts(folder, llm)
    every = [fact for of_folder in facts.values() for fact in of_folder]
    val = [fact for fact in every if fact.is_val]
    sure = max(_SURE, key=lambda value: _share([fact.first(value) for fact in val]))
    rows = [
        _row(f"val answer at {value}", _share([fact.first(value) for fact in val]), None, len(val))
        for value in _SURE
    ]
    facts["all"], foreign["all"] = every, [x for of_folder in foreign.values() for x in of_folder]
    for name, of_folder in facts.items():
        rows += _rows(name, of_folder, foreign[name], sure)
    return {"bench": "evidence", "device": device_name(), "rows": rows}


def _rows(name: str, every: list[Fact], foreign: list[bool], sure: float) -> list[dict[str, Any]]:
    facts = [fact for fact in every if not fact.is_val]
    right = [fact for fact in every if fact.said]
    places = [fact.placed for fact in every if fact.quoted and fact.placed is not None]
    measures = {
        "answer": ([fact.first(sure) for fact in facts], [fact.said for fact in facts]),
        "quote": ([fact.quoted for fact in every], [fact.said for fact in every]),
        "passage": ([fact.found for fact in every], [fact.nearest for fact in every]),
        "place": (places, [fact.quoted for fact in every]),
        "cited": ([fact.cause for fact in right], [fact.asked for fact in right]),
        "refused": (foreign, [fact.refused for fact in every]),
    }
    return [
        _row(f"{name} {measure}", _share(ours), _share(peer), len(ours), at=sure)
        for measure, (ours, peer) in measures.items()
    ]


def _row(name: str, ours: float, peer: float | None, count: int, **more: Any) -> dict[str, Any]:
    shares = {"ours": round(ours, 3), "peer": None if peer is None else round(peer, 3)}
    return {"name": name, **shares, "ratio": None, "unit": "", "floor": None, "n": count, **more}


def _share(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def asked_of(folder: str) -> list[Asked]:
    """The questions of one of the FOLDERS."""
    with _QUESTIONS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [
        Asked(file, words, tuple(answers.split("|")) if answers else (), question)
        for name, file, words, answers, question in rows
        if name == folder
    ]


def _facts(folder: Path, llm: Any) -> tuple[list[Fact], list[bool]]:
    """Of each question with an answer its facts, of each other one whether it is refused."""
    kept = folder.with_name(f"{folder.name}.asked.jsonl")
    lines = kept.read_text("utf-8").splitlines() if kept.exists() else []
    known = {row["question"]: row for row in map(json.loads, lines)}
    every = asked_of(folder.name)
    corpus = open_folder(folder, folder.with_name(f"{folder.name}.read"))
    reading = LLMReaderOptions(citations="cause", max_new_tokens=32)
    answerer = FolderAnswerer(corpus, LLMReader(corpus, llm, reading), AskOptions(quote_below=0.0))
    with kept.open("a", encoding="utf-8") as file:
        for asked in every:
            if asked.question not in known:
                known[asked.question] = row = _answered(answerer, asked)
                print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
                print(row, file=sys.stderr, flush=True)
    facts = [
        _fact(folder, answerer, asked, known[asked.question], is_val=number % 2 == 1)
        for number, asked in enumerate(every)
        if asked.file
    ]
    refused = [not known[asked.question]["found"] for asked in every if not asked.file]
    return facts, refused


def _answered(answerer: FolderAnswerer, asked: Asked) -> dict[str, Any]:
    """What the reader answered to a question."""
    answer = answerer.answer(asked.question)
    trace = answer.prediction.trace
    output = trace.get("outputs", [{"text": ""}])[0]["text"]
    read = answer.read.sources
    return {
        "question": asked.question,
        "answer": answer.text,
        "found": answer.found,
        "read": read,
        "cause": answer.prediction.sources,
        "asked": [read[n - 1] for n in read_citations(output, len(read)).numbers],
        "confidence": trace.get(CONFIDENCE, 0.0) if answer.found else 1.0,
        SENTENCES: trace.get(SENTENCES),
    }


def _fact(
    folder: Path, answerer: FolderAnswerer, asked: Asked, row: dict[str, Any], *, is_val: bool
) -> Fact:
    """Facts of a question and of what the reader answered."""
    corpus = answerer.corpus
    if not any(map(asked.is_passage, corpus.sources)):
        raise UserError(f"{folder}: no passage has the words {asked.words!r}.")
    read = [corpus.sources[corpus.row[name]] for name in row["read"]]
    passages = {source.id for source in read if asked.is_passage(source)}
    quote = best_quote(asked.question, read, answerer.embedder, row["answer"])
    ranking = Ranking(asked.question, tuple(row["read"]), (0.0,) * len(read))
    prediction = Prediction(asked.question, row["answer"], read=ranking.sources)
    quoted = FolderAnswer(row["answer"], True, prediction, ranking, quote).quoted(corpus)
    return Fact(
        is_val=is_val,
        found=bool(passages),
        nearest=bool(read) and read[0].id in passages,
        said=asked.is_in(row["answer"]),
        quoted=quoted is not None and asked.is_in(quoted["text"]),
        placed=None if quoted is None else _is_placed(folder, asked, quoted),
        confidence=row["confidence"],
        cause=bool(passages & set(row["cause"])),
        asked=bool(passages & set(row["asked"])),
        refused=not row["found"],
    )


def _is_placed(folder: Path, asked: Asked, quoted: dict[str, Any]) -> bool | None:
    """Whether the place of a quote, read anew in its file, holds the answer; None: it has none."""
    file = folder / (quoted["file"] or "")
    if quoted["boxes"]:
        import pypdfium2

        with pypdfium2.PdfDocument(file) as document:
            page = document[quoted["page"] - 1]
            text, height = page.get_textpage(), page.get_height()
            parts = [
                text.get_text_bounded(left, height - bottom, right, height - top)
                for left, top, right, bottom in quoted["boxes"]
            ]
        return asked.is_in(" ".join(parts))
    if quoted["lines"]:
        first, last = quoted["lines"]
        lines = file.read_text("utf-8").splitlines()[first - 1 : last]
        return asked.is_in(" ".join(lines))
    return None


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


# The folders.


def _markdown(folder: Path) -> None:
    for name in _PAGES:
        _copy(_SHARED / name, folder / name)


def _pdf(folder: Path) -> None:
    for name in _MANUALS:
        file = Path("/usr/share/doc") / name
        if not file.exists():
            raise UserError(f"{file}: is missing; apt-get install {file.parent.name}.")
        _copy(file, folder / file.name)


def _office(folder: Path) -> None:
    office = _SHARED / "cases" / "hands_03" / "office"
    for file in office.rglob("*.*"):
        _copy(file, folder / file.relative_to(office))


def _code(folder: Path) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    for name in _MODULES:
        _copy(library / f"{name}.py", folder / f"{name.replace('/', '_')}.py")


def _pictures(folder: Path) -> None:
    """An album: pictures of a textbook, each with its caption."""
    data, lines = DATA / "openstax", ["# Album"]
    with tarfile.open(data / "images.tar") as tar, (data / "sources.jsonl").open() as sources:
        for source in map(json.loads, sources):
            if source["modality"] == "image" and source["id"].startswith(f"{_BOOK}/"):
                name = Path(source["image"])
                picture = tar.extractfile(source["image"])
                assert picture is not None, name
                target = folder / "img" / name.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(io.BytesIO(picture.read()), file)
                caption = " ".join(source["text"].split()).replace("]", ")").replace("[", "(")
                lines += [f"## {source['title']}", f"![{caption}](img/{name.name})"]
                if len(lines) > 2 * _PICTURES:
                    break
    (folder / "album.md").write_text("\n\n".join(lines), "utf-8")


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)


_MAKERS = {
    "markdown": _markdown, "pdf": _pdf, "office": _office, "pictures": _pictures, "code": _code,
}  # fmt: skip
