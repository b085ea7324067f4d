"""fast-plaid as the peer of `tests.bench late_interaction`, run by the Python that has it installed.

It reads commands as JSON lines, and answers each with a JSON line: `create` builds the index,
`search` writes the rows that it finds. It imports nothing of the project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> None:
    """Answers commands about the vectors in a folder (see late_interaction.py) until stdin ends."""
    import torch
    from fast_plaid import search

    index = search.FastPlaid(index=str(folder / "plaid"), device="cpu")

    def tokens_of(name: str) -> list[torch.Tensor]:
        vectors = np.load(folder / f"{name}_tokens.npy")
        return list(
            torch.from_numpy(vectors).split(np.load(folder / f"{name}_counts.npy").tolist())
        )

    def create() -> dict[str, Any]:
        index.create(documents_embeddings=tokens_of("document"))
        return {"bytes": sum(file.stat().st_size for file in (folder / "plaid").rglob("*"))}

    def find(top_k: int, probes: int, out: str) -> dict[str, Any]:
        results = index.search(queries, top_k=top_k, n_ivf_probe=probes, show_progress=False)
        rows = np.full((len(results), top_k), -1, np.int32)
        for row, ranked in zip(rows, results, strict=True):
            row[: len(ranked)] = [source for source, _ in ranked]
        np.save(folder / out, rows)
        return {}

    queries = tokens_of("query")
    commands = {"create": create, "search": find}
    for line in sys.stdin:
        command = json.loads(line)
        wall, processor = time.perf_counter(), time.process_time()
        reply = commands[command.pop("command")](**command)
        reply["seconds"] = time.perf_counter() - wall
        reply["processor_seconds"] = time.process_time() - processor
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
