"""`python -m tests.bench store`: core/store.py beside libraries that could keep finished work.

Answers of a language model are committed 64 at a time, each commit on disk, and read by key. Then
bits are flipped, one at a time, and everything is read again: a library refuses the damage, gives
the same answers all the same, or gives others (`wrong`). LMDB is measured where it is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmqa_jax.core.host import device_name
from mmqa_jax.core.store import Store
from tests.bench import Options

ROWS = ("store", "array_record", "array_record_at_once", "sqlite", "lmdb")
_COUNTS = {"small": (1_000, 20), "full": (10_000, 200)}  # answers, flipped bits
_COMMIT = 64  # answers
_WORDS = [
    "the",
    "capital",
    "of",
    "Arvania",
    "is",
    "a",
    "city",
    "by",
    "the",
    "sea",
    "with",
    "seven",
    "gates",
]

Answers = dict[str, str]  # key -> JSON
Get = Callable[[str], str]


def run(options: Options) -> dict[str, Any]:
    """The rows of the libraries; `ours` and `peer` are seconds of writing."""
    count, flips = _COUNTS[options.size or "full"]
    answers = make_answers(count)
    rows, ours = [], None
    for name in ("store", *(name for name in options.chosen(ROWS) if name != "store")):
        if name == "lmdb" and importlib.util.find_spec("lmdb") is None:
            continue
        row = measure(name, answers, flips)
        ours = row["peer"] if name == "store" else ours
        peer = None if name == "store" else row["peer"]
        rows.append(row | {"ours": ours, "peer": peer, "ratio": peer and peer / ours})
    return {"bench": "store", "device": device_name(), "rows": rows}


def make_answers(count: int) -> Answers:
    """Answers of about 300 bytes under hashes."""
    generator = random.Random(0)

    def answer() -> dict[str, Any]:
        text = " ".join(generator.choices(_WORDS, k=12))
        tokens = [generator.randrange(32_000) for _ in range(16)]
        candidate = {"text": text, "tokens": tokens, "total": -generator.random()}
        return {"candidates": [{**candidate, "finish": "stop"}], "prompt_tokens": 300}

    return {hashlib.sha256(str(n).encode()).hexdigest(): json.dumps(answer()) for n in range(count)}


def measure(name: str, answers: Answers, flips: int) -> dict[str, Any]:
    """A library's row, but for what compares it with others."""
    write, opened = _LIBRARIES[name]
    generator = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "kept")
        place.mkdir()
        began = time.perf_counter()
        write(place, answers)
        written = time.perf_counter()
        with opened(place) as get:
            ready = time.perf_counter()
            for key in generator.sample(list(answers), len(answers)):
                assert get(key) == answers[key]
            read = time.perf_counter()
        # The lock of LMDB says nothing of the answers.
        files = [f for f in place.rglob("*") if f.is_file() and not f.name.startswith("lock")]
        outcomes = Counter(flipped(name, place, files, answers, generator) for _ in range(flips))
        return {
            "name": name,
            "unit": "s",
            "peer": written - began,
            "floor": None,
            "open_ms": 1e3 * (ready - written),
            "read_us": 1e6 * (read - ready) / len(answers),
            "mib": sum(file.stat().st_size for file in files) / 2**20,
            "files": len(files),
            **{outcome: outcomes[outcome] for outcome in ("refused", "harmless", "wrong")},
        }


def flipped(
    name: str, place: Path, files: list[Path], answers: Answers, generator: random.Random
) -> str:
    """What comes of one flipped bit: `refused`, `harmless` or `wrong`. It is flipped back."""
    file = generator.choices(files, [file.stat().st_size for file in files])[0]
    before = file.read_bytes()
    at, bit = generator.randrange(len(before)), 1 << generator.randrange(8)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "kept")
        shutil.copytree(place, copy)
        changed = before[:at] + bytes([before[at] ^ bit]) + before[at + 1 :]
        (copy / file.relative_to(place)).write_bytes(changed)
        return _in_child(lambda: _outcome(name, copy, answers))


def _outcome(name: str, place: Path, answers: Answers) -> str:
    try:
        with _LIBRARIES[name][1](place) as get:
            same = all(get(key) == answer for key, answer in answers.items())
    except Exception:
        return "refused"
    return "harmless" if same else "wrong"


def _in_child(call: Callable[[], str]) -> str:
    """A call in a process of its own: damage may also end one."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.write(writer, call().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as opened:
        answer = opened.read()
    os.waitpid(child, 0)
    return answer or "refused"


def _commits(answers: Answers) -> Iterator[list[str]]:
    keys = list(answers)
    return (keys[start : start + _COMMIT] for start in range(0, len(keys), _COMMIT))


def _write_store(place: Path, answers: Answers) -> None:
    with Store(place, {"kind": "answers"}) as store:
        for keys in _commits(answers):
            store.add({key: json.loads(answers[key]) for key in keys})


@contextlib.contextmanager
def _open_store(place: Path) -> Iterator[Get]:
    with Store(place, {"kind": "answers"}, others="refuse") as store:
        yield lambda key: json.dumps(store[key])


def _write_records(place: Path, file: str, answers: Answers, keys: list[str], group: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(place / "unfinished"), f"group_size:{group}")
    for key in keys:
        writer.write(key.encode() + answers[key].encode())
    writer.close()
    with open(place / "unfinished", "rb") as written:
        os.fsync(written.fileno())
    os.replace(place / "unfinished", place / file)


def _write_array_record(place: Path, answers: Answers) -> None:
    for number, keys in enumerate(_commits(answers)):
        _write_records(place, f"{number:06}", answers, keys, 1)


def _write_array_record_at_once(place: Path, answers: Answers) -> None:
    _write_records(place, "all", answers, list(answers), _COMMIT)


@contextlib.contextmanager
def _open_array_record(place: Path) -> Iterator[Get]:
    from array_record.python.array_record_module import ArrayRecordReader

    index = {}
    for file in sorted(place.iterdir()):
        reader = ArrayRecordReader(str(file), "readahead_buffer_size:0,max_parallelism:0")
        for row, record in enumerate(reader.read_all()):
            index[record[:64].decode()] = reader, row

    def get(key: str) -> str:
        reader, row = index[key]
        return reader.read([row])[0][64:].decode()

    yield get


def _write_sqlite(place: Path, answers: Answers) -> None:
    with contextlib.closing(sqlite3.connect(place / "a.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, answer TEXT)")
        for keys in _commits(answers):
            database.execute("BEGIN")
            rows = [(key, answers[key]) for key in keys]
            database.executemany("INSERT INTO answers VALUES (?, ?)", rows)
            database.execute("COMMIT")


@contextlib.contextmanager
def _open_sqlite(place: Path) -> Iterator[Get]:
    with contextlib.closing(sqlite3.connect(place / "a.sqlite")) as database:
        asked = "SELECT answer FROM answers WHERE key = ?"
        yield lambda key: database.execute(asked, (key,)).fetchone()[0]


def _write_lmdb(place: Path, answers: Answers) -> None:
    import lmdb

    with lmdb.open(str(place / "lmdb"), map_size=1 << 28) as database:
        for keys in _commits(answers):
            with database.begin(write=True) as transaction:
                for key in keys:
                    transaction.put(key.encode(), answers[key].encode())


@contextlib.contextmanager
def _open_lmdb(place: Path) -> Iterator[Get]:
    import lmdb

    with (
        lmdb.open(str(place / "lmdb"), map_size=1 << 28, readonly=True, lock=False) as database,
        database.begin() as transaction,
    ):
        yield lambda key: transaction.get(key.encode()).decode()


# Name -> what writes answers into a folder, and what opens them.
_LIBRARIES = {
    "store": (_write_store, _open_store),
    "array_record": (_write_array_record, _open_array_record),
    "array_record_at_once": (_write_array_record_at_once, _open_array_record),
    "sqlite": (_write_sqlite, _open_sqlite),
    "lmdb": (_write_lmdb, _open_lmdb),
}
