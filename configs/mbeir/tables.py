"""The rows on M-BEIR: one retriever over each set's own pool, and over the pool of all sets.

A row is RETRIEVER_SET or RETRIEVER_union. clip_sf is UniIR's published checkpoint; its figures,
and BLIP_FF's, are those that Pyserini 2.3.0 has of these checkpoints (castorini/pyserini at
f1e6c840, pyserini/2cr/m_beir.yaml: S@5, and S@10 of Fashion200K and FashionIQ); the paper's were
not at hand. BM25 searches the one set of texts for texts.
"""

from ml_collections import ConfigDict

from mmqa_jax.benchmarks.mbeir import OFFICIAL, SETS, official_k
from mmqa_jax.core.config import config_beside

PAPER = "mbeir"
DEPTH = 50  # Fashion's recall goes up to 50

RAW, UNION = "downloads/M-BEIR", "union"
# Retriever -> its model and where that comes from.
ENCODERS = {
    "clip_sf": (
        "weights/clip_sf",
        "mmqa convert --model=clip --source=downloads/clip_sf.pth --out=weights/clip_sf "
        "(the weights of clip_sf_large.pth, configs/mbeir/README.md)",
    ),
    "qwen3_vl_embedding": (
        "downloads/Qwen3-VL-Embedding-2B",
        "Qwen/Qwen3-VL-Embedding-2B of the Hugging Face hub",
    ),
}
# Set -> published in its own pool, in the pool of all sets: CLIP_SF's, then BLIP_FF's.
PUBLISHED = {
    "visualnews_task0": (0.4284, 0.4254, 0.2305, 0.2265),
    "mscoco_task0": (0.8084, 0.7173, 0.7955, 0.6695),
    "fashion200k_task0": (0.1803, 0.1786, 0.2612, 0.2600),
    "webqa_task1": (0.8387, 0.8342, 0.7866, 0.7796),
    "edis_task2": (0.5319, 0.5251, 0.5051, 0.4968),
    "webqa_task2": (0.7853, 0.7762, 0.7845, 0.7718),
    "visualnews_task3": (0.4261, 0.3867, 0.2290, 0.2095),
    "mscoco_task3": (0.9202, 0.9160, 0.9086, 0.8972),
    "fashion200k_task3": (0.1810, 0.1806, 0.2849, 0.2727),
    "nights_task4": (0.3175, 0.3170, 0.3189, 0.3189),
    "oven_task6": (0.4600, 0.3960, 0.4261, 0.3949),
    "infoseek_task6": (0.2723, 0.2222, 0.2354, 0.1999),
    "fashioniq_task7": (0.2455, 0.2425, 0.2944, 0.2902),
    "cirr_task7": (0.4532, 0.4384, 0.5034, 0.4827),
    "oven_task8": (0.6888, 0.6019, 0.5625, 0.5603),
    "infoseek_task8": (0.4906, 0.4435, 0.3057, 0.2623),
}
# MSCOCO has a pool for each split.
_FILES = {name: f"{name}_test" if name.startswith("mscoco") else name for name in SETS}

_rows = config_beside(__file__, "../rows.py")


def _data(pool: str) -> str:
    return f"data/mbeir/{pool}"


def _made_by() -> dict[str, str]:
    made = dict(ENCODERS.values())
    for pool in (*SETS, UNION):
        raw = f"{RAW}/cand_pool/local/mbeir_{_FILES.get(pool)}_cand_pool.jsonl"
        made[_data(pool)] = (
            f"mmqa prepare mbeir --raw={RAW if pool == UNION else raw} --out={_data(pool)}"
        )
        for name, (model, _) in ENCODERS.items():
            index = f"runs/mbeir/{name}/{pool}"
            made[index] = (
                f"mmqa embed --data={_data(pool)} --model={model} --out={index}; "
                f"mmqa index --embeddings={index} --kind=exact"
            )
    return made


def _cells(row: str, column: int, sets: tuple[str, ...], *, group: bool) -> tuple[dict, ...]:
    """Published figures of these sets; `group`: of a row that measures them all."""
    return tuple(
        {
            "table": f"Pyserini 2.3.0, {'all sets' if group else 'own pools'}",
            "row": row if group else f"{row}, {name}",
            "column": name if group else f"recall@{official_k(name)}",
            "published": PUBLISHED[name][column],
            "tolerance": 0.01,
            "scorer": OFFICIAL,
            "group": name if group else "",
        }
        for name in sets
    )


def _published(retriever: str, pool: str) -> tuple[dict, ...]:
    if retriever != "clip_sf":
        return ()
    if pool == UNION:
        return _cells("UniIR CLIP_SF", 1, SETS, group=True)
    return _cells("UniIR CLIP_SF", 0, (pool,), group=False)


ROWS = {
    "bm25_webqa_task1": _rows.ranking_row({"method": "bm25"}, DEPTH, _data("webqa_task1")),
    **{
        f"{name}_{pool}": {
            **_rows.ranking_row(
                {"method": "dense", "model": model, "index": f"runs/mbeir/{name}/{pool}"},
                DEPTH,
                _data(pool),
            ),
            "published": _published(name, pool),
        }
        for name, (model, _) in ENCODERS.items()
        for pool in (*SETS, UNION)
    },
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED = {
    "blip_ff": _cells("UniIR BLIP_FF", 2, SETS, group=False),
    "blip_ff_union": _cells("UniIR BLIP_FF", 3, SETS, group=True),
}
MODES = tuple(ROWS)


def get_config(mode: str = "bm25_webqa_task1") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="webqa",
        dataset="mbeir",
        data=ROWS[mode]["data"],
        split="test",
        made_by=_made_by(),
    )
