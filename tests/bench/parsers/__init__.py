"""`python -m tests.bench parsers`: what libraries read of documents, beside the ledger of ours.

A module of this package is a format. `SAMPLES() -> dict[str, bytes]` gives documents by their file
names, and `CANDIDATES: dict[str, Callable[[bytes], str]]` the text that a library reads; its key
begins with the library's name in its package registry. Each candidate runs in a process of its own,
whose peak memory the system reports; `s` is the shortest time of a processor for all samples, the
first of which imports nothing any more. `of_held` is the share of the letters that the samples hold
by our reader's count: more than 1 where markup or furniture is read too. `words` is the share of
the distinct words of the majority of those who read a sample, so that no reader is its own judge.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pkgutil
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import RunError
from mmqa_jax.core.host import device_name
from mmqa_jax.data.documents.document import READERS, ending_of, letters
from tests.bench import Options
from tests.bench.timing import run_child

# Samples are made by tests' helpers, which import each other by their bare names.
sys.path.insert(0, str(Path(__file__).parents[2] / "unit"))
OURS = "ours"
_ROUNDS = 3
_WORD = re.compile(r"[^\W_]{2,}")
_LICENSE = "License :: "


def run(options: Options) -> dict[str, Any]:
    """A row for each candidate of each format; `ours` and `peer` are seconds."""
    formats = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
    rows: list[dict[str, Any]] = []
    for name in options.chosen(formats):
        rows += _rows(name, options.rounds or _ROUNDS)
    return {"bench": "parsers", "device": device_name(), "rows": rows}


def _rows(form: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of a format, ours first."""
    candidates = _module(form).CANDIDATES
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in (OURS, *candidates):
        command = [sys.executable, "-c", f"from {__name__} import child; child()"]
        try:
            ended = run_child([*command, form, name, str(rounds)])
        except RunError as error:
            failed[name] = str(error)
            continue
        results[name] = {**json.loads(ended.output.splitlines()[-1]), "peak": ended.peak_bytes}
    majority = _majority([result["words"] for result in results.values()])
    ours = results.get(OURS, {}).get("seconds")
    held = results.get(OURS, {}).get("held", 0)
    rows = []
    for name, result in results.items():
        peer = None if name == OURS else result["seconds"]
        shared = sum(
            len(majority[sample] & set(words)) for sample, words in result["words"].items()
        )
        rows.append(
            {
                "name": f"{form}: {name}",
                "ours": ours,
                "peer": peer,
                "ratio": peer and ours and peer / ours,
                "unit": "s",
                "floor": None,
                "letters": result["letters"],
                "of_held": result["letters"] / held if held else None,
                "words": shared / max(1, sum(map(len, majority.values()))),
                "peak_mib": result["peak"] / 2**20,
                "samples": len(result["words"]),
                "failed": ", ".join(result["failed"]) or None,
                "license": None if name == OURS else license_of(name.split()[0]),
            }
        )
    empty = dict.fromkeys(("ours", "peer", "ratio", "floor"))
    return rows + [
        {"name": f"{form}: {name}", **empty, "unit": "s", "failed": why}
        for name, why in failed.items()
    ]


def _majority(readings: Iterable[Mapping[str, Iterable[str]]]) -> dict[str, set[str]]:
    """Of each sample the words that more than half of those who read it have."""
    counts: dict[str, Counter[str]] = {}
    readers: Counter[str] = Counter()
    for reading in readings:
        for sample, words in reading.items():
            counts.setdefault(sample, Counter()).update(set(words))
            readers[sample] += bool(words)
    return {
        sample: {word for word, count in counter.items() if 2 * count > readers[sample]}
        for sample, counter in counts.items()
    }


def license_of(distribution: str) -> str | None:
    """The license that an installed package states."""
    try:
        about = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    classifiers = about.get_all("Classifier") or []
    named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith(_LICENSE)]
    stated = about.get("License-Expression") or ", ".join(named) or about.get("License") or ""
    return stated.partition("\n")[0][:60] or None


def child() -> None:
    """Reads all samples of a format by a candidate, and prints what came of it as JSON."""
    form, name, rounds = sys.argv[1:]
    module = _module(form)
    samples: dict[str, bytes] = module.SAMPLES()
    held = 0
    words: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    count = 0
    for sample, data in samples.items():
        try:
            if name == OURS:
                document = READERS[ending_of(sample)].read(data)
                held += document.letters or document.letters_read
                count += document.letters_read
                text = " ".join(_texts(document))
            else:
                text = module.CANDIDATES[name](data)
                count += letters(text)
        except Exception as error:  # a library that does not read it: that is a result
            failed[sample] = f"{sample}: {type(error).__name__}"
            text = ""
        words[sample] = sorted(set(_WORD.findall(text.casefold())))
    seconds = []
    for _ in range(int(rounds)):
        began = time.process_time()
        for sample, data in samples.items():
            if sample not in failed:
                if name == OURS:
                    READERS[ending_of(sample)].read(data)
                else:
                    module.CANDIDATES[name](data)
        seconds.append(time.process_time() - began)
    result = {"letters": count, "held": held, "words": words, "failed": list(failed.values())}
    print(json.dumps({**result, "seconds": min(seconds)}))


def _texts(document: Any) -> list[str]:
    """All that a document says."""
    parts = [document.title, *(figure.caption for figure in document.figures)]
    for paragraph in document.paragraphs:
        parts += [paragraph.heading, paragraph.header, paragraph.text]
    return list(dict.fromkeys(parts))


def _module(form: str) -> Any:
    return importlib.import_module(f"{__name__}.{form}")
