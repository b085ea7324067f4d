"""Splits by country, and which of the possible questions join the benchmark."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import Draft
from mmqa_jax.data.datasets.atlas.factbook import Country
from mmqa_jax.data.datasets.atlas.pictures import Picture

# Questions of the full benchmark per split, and their shares.
TOTALS = {"train": 8600, "val": 620, "test": 1540}
TEXT_SHARE, TWO_HOP_SHARE = 0.45, 0.28  # of all questions; of the text questions
PICTURE_SHARES = {
    "color": 0.26, "YesNo": 0.28, "choose": 0.25, "number": 0.09, "Others": 0.08, "shape": 0.04,
}  # fmt: skip
TEST_SHARE, VAL_SHARE = 0.2, 0.085  # of the countries
# One template per color makes these many; they take a turn in so many.
_RARE, _RARE_TURN = "emoji_any", 6
# Countries with fewer snippets (uninhabited islands) stay in the train split.
_FEW_SNIPPETS = 25


def split_groups(
    countries: list[Country],
    flags: list[Picture],
    emoji: list[Picture],
    snippet_counts: dict[str, int],
    rng: np.random.Generator,
) -> dict[str, str]:
    """Country code or picture key -> split.

    Countries whose flags are pixel-identical (Romania and Chad) share a split; flags without
    a country follow an identical country's flag, or train.
    """
    by_digest = collections.defaultdict(list)
    codes = {c.iso: c.code for c in countries}
    for flag in flags:
        by_digest[flag.digest].append(codes.get(flag.key, flag.key))
    known = set(codes.values())
    groups = [members for members in by_digest.values() if known & set(members)]
    split: dict[str, str] = {}
    wanted = {"test": round(TEST_SHARE * len(countries)), "val": round(VAL_SHARE * len(countries))}
    for index in rng.permutation(len(groups)):
        members = groups[index]
        size = len(known & set(members))
        name = "train"
        if all(snippet_counts.get(m, 0) >= _FEW_SNIPPETS for m in members if m in known):
            name = next((s for s in ("test", "val") if wanted[s] >= size), "train")
        if name != "train":
            wanted[name] -= size
        split.update(dict.fromkeys(members, name))
    for flag in flags:
        split.setdefault(codes.get(flag.key, flag.key), "train")
    names = rng.choice(["train", "val", "test"], size=len(emoji), p=[0.72, 0.06, 0.22])
    split.update({picture.key: str(name) for picture, name in zip(emoji, names, strict=True)})
    return split


def select(
    drafts: Iterable[Draft], split: dict[str, str], scale: float, rng: np.random.Generator
) -> list[Draft]:
    """The benchmark's questions: TOTALS x `scale`, templates in turn, no question twice.

    Yes/no questions join in pairs of one template, one yes and one no, so that the answer
    tells nothing. A category with too few questions gives its places to color questions.
    """
    pools: dict[tuple[str, str], dict[str, list[Draft]]] = {}
    for draft in drafts:
        homes = {split[g] for g in draft.group}
        if len(homes) != 1:
            continue
        draft.split = homes.pop()
        kind = "two_hop" if draft.hops == 2 else draft.category
        pools.setdefault((draft.split, kind), {}).setdefault(draft.template, []).append(draft)
    chosen: list[Draft] = []
    asked: set[str] = set()
    for name, total in TOTALS.items():
        total = round(total * scale)
        text = round(TEXT_SHARE * total)
        quotas = {"two_hop": round(TWO_HOP_SHARE * text)}
        quotas["text"] = text - quotas["two_hop"]
        # Color comes last: it takes the places that the others leave empty.
        for kind in ("shape", "Others", "number", "choose", "YesNo", "color"):
            quotas[kind] = round(PICTURE_SHARES[kind] * (total - text))
        left = 0
        for kind, quota in quotas.items():
            want = quota + (left if kind == "color" else 0)
            taken = _take(pools.get((name, kind), {}), want, asked, rng, pairs=kind == "YesNo")
            left += quota - len(taken)
            chosen.extend(taken)
    return chosen


def _take(
    templates: dict[str, list[Draft]],
    count: int,
    asked: set[str],
    rng: np.random.Generator,
    *,
    pairs: bool,
) -> list[Draft]:
    """`count` drafts, one (or one yes/no pair) of each template in turn."""
    queues = []
    for template in sorted(templates):
        drafts = [templates[template][i] for i in rng.permutation(len(templates[template]))]
        if pairs:
            yes = [d for d in drafts if d.keywords == "yes"]
            no = [d for d in drafts if d.keywords == "no"]
            queues.append([list(pair) for pair in zip(yes, no, strict=False)])
        else:
            queues.append([[draft] for draft in drafts])
    queues = [queues[i] for i in rng.permutation(len(queues))]
    taken: list[Draft] = []
    turn = 0
    while queues and len(taken) < count:
        turn += 1
        only_rare = all(_is_rare(queue) for queue in queues)
        for queue in queues:
            if _is_rare(queue) and turn % _RARE_TURN and not only_rare:
                continue
            while queue and len(taken) < count:
                unit = queue.pop()
                if not asked & {draft.question for draft in unit}:
                    asked.update(draft.question for draft in unit)
                    taken.extend(unit)
                    break
        queues = [queue for queue in queues if queue]
    return taken


def _is_rare(queue: list[list[Draft]]) -> bool:
    return bool(queue) and queue[0][0].template.startswith(_RARE)
