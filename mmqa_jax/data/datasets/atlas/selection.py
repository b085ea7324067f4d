"""Splits by country, and the choice of the benchmark's questions among the possible ones."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

from mmqa_jax.data.datasets.atlas.drafts import SPLITS, Draft, Subject, random_stream
from mmqa_jax.data.datasets.atlas.factbook import Country

# Questions of the full benchmark per split, and their shares.
TOTALS = {"train": 8600, "val": 620, "test": 1540}
TEXT_SHARE, TWO_HOP_SHARE = 0.45, 0.28  # of all questions; of the text questions
# Of the picture questions; color takes what the others leave, 30 % or more.
PICTURE_SHARES = {"Others": 0.08, "number": 0.09, "choose": 0.25, "YesNo": 0.28}
TEST_SHARE, VAL_SHARE = 0.2, 0.085  # of the countries
# One template per color: these take only every sixth turn.
_RARE, _RARE_TURN = "emoji_any", 6
# Countries with fewer snippets (uninhabited islands) stay in the train split.
_FEW_SNIPPETS = 25


def split_groups(
    flags: list[Subject],
    emoji: list[Subject],
    countries: list[Country],
    snippet_counts: dict[str, int],
    rng: np.random.Generator,
) -> dict[str, str]:
    """Group (country code or picture key) -> split.

    Countries whose flags are pixel-identical (Romania and Chad) share a split; flags without
    a country follow an identical country's flag, or train.
    """
    by_digest = collections.defaultdict(list)
    for flag in flags:
        by_digest[flag.picture.digest].append(flag.group)
    known = {country.code for country in countries}
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
        split.setdefault(flag.group, "train")
    names = rng.choice(["train", "val", "test"], size=len(emoji), p=[0.72, 0.06, 0.22])
    split.update({e.group: str(name) for e, name in zip(emoji, names, strict=True)})
    return split


def select(drafts: Iterable[Draft], split: dict[str, str], scale: float, seed: int) -> list[Draft]:
    """The benchmark's questions: TOTALS x `scale`, templates in turn, no question twice.

    Yes/no questions join in pairs of one template, one yes and one no, so that the template
    does not reveal the answer. A category with too few questions leaves its share to color.
    """
    pools: dict[tuple[str, str], dict[str, list[Draft]]] = {}
    for draft in drafts:
        homes = {split[g] for g in draft.group}
        if len(homes) == 1:
            draft.split = homes.pop()
            kind = "two_hop" if draft.hops == 2 else draft.category
            pools.setdefault((draft.split, kind), {}).setdefault(draft.template, []).append(draft)
    chosen: list[Draft] = []
    seen: set[str] = set()
    for name in SPLITS:
        total = round(TOTALS[name] * scale)
        text = round(TEXT_SHARE * total)
        two_hop = round(TWO_HOP_SHARE * text)
        quotas = {"two_hop": two_hop, "text": text - two_hop}
        quotas |= {kind: round(share * (total - text)) for kind, share in PICTURE_SHARES.items()}
        end = len(chosen) + total
        for kind in (*quotas, "color"):
            count = quotas.get(kind, end - len(chosen))
            rng = random_stream(seed, 1, f"{name} {kind}")
            chosen += _take(pools.get((name, kind), {}), count, seen, rng, pairs=kind == "YesNo")
    return chosen


def _take(
    templates: dict[str, list[Draft]],
    count: int,
    seen: set[str],
    rng: np.random.Generator,
    *,
    pairs: bool,
) -> list[Draft]:
    """`count` drafts, one (or one yes/no pair) of each template in turn."""
    queues = []
    for template in sorted(templates):
        drafts = [templates[template][i] for i in rng.permutation(len(templates[template]))]
        if pairs:
            yes, no = ([d for d in drafts if d.keywords == word] for word in ("yes", "no"))
            queues.append(list(zip(yes, no, strict=False)))
        else:
            queues.append([(draft,) for draft in drafts])
    queues = [queues[i] for i in rng.permutation(len(queues))]
    taken: list[Draft] = []
    turn = 0
    while queues and len(taken) < count:
        turn += 1
        only_rare = all(map(_is_rare, queues))
        for queue in queues:
            if _is_rare(queue) and turn % _RARE_TURN and not only_rare:
                continue
            while queue and len(taken) < count:
                unit = queue.pop()
                if seen.isdisjoint(draft.question for draft in unit):
                    seen.update(draft.question for draft in unit)
                    taken.extend(unit)
                    break
        queues = [queue for queue in queues if queue]
    return taken


def _is_rare(queue: list[tuple[Draft, ...]]) -> bool:
    return bool(queue) and queue[0][0].template.startswith(_RARE)
