"""Kills writers of a store (kill -9) at random moments; see test_store_kills.py. It imports no jax.

Arguments: the store's folder, what is written (appended, alone), how many kills. Two or three
processes write at once; each tells through a pipe which results it was promised to be kept. Prints
JSON: how many were killed, how many of them within a write, how often results were added. It ends
with a store that holds half of the results, or more.
"""

import json
import os
import random
import signal
import sys
import time

import numpy as np
import object_store

from mmqa_jax.core.store import Store

WHAT = {"model": "m", "corpus": "c"}
KEYS = [f"{number:05d}" for number in range(120)]


def value(key: str) -> object:
    """What is kept for a key: text of several lengths, or an array."""
    number = int(key)
    if number % 3 == 0:
        return np.arange(number * 50, dtype=np.float32)
    return {"answer": "Zürich " * (number * 7), "scores": [number / 7, 0.5]}


def check(store: Store) -> set[str]:
    """The keys that are there; AssertionError if a result is not what was written."""
    for key in store:
        kept, expected = store[key], value(key)
        assert np.array_equal(kept, expected) if int(key) % 3 == 0 else kept == expected, key
    return set(store)


def write(folder: str, alone: bool, seed: int, tell: int, within: bool) -> None:
    """In a child: adds what is missing, in an order of its own, until it is killed or done."""
    rng = random.Random(seed)
    if within:
        _die_within_a_write(rng.randrange(6))
    store = Store(folder, WHAT)
    missing = store.missing(KEYS)
    rng.shuffle(missing)
    while missing:
        keys = [missing.pop() for _ in range(min(len(missing), 1 if alone else rng.randint(1, 3)))]
        store.add({key: value(key) for key in keys}, alone=alone)
        os.write(tell, "".join(f"{key}\n" for key in keys).encode())
        store.refresh()
        missing = [key for key in missing if key not in store]
    os._exit(0)


def _die_within_a_write(number: int) -> None:
    """Lets the write of this number into a file reach the disk in part, and kills the process."""
    original, count = os.write, 0

    def cut(file: int, data) -> int:
        nonlocal count
        if len(data) < 200 or count != number:
            count += len(data) >= 200
            return original(file, data)
        original(file, data[: random.randrange(1, len(data))])
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    os.write = cut


def main() -> None:
    object_store.install()
    folder, alone, kills = sys.argv[1], sys.argv[2] == "alone", int(sys.argv[3])
    rng = random.Random(kills)
    counts = {"killed": 0, "within": 0, "finished": 0, "stores": 0}
    promised: set[str] = set()
    found: set[str] = set()
    while counts["killed"] < kills or len(found) < len(KEYS) // 2:  # what ends here is damaged next
        children = []
        for _ in range(rng.choice((2, 2, 3))):
            within = not alone and rng.random() < 0.3
            reading, tell = os.pipe()
            seed = rng.randrange(1 << 30)
            child = os.fork()
            if child == 0:
                os.close(reading)
                write(folder, alone, seed, tell, within)
            os.close(tell)
            children.append((child, reading, within))
        time.sleep(rng.random() * 0.02)
        for child, _, within in children:
            if not within:
                os.kill(child, signal.SIGKILL)
        for child, reading, within in children:
            status = os.waitpid(child, 0)[1]
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            assert killed or status == 0, status
            counts["killed"] += killed
            counts["within"] += killed and within
            counts["finished"] += not killed
            with os.fdopen(reading) as told:
                promised |= set(told.read().split())
        store = Store(folder, WHAT)
        found = check(store)
        assert promised <= found, promised - found
        if found == set(KEYS):  # once more, in an empty folder
            if counts["killed"] < kills:
                store.remove()
            counts["stores"] += 1
            promised.clear()
        store.close()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
