"""`python -m tests.bench folders --data=DIR`: is the passage that answers among the first five?

DIR holds the folders pdf, html, markdown, office, nonlatin and val, which RESULTS.md says how to
make from packages. folder_passages.tsv has 20 questions or more for each, written from passages that were drawn
at random from the files, with words of the passage. `ours` is the share of questions for which
one of the five passages that `mmqa ask` reads holds these words; `peer` is bm25s and the same
MiniLM by sentence-transformers over docling's chunks, fused by reciprocal rank. Further columns are
each side's words and vectors alone. Both sides run in processes of their own.

The row `speed` reads, beside that, the PDFs alone, in turn: pages a second of processor time.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import device_name
from mmqa_jax.data.schema import Ranking
from tests.bench import Options
from tests.bench.timing import run_child

VAL = "val"  # on which the length of passages was chosen
FOLDERS = ("pdf", "html", "markdown", "office", "nonlatin", VAL)
SPEED = "speed"
_QUESTIONS = Path(__file__).with_name("folder_passages.tsv")
_MOST_FOUND = 5
_DEPTH = 100  # passages of each ranking that is fused
_SAME_WORDS = 0.8
_WORD, _SPACE = re.compile(r"\w+"), re.compile(r"\s+")
# What docling names by other endings than we do, or reads as something else, is left out.
_PEER_READS = (".pdf", ".html", ".md", ".docx", ".pptx", ".xlsx", ".odt", ".odp", ".ods")


class Asked(NamedTuple):
    """A question.

    Attributes:
      file: of the passage, in its folder.
      words: that stand in the passage alone.
    """

    file: str
    words: str
    question: str


class Chunk(NamedTuple):
    """A passage as it is found: its file in its folder, and its text below its headings."""

    file: str
    text: str


def run(options: Options) -> dict[str, Any]:
    """A row for each folder, and one for the speed of reading PDFs."""
    if options.data is None:
        raise UserError("--data: name the folder of the five folders (tests/bench/RESULTS.md).")
    data, rows = Path(options.data), []
    sides = {"ours": ours, "peer": peer}
    left_out = []
    if importlib.util.find_spec("docling") is None:
        del sides["peer"]
        left_out = ["No peer: docling is not installed; tests/bench/RESULTS.md says how."]
    for name in options.chosen((*FOLDERS, SPEED)):
        folder = data / ("pdf" if name == SPEED else name)
        if not folder.is_dir():
            raise UserError(f"--data={data}: has no folder {folder.name}; make it, see RESULTS.md.")
        if name == SPEED:
            rows += speed(folder, list(sides), options.rounds or 3)
        else:
            rows.append(_row(name, {side: _in_child(side, folder) for side in sides}))
    return {"bench": "folders", "device": device_name(), "rows": rows, "left_out": left_out}


def asked_of(folder: str) -> list[Asked]:
    """The questions of one of the FOLDERS."""
    with _QUESTIONS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    of_folder = [(name.partition("/"), *about) for name, *about in rows]
    return [Asked(path[2], *about) for path, *about in of_folder if path[0] == folder]


def is_answer(chunk: Chunk, asked: Asked) -> bool:
    """Whether a passage holds the words that were looked for.

    Spaces and Unicode's compatibility forms do not count; a passage of the right file may miss a
    fifth of the words, as where a line was hyphenated.
    """
    if _plain(asked.words) in _plain(chunk.text):
        return True
    if chunk.file != asked.file:
        return False
    wanted = set(_WORD.findall(_folded(asked.words)))
    words = wanted & set(_WORD.findall(_folded(chunk.text)))
    return len(words) >= _SAME_WORDS * len(wanted)


def ours(folder: Path) -> dict[str, Any]:
    """What `mmqa ask` finds in a folder."""
    from mmqa_jax.data.schema import Question, source_text
    from mmqa_jax.runs.ask_folder import MINILM, open_folder, open_passages

    began, cpu = time.perf_counter(), _cpu_seconds()
    corpus = open_folder(folder)
    read = _cpu_seconds() - cpu
    passages = open_passages(corpus, MINILM)
    questions = [
        Question(str(n), "", asked.question) for n, asked in enumerate(asked_of(folder.name))
    ]
    hybrid = passages.ranked.hybrid
    with corpus.asked(questions[0].question, None) as question:
        passages.find([question], _MOST_FOUND)
    seconds, used = time.perf_counter() - began, _cpu_seconds() - cpu
    ways = {"": passages.ranked, "words": hybrid.bm25, "vectors": hybrid.dense}
    rankings = {way: side.search(questions, _MOST_FOUND) for way, side in ways.items()}
    chunks = {s.id: Chunk(str(s.extra["file"]), source_text(s)) for s in corpus.sources}
    return _result(folder, chunks, rankings) | {"read": read, "seconds": seconds, "cpu": used}


def peer(folder: Path) -> dict[str, Any]:
    """What bm25s and sentence-transformers find in docling's chunks."""
    import bm25s
    import Stemmer
    from sentence_transformers import SentenceTransformer

    from mmqa_jax.retrieval.fusion import reciprocal_rank_fusion
    from mmqa_jax.retrieval.rankings import to_rankings
    from mmqa_jax.weights.bundled import minilm_path

    began, cpu = time.perf_counter(), _cpu_seconds()
    chunks = docling_chunks(folder)
    read = _cpu_seconds() - cpu
    texts, questions = (
        [item.text for item in chunks],
        [item.question for item in asked_of(folder.name)],
    )
    encoder = SentenceTransformer(str(minilm_path()), device="cpu")
    once, of_chunk = np.unique(texts, return_inverse=True)
    vectors = encoder.encode(once.tolist(), batch_size=32, normalize_embeddings=True)[of_chunk]
    cosines = encoder.encode(questions, normalize_embeddings=True) @ vectors.T

    def split(texts: list[str]) -> Any:
        stemmer = Stemmer.Stemmer("english")
        return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)

    words = bm25s.BM25()
    words.index(split(texts), show_progress=False)
    names, depth = [str(row) for row in range(len(texts))], min(_DEPTH, len(texts))
    rows, scores = words.retrieve(split(questions), k=depth, show_progress=False)
    best = (-cosines).argsort(axis=1)[:, :depth]
    by_way = {
        "words": to_rankings(questions, np.where(scores > 0, rows, -1), scores, names),
        "vectors": to_rankings(questions, best, np.take_along_axis(cosines, best, axis=1), names),
    }
    by_way[""] = reciprocal_rank_fusion(list(by_way.values()))
    seconds, used = time.perf_counter() - began, _cpu_seconds() - cpu
    return _result(folder, dict(zip(names, chunks, strict=True)), by_way) | {
        "read": read,
        "seconds": seconds,
        "cpu": used,
    }


def docling_chunks(folder: Path) -> list[Chunk]:
    """docling's chunks of a folder with their headings, as many tokens as MiniLM reads."""
    from docling_core.transforms.chunker.hybrid_chunker import HybridChunker
    from docling_core.transforms.chunker.tokenizer.huggingface import HuggingFaceTokenizer
    from transformers import AutoTokenizer

    from mmqa_jax.weights.bundled import minilm_path

    tokenizer = AutoTokenizer.from_pretrained(str(minilm_path()))
    chunker = HybridChunker(tokenizer=HuggingFaceTokenizer(tokenizer=tokenizer, max_tokens=256))
    convert, chunks = docling_reader(), []
    for file in sorted(path for path in folder.rglob("*") if path.suffix in _PEER_READS):
        try:
            document = convert(file)
            texts = [chunker.contextualize(chunk) for chunk in chunker.chunk(document)]
        except Exception as error:  # of any of its libraries
            print(f"docling: {file}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
            continue
        chunks += [Chunk(str(file.relative_to(folder)), text) for text in texts]
    return chunks


def docling_reader() -> Callable[[Path], Any]:
    """docling's reader of files without any model."""
    from docling.datamodel.base_models import InputFormat
    from docling.document_converter import DocumentConverter, NativePdfFormatOption

    converter = DocumentConverter(format_options={InputFormat.PDF: NativePdfFormatOption()})
    return lambda file: converter.convert(file).document


def child() -> None:
    """Prints as JSON what a side, named in sys.argv, makes of a folder."""
    side, folder = sys.argv[1:]
    print(json.dumps({"ours": ours, "peer": peer, "pdfium": _by_pdfium, "docling": _by_docling,
                      "reader": _by_reader}[side](Path(folder))))  # fmt: skip


def speed(folder: Path, sides: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Reading PDFs: ours beside pypdfium2's text alone and docling; and a folder asked again."""
    with tempfile.TemporaryDirectory() as cache:
        first, again = (_in_child("ours", folder, cache) for _ in range(2))
    readers = ["reader", "pdfium", *(["docling"] if "peer" in sides else [])]
    taken = {name: [] for name in readers}
    for _ in range(rounds):
        for name in readers:
            taken[name].append(_in_child(name, folder))
    pages = taken["pdfium"][0]["pages"]
    rate = {
        name: pages / sorted(r["cpu"] for r in runs)[rounds // 2] for name, runs in taken.items()
    }
    empty = {"floor": None}
    rows = [
        {"name": f"reading, {name}", "ours": rate["reader"], "peer": rate[name],
         "ratio": rate["reader"] / rate[name], "unit": "pages/s of a processor", **empty}
        for name in readers[1:]
    ]  # fmt: skip
    return rows + [
        {"name": f"{name}, {pages} pages", "ours": seconds["seconds"], "peer": None, "ratio": None,
         "unit": "s", **empty, "cpu": seconds["cpu"]}
        for name, seconds in (("first question", first), ("another run", again))
    ]  # fmt: skip


def _by_pdfium(folder: Path) -> dict[str, float]:
    import pypdfium2

    cpu, pages = _cpu_seconds(), 0
    for file in sorted(folder.rglob("*.pdf")):
        with pypdfium2.PdfDocument(file) as document:
            pages += len(document)
            for page in document:
                page.get_textpage().get_text_bounded()
    return {"cpu": _cpu_seconds() - cpu, "pages": pages}


def _by_docling(folder: Path) -> dict[str, float]:
    convert, cpu = docling_reader(), _cpu_seconds()
    for file in sorted(folder.rglob("*.pdf")):
        convert(file)
    return {"cpu": _cpu_seconds() - cpu}


def _by_reader(folder: Path) -> dict[str, float]:
    from mmqa_jax.data.documents.document import READERS

    cpu = _cpu_seconds()
    for file in sorted(folder.rglob("*.pdf")):
        READERS[".pdf"].read(file.read_bytes())
    return {"cpu": _cpu_seconds() - cpu}


def _in_child(side: str, folder: Path, cache: str | None = None) -> dict[str, Any]:
    """What a side makes of a folder in a process of its own, whose cache is empty but for `cache`."""
    command = [sys.executable, "-c", f"from {__name__} import child; child()", side, str(folder)]
    with tempfile.TemporaryDirectory() as empty:
        ended = run_child(command, {"MMQA_CACHE": cache or empty})
    return json.loads(ended.output.splitlines()[-1])


def _result(
    folder: Path, chunks: Mapping[str, Chunk], ranked: Mapping[str, Sequence[Ranking]]
) -> dict[str, Any]:
    """Of each way to find passages the questions whose passage is not among the first ones."""
    asked = asked_of(folder.name)
    missed = {
        way: [
            question.question
            for question, ranking in zip(asked, rankings, strict=True)
            if not any(
                is_answer(chunks[source], question) for source in ranking.sources[:_MOST_FOUND]
            )
        ]
        for way, rankings in ranked.items()
    }
    return {"missed": missed, "asked": len(asked), "chunks": len(chunks)}


def _row(name: str, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "ours": None, "peer": None, "ratio": None}
    row |= {"unit": f"recall@{_MOST_FOUND}", "floor": None}
    for side, result in sides.items():
        recalls = {way: 1 - len(m) / result["asked"] for way, m in result["missed"].items()}
        row |= {
            f"{side}_{way}" if way else side: round(recall, 3) for way, recall in recalls.items()
        }
        row |= {f"{side}_chunks": result["chunks"], f"{side}_read_s": round(result["read"], 1)}
        for question in result["missed"][""]:
            print(f"{name}, {side} has not found: {question}", file=sys.stderr)
    return row


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _plain(text: str) -> str:
    return _SPACE.sub("", _folded(text))


def _cpu_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])
