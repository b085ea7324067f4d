"""`mmqa convert --check`, and the tokenizer of a converted GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import RunError, UserError


def compare_layers(model: str | None, source: Path, converted: Path | None) -> dict[str, Any]:
    """Prints both sides' deviations; RunError if one is beyond the bound."""
    from mmqa_jax.evaluation.tables import Table, show
    from mmqa_jax.models.check import BOUND, check

    rows = check(model, source, converted)
    cells = [
        [
            row.name,
            *(f"{x:.1e}" for x in (row.deviation, row.allowed)),
            f"{row.size:.3g}",
            "pass" if row.passed else "FAIL",
        ]
        for row in rows
    ]
    columns = ["", "largest deviation", "allowed", "of values up to", ""]
    show(Table(f"{converted or source} beside transformers", columns, cells, f"Allowed: {BOUND}."))
    failed = [row for row in rows if not row.passed]
    if failed:
        raise RunError(
            f"--check: {len(failed)} of {len(rows)} layers and outputs deviate from transformers "
            f"by more than is allowed, the first is {failed[0].name} by "
            f"{failed[0].deviation:.1e}; report it with the model's name."
        )
    print(f"pass: {len(rows)} layers and outputs are within the bound")
    compared = [row._asdict() | {"allowed": row.allowed} for row in rows]
    return {"check": {"passed": True, "bound": BOUND, "compared": compared}}


def write_tokenizer(source: Path, folder: Path) -> list[str]:
    """Writes the tokenizer of a GGUF file as files; returns their names."""
    from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer

    try:
        tokenizer = open_text_tokenizer(source)
    except UserError as error:  # the weights are of use without it
        print(f"{source}: its tokenizer is not written ({error})", file=sys.stderr)
        return []
    before = set(folder.iterdir())
    tokenizer.save(folder)
    return sorted(file.name for file in set(folder.iterdir()) - before)
