"""`mmqa prepare`: official files, or your own documents, to ArrayRecord."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.commands import flags

_OF_FILES = ("corpus", "folder", "chat", "cited", "searched", "hf", "webdataset")  # of any content
SUMMARY = "turn a benchmark's official files, or a folder of documents, into ArrayRecord."
EXAMPLE = "mmqa prepare atlas --out=data/atlas"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\ncorpus: the format of mmqa_jax/data/formats/interchange.py (sources.jsonl)\n"
        "folder: documents (.txt .md .html .htm .pdf .docx .pptx .xlsx .csv .tsv .odt .ods .odp)\n"
        "  and pictures (.jpg .jpeg .png .webp) at any depth; paragraphs under their headings\n"
        "  become overlapping chunks, figures and pictures are sources with their captions, and\n"
        "  `file`, `page` and `heading` of each are kept; --pages=pictures takes a PDF's pages as\n"
        "  pictures, for an encoder that sees;\n"
        "  --overwrite reads only the files that have changed; see mmqa_jax/data/FOLDER.md\n"
        "chat: conversations in OpenAI's format (`messages` as JSON lines, pictures and tools)\n"
        "  of a file, or of train.jsonl, val.jsonl, test.jsonl in a folder; for training\n"
        "cited: a prepared corpus as conversations that teach a language model to cite: sources\n"
        "  and question as `mmqa ask` asks them, the answer with its [n]; for training\n"
        "searched: a prepared corpus as conversations that teach one to search by turns\n"
        "hf, webdataset: Parquet files or a saved data set of Hugging Face, tar shards; --columns\n"
        "  says what their columns are\n"
        "wikipedia, kilt, dpr, infoseek_wiki: passages of a dump (pages-articles.xml.bz2), of\n"
        "  KILT's and DPR's files, or of InfoSeek's and Encyclopedic-VQA's articles with their\n"
        "  pictures; read as a stream, kept on disk, continued after a kill; knowledge for the\n"
        "  questions of other data sets (parts.knowledge.data of a row)"
    )
    parser.add_argument(
        "dataset",
        choices=("atlas", "webqa", *NAMES, *flags.KNOWLEDGE, *_OF_FILES),
        help="atlas is built from installed packages; the last seven read files of yours",
    )
    parser.add_argument(
        "--raw",
        help="folder with the official files, or with your documents; of Wikipedia and chat also "
        "the file",
    )
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the corpus in --out (atlas: prepare it again from the files in its raw "
        "folder)",
    )
    parser.add_argument(
        "--max_broken_pictures",
        type=int,
        help="how many pictures may be broken and left out (1 in 100, at least 10)",
    )
    parser.add_argument(
        "--unanswerable",
        action="store_true",
        help="atlas: hold out the sources of a third of the test split's entities, and ask 200 "
        "foreign questions too, to count refusals",
    )
    parser.add_argument(
        "--chunk_words", type=int, metavar="N", help="folder: words of a chunk, at most (140)"
    )
    parser.add_argument(
        "--chunk_overlap",
        type=int,
        metavar="N",
        help="folder: words of a chunk's end, at most, with which the next one begins (20)",
    )
    parser.add_argument(
        "--passage_words",
        type=int,
        metavar="N",
        help="wikipedia, kilt, infoseek_wiki: words of a passage, at most (100)",
    )
    parser.add_argument(
        "--columns",
        metavar="ROLE=COLUMN,...",
        help="hf, webdataset: question, answers, choices, answer_index, rationale, image, "
        "messages, tools, text (of a source), id; of webdataset a column is a key of .json or an "
        "ending",
    )
    parser.add_argument(
        "--rankings",
        metavar="FILE,...",
        help="cited: what `mmqa search` found for the questions, a file for each split (their own "
        "gold and hard negative sources)",
    )
    parser.add_argument("--top_k", type=int, help="cited: sources of a question (5)")
    parser.add_argument(
        "--pictures",
        choices=("captions", "pixels"),
        help="cited: how pictures are shown (captions)",
    )
    parser.add_argument(
        "--balanced",
        action="store_true",
        help="searched: as many conversations with one search as with two",
    )
    flags.add_pages(parser, "folder, vidore (pictures): ")

    parser.add_argument(
        "--report",
        action="store_true",
        help="also write statistics.json and report.html to --out: WebQA's tables 3 and 4, its "
        "questions' beginnings and topics, the coverage of keywords; of a corpus that --out "
        "already holds only these",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prepares the corpus."""
    from mmqa_jax.runs.prepare import prepare

    return prepare(
        arguments.dataset,
        flags.optional_path(arguments.raw),
        Path(arguments.out),
        report=arguments.report,
        overwrite=arguments.overwrite,
        max_broken_pictures=arguments.max_broken_pictures,
        folder=_folder_options(arguments),
        unanswerable=arguments.unanswerable,
        passage_words=arguments.passage_words,
        columns=arguments.columns,
        cited=_cited_options(arguments),
        balanced=arguments.balanced,
    )


def _cited_options(arguments: argparse.Namespace) -> Any:
    """How conversations are made, if any flag says so."""
    values = {name: getattr(arguments, name) for name in ("rankings", "top_k", "pictures")}
    values = {name: value for name, value in values.items() if value is not None}
    if not values:
        return None
    from mmqa_jax.runs.cited import CitedOptions

    flags.check_at_least_1(arguments, "top_k")
    if "rankings" in values:
        values["rankings"] = tuple(map(Path, values["rankings"].split(",")))
    return CitedOptions(**values)


def _folder_options(arguments: argparse.Namespace) -> Any:
    """How documents become sources, if any flag says so."""
    from mmqa_jax.data.documents.chunks import ChunkOptions
    from mmqa_jax.data.folder import FolderOptions
    from mmqa_jax.retrieval.text_encoder import minilm_token_limit

    values = {"words": arguments.chunk_words, "overlap": arguments.chunk_overlap}
    values = {name: value for name, value in values.items() if value is not None}
    if arguments.dataset == "folder":
        values["tokens"] = minilm_token_limit()
    if arguments.pages is arguments.ocr is None and not values:
        return None
    reader = flags.page_reader(arguments)
    return FolderOptions(ChunkOptions(**values), pages=arguments.pages or "text", ocr=reader)
