"""`mmqa models`: the families of models that are read, their sizes, and measured deviations."""

import argparse
import re
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "list the models that are read: sizes, memory on a chip, deviation, who sees pictures."
EXAMPLE = "mmqa models --markdown"
_MEASURED = Path(__file__).parents[1] / "weights/RESULTS.md"  # by python -m tests.bench families
_COLUMNS = (
    "family",
    "answers",
    "embeds",
    "sees",
    "deviation",
    "size",
    "GiB",
    "GiB a chip of v5e:2x4",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\nfamily: a model type of config.json, or a --model of `mmqa convert`; deviation: the\n"
        "  largest from transformers; GiB: of parameters in bfloat16, and as `auto` lays them\n"
        "  out on eight v5e; as `python -m tests.bench families` measured them; –: not measured"
    )
    flags.add(parser, "markdown")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lists the models."""
    from mmqa_jax.evaluation.tables import Table, show
    from mmqa_jax.models.encoders.text_encoders import FAMILIES as ENCODERS
    from mmqa_jax.models.llava.families import FAMILIES as VISION_FAMILIES
    from mmqa_jax.weights.registry import architectures

    entries = architectures().values()
    owners = {
        name: model_entry
        for model_entry in entries
        for name in (*sorted(model_entry.known_types), model_entry.name)
    }
    measured = _measured()
    owners = {
        name: model_entry
        for name, model_entry in owners.items()
        if model_entry.name not in measured
        or model_entry.gguf
        or name in (*measured, *VISION_FAMILIES)
    }
    owners |= {model_entry.name: model_entry for model_entry in entries}
    rows = []
    for name, entry in owners.items():
        deviation, sizes = measured.get(name, (None, [(None, None, None)]))
        embeds = "yes" if name in ENCODERS else ""
        facts = [
            name,
            "yes" if entry.writes else "",
            embeds,
            "yes" if entry.sees else "",
            deviation,
        ]
        rows += [dict(zip(_COLUMNS, [*facts, *size], strict=True)) for size in sizes]
    for name in sorted({*ENCODERS} - {*owners}):
        facts = [name, "", "yes", "", measured.get(name, (None,))[0]]
        rows.append(dict(zip(_COLUMNS, [*facts, None, None, None], strict=True)))
    table = Table("Models", _COLUMNS, [list(row.values()) for row in rows])
    show(table, markdown=arguments.markdown)
    return {"models": rows}


def _measured() -> dict[str, tuple[str, list[tuple[str, str, str | None]]]]:
    """Returns each family's measured deviation, and each preset's name, GiB, and GiB a chip."""
    families: dict[str, tuple[str, list[tuple[str, str, str | None]]]] = {}
    for line in _MEASURED.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 7 and re.fullmatch(r"[0-9.]+(e-\d+)?|", cells[1]):
            family, deviation, presets, sizes, mesh, *_ = cells
            if family:
                listed = families[family] = (deviation, [])
            split = re.search(r"tensor=(\d{1,4})", mesh)
            for preset, size in zip(presets.split("` `"), sizes.split(), strict=False):
                chip = f"{float(size) / int(split[1] if split else 1):.3g}" if "=" in mesh else None
                listed[1].append((preset, size, chip) if preset != "–" else (None, None, None))
    return families
