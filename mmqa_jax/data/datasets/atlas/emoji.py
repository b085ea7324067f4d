"""Which OpenMoji drawings join the corpus as other pictures, and their captions.

Captions come from Unicode's character names. Single code points give some 1,450 pictures;
the rest are the joined sequences whose parts have plain names (`woman firefighter`, keycaps,
families). Flags, skin tones and OpenMoji's private code points (no names) are left out.
"""

from __future__ import annotations

import re
import unicodedata

from mmqa_jax.data.datasets.atlas import templates
from mmqa_jax.data.datasets.atlas.pictures import EMOJI_SIZE, Picture, rasterize, svg_dir


def make_emoji(*, every: int = 1) -> list[Picture]:
    """Emoji that a caption can be made for, no two with one name or one picture.

    `every` = n takes one in n of them, for a small corpus.
    """
    folder, emoji, seen = svg_dir(), [], set()
    paths = [p for p in folder.glob("*.svg") if re.fullmatch(r"[0-9A-F]+(-[0-9A-F]+)*", p.stem)]
    # Single code points first: where two drawings share a name, the plain character keeps it.
    for path in sorted(paths, key=lambda p: (p.stem.count("-"), p.stem))[::every]:
        name = emoji_name([int(point, 16) for point in path.stem.split("-")])
        if not name or name in seen:
            continue
        png = rasterize(path.read_text("utf-8"), "0 0 72 72", EMOJI_SIZE)
        title = name[0].upper() + name[1:]
        picture = Picture(path.stem.lower(), "emoji", title, title, name, png, path.stem)
        if picture.digest not in seen:
            seen.update((picture.digest, name))
            emoji.append(picture)
    return emoji


def emoji_name(points: list[int]) -> str:
    """A readable name of an emoji sequence, "" if it has none or is a flag or a skin tone."""
    if any(0x1F3FB <= p <= 0x1F3FF or 0x1F1E6 <= p <= 0x1F1FF for p in points):
        return ""
    if points[0] in (0x1F3F3, 0x1F3F4):  # white and black flag, and the flags joined from them
        return ""
    if points[-1] == 0x20E3:
        return f"keycap {_character_name(points[0])}"
    parts = [p for p in points if p not in (0xFE0F, 0x200D)]
    ending = ""
    if len(parts) > 1 and parts[-1] == 0x27A1:
        parts, ending = parts[:-1], " facing right"
    names = [_character_name(p) for p in parts]
    if not all(names):
        return ""
    known = templates.load("emoji")
    codes = [f"{p:X}" for p in parts]
    people = [known["people"].get(code) for code in codes]
    if len(parts) == 2 and people[0] and codes[1] in known["roles"]:
        return f"{people[0]} {known['roles'][codes[1]]}{ending}"
    if len(parts) == 2 and codes[1] in known["gender"]:
        return f"{names[0]}, {known['gender'][codes[1]]}{ending}"
    if len(parts) > 1 and all(people):
        return f"family of {', '.join(people[:-1])} and {names[-1]}{ending}"
    return " and ".join(names) + ending


def _character_name(point: int) -> str:
    known = templates.load("emoji")
    name = known["newer"].get(f"{point:X}") or unicodedata.name(chr(point), "").lower()
    if re.search(r"\bflags?\b", name):
        return ""
    name = re.sub(r"^black (?=(?!chess|large|medium|small|circle|square|heart)\w+ )", "", name)
    name = name.replace("-", " ").replace("cjk unified ideograph ", "ideograph ")
    name = name.removeprefix("emoji component ")
    name = re.sub(r" symbol$", " sign", name)
    proper = known["proper"]
    return " ".join(word.capitalize() if word in proper else word for word in name.split())
