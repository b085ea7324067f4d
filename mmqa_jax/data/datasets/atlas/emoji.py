"""Which OpenMoji drawings join the corpus as other pictures, and how their captions read.

Captions come from Unicode's character names. Single code points give some 1,450 pictures;
the rest are the joined sequences whose parts have plain names (`woman firefighter`, keycaps,
families). Flags, skin tones and OpenMoji's private code points (no names) are left out.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

from mmqa_jax.data.datasets.atlas.pictures import EMOJI_SIZE, Picture, decode, rasterise, svg_dir

# Names of characters newer than Unicode 14, which Python 3.11's unicodedata does not know:
# written out so that every Python builds the same corpus.
_NEWER = {
    0x1F6D8: "landslide", 0x1F6DC: "wireless", 0x1FA75: "light blue heart",
    0x1FA76: "grey heart", 0x1FA77: "pink heart", 0x1FA87: "maracas", 0x1FA88: "flute",
    0x1FA89: "harp", 0x1FA8A: "trombone", 0x1FA8E: "treasure chest", 0x1FA8F: "shovel",
    0x1FAAD: "folding hand fan", 0x1FAAE: "hair pick", 0x1FAAF: "khanda", 0x1FABB: "hyacinth",
    0x1FABC: "jellyfish", 0x1FABD: "wing", 0x1FABE: "leafless tree", 0x1FABF: "goose",
    0x1FAC6: "fingerprint", 0x1FAC8: "hairy creature", 0x1FACD: "orca", 0x1FACE: "moose",
    0x1FACF: "donkey", 0x1FADA: "ginger root", 0x1FADB: "pea pod", 0x1FADC: "root vegetable",
    0x1FADF: "splatter", 0x1FAE8: "shaking face", 0x1FAE9: "face with bags under eyes",
    0x1FAEA: "distorted face", 0x1FAEF: "fight cloud", 0x1FAF7: "leftwards pushing hand",
    0x1FAF8: "rightwards pushing hand",
}  # fmt: skip
# person + sign = profession, Unicode's own short names (CLDR).
_ROLES = {
    0x1F33E: "farmer", 0x1F373: "cook", 0x1F37C: "feeding a baby", 0x1F393: "student",
    0x1F3A4: "singer", 0x1F3A8: "artist", 0x1F3EB: "teacher", 0x1F3ED: "factory worker",
    0x1F4BB: "technologist", 0x1F4BC: "office worker", 0x1F527: "mechanic",
    0x1F52C: "scientist", 0x1F680: "astronaut", 0x1F692: "firefighter",
    0x2695: "health worker", 0x2696: "judge", 0x2708: "pilot",
    0x1F9AF: "with a white cane", 0x1F9BC: "in a motorized wheelchair",
    0x1F9BD: "in a manual wheelchair", 0x1F9B0: "with red hair", 0x1F9B1: "with curly hair",
    0x1F9B2: "without hair", 0x1F9B3: "with white hair", 0x1F384: "as Santa Claus",
    0x1FA70: "ballet dancer",
}  # fmt: skip
_PEOPLE = {0x1F468: "man", 0x1F469: "woman", 0x1F9D1: "adult", 0x1F466: "boy", 0x1F467: "girl",
           0x1F9D2: "child"}  # fmt: skip
_GENDER = {0x2640: "woman", 0x2642: "man"}
_PROPER = {"japan", "japanese", "tokyo", "fuji", "christmas", "european", "latin", "american",
           "asia", "australia", "europe", "africa", "americas", "jupiter", "saturn",
           "israel"}  # fmt: skip


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
        png = rasterise(path.read_text("utf-8"), "0 0 72 72", EMOJI_SIZE)
        digest = hashlib.sha256(decode(png).tobytes()).hexdigest()
        if digest in seen:
            continue
        seen.update((digest, name))
        title = name[0].upper() + name[1:]
        key = path.stem.lower()
        emoji.append(Picture(key, "emoji", title, title, name, png, path.stem, digest, frozenset()))
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
    if len(parts) == 1:
        name = names[0]
    elif parts[0] in _PEOPLE and len(parts) == 2 and parts[1] in _ROLES:
        name = f"{_PEOPLE[parts[0]]} {_ROLES[parts[1]]}"
    elif len(parts) == 2 and parts[1] in _GENDER:
        name = f"{names[0]}, {_GENDER[parts[1]]}"
    elif all(p in _PEOPLE for p in parts):
        name = "family of " + ", ".join(_PEOPLE[p] for p in parts[:-1]) + " and " + names[-1]
    else:
        name = " and ".join(names)
    return name + ending


def _character_name(point: int) -> str:
    name = _NEWER.get(point) or unicodedata.name(chr(point), "").lower()
    if re.search(r"\bflags?\b", name):
        return ""
    name = re.sub(r"^black (?=(?!chess|large|medium|small|circle|square|heart)\w+ )", "", name)
    name = name.replace("-", " ").replace("cjk unified ideograph ", "ideograph ")
    name = name.removeprefix("emoji component ")
    name = re.sub(r" (symbol|sign)$", " sign", name)
    return " ".join(word.capitalize() if word in _PROPER else word for word in name.split())
