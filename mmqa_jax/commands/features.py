"""`mmqa features`: the regions of pictures, as the detectors of VLP, VinVL and MCAN find them."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError

SUMMARY = "find the regions of pictures by the detectors that VLP, Oscar and MCAN read."
EXAMPLE = (
    "mmqa features --model=downloads/vinvl_vg_x152c4.pth --data=pictures --out=data/regions "
    "--names=downloads/VG-SGG-dicts-vgoi6-clipped.json --export=vinvl --draw=20"
)

_CHUNK = 256
_FORMATS = "vinvl, tags"
# Flags that say how regions are found, with what they are where they are not given.
_OF_MODEL = {
    "random": None,
    "regions": None,
    "sides": None,
    "unrectified": False,
    "names": None,
    "attribute_names": None,
    "shard": None,
    "overwrite": False,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        " --out holds a record of each picture: boxes, features, classes, attributes. VLP and "
        "MCAN read it by features.root of their config; --export writes the originals' "
        "files of it. A kill loses a chunk; the same command goes on. Without --model, finished "
        "records are exported and drawn."
    )
    parser.add_argument(
        "--model",
        help="the detector: its published file (Detectron's .pkl, maskrcnn-benchmark's .pth, "
        "detectron2's .pkl or .pth), a folder of `mmqa convert --model=detector`, or with --random "
        "vlp_x101, vinvl or bua",
    )
    parser.add_argument(
        "--data",
        help="folder of `mmqa prepare`, or of pictures (a picture's id is its path without the "
        "ending)",
    )
    parser.add_argument("--out", required=True, help="folder of the records")
    parser.add_argument(
        "--random",
        type=int,
        metavar="SEED",
        help="random weights of vlp_x101, vinvl or bua, which prove only the plumbing",
    )
    parser.add_argument(
        "--of",
        choices=("all", "sources", "questions"),
        default="all",
        help="whose pictures of a prepared corpus (all)",
    )
    rules = parser.add_argument_group("how regions are found")
    rules.add_argument(
        "--regions", metavar="N|MIN,MAX", help="of a picture (vlp_x101: 100; others: 10,100)"
    )
    rules.add_argument(
        "--sides",
        metavar="SHORT,LONG",
        help="of resized pictures: the short side, and what the long one has at most (vlp_x101: "
        "800,1333; others: 600,1000)",
    )
    rules.add_argument(
        "--unrectified",
        action="store_true",
        help="vlp_x101: features in front of fc6's ReLU, as WebQA's VLP reads them",
    )
    rules.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the convolutions; boxes are float32 (float32)",
    )
    rules.add_argument(
        "--precision",
        choices=("float16", "float32"),
        default="float16",
        help="of features and logits in the records; float16 halves the disk, with relative errors "
        "of at most 5e-4 (float16)",
    )
    words = parser.add_argument_group("words")
    words.add_argument(
        "--names", help="the detector's class names: a line each, or VinVL's JSON of labels"
    )
    words.add_argument("--attribute_names", help="names of its attributes, likewise")
    words.add_argument(
        "--attributes",
        type=float,
        metavar="P",
        help="put an attribute of this probability or more before its class, in exports and "
        "drawings (bottom-up attention's demo: 0.1)",
    )
    flags.add_devices(parser, "pictures")
    flags.add_shard(parser, "pictures", _CHUNK)
    parser.add_argument(
        "--max_broken_pictures",
        type=int,
        metavar="N",
        help="broken pictures to tolerate (default: 1 %% of them, at least 10)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the records of another job in --out"
    )
    results = parser.add_argument_group("of finished records")
    results.add_argument(
        "--export",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="FORMAT,...",
        help=f"write OUT/exports/FORMAT: {_FORMATS} (mmqa_jax/models/detection/README.md)",
    )
    results.add_argument(
        "--draw",
        type=int,
        default=0,
        metavar="N",
        help="draw the boxes of the first N pictures of --data into OUT/drawn, with a page",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Finds the regions, or the missing ones; then exports and draws."""
    _check(arguments)
    from mmqa_jax.data.region_records import check_exports

    check_exports(arguments.export)
    result: dict[str, Any] = {}
    if arguments.model is not None:
        result = _detected(arguments)
        if "waiting_for_other_shards" in result:
            return result
    from mmqa_jax.runs.verbs.region_features import draw_regions, export_all, open_pictures

    out, least = Path(arguments.out), arguments.attributes
    if arguments.export:
        result["exports"] = export_all(out, arguments.export, least)
    if arguments.draw:
        pictures = open_pictures(Path(arguments.data), arguments.of)
        result["drawn"] = draw_regions(out, pictures, arguments.draw, least)
    return result


def _detected(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the records; see write_regions."""
    shard = flags.start(arguments)
    from mmqa_jax.inference.region_detector import DetectorChoice, open_detector
    from mmqa_jax.runs.verbs.region_features import RegionOptions, open_pictures, write_regions

    choice = flags.fill(
        DetectorChoice,
        arguments,
        regions=_numbers("regions", arguments.regions),
        sides=_numbers("sides", arguments.sides),
    )
    pictures = open_pictures(Path(arguments.data), arguments.of)
    detector = open_detector(choice, **flags.serving_options(arguments))
    options = flags.fill(RegionOptions, arguments, shard=shard)
    random = arguments.random is not None
    return write_regions(pictures, detector, Path(arguments.out), options, random=random)


def _check(arguments: argparse.Namespace) -> None:
    """UserError for flags that are missing, or contradict each other."""
    if arguments.engine != "process":
        raise UserError(f"--engine={arguments.engine}: is not for this verb; use --shard=I/N.")
    if arguments.model is None:
        if not (arguments.export or arguments.draw):
            raise UserError(
                "--model: is missing; name a detector, or give --export or --draw for the finished "
                "records in --out."
            )
        for name, default in _OF_MODEL.items():
            if getattr(arguments, name) != default:
                raise UserError(f"--{name}: is used with --model alone; give that, too.")
    if arguments.data is None and (arguments.model is not None or arguments.draw):
        raise UserError("--data: is missing; give a folder of `mmqa prepare`, or of pictures.")
    if arguments.draw < 0:
        raise UserError(f"--draw={arguments.draw}: a number of pictures was expected; give one.")
    least = arguments.attributes
    if least is not None and not 0 <= least <= 1:
        raise UserError(f"--attributes={least}: a probability from 0 to 1 was expected; give one.")
    if least is not None and not (arguments.draw or arguments.export):
        raise UserError("--attributes: changes --export and --draw alone; give one of them.")


def _numbers(flag: str, text: str | None) -> tuple[int, int] | None:
    """The two numbers of a flag; of `--regions` one stands for both."""
    if text is None:
        return None
    parts = text.split(",")
    if flag == "regions" and len(parts) == 1:
        parts *= 2
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        expected = "N or MIN,MAX" if flag == "regions" else "SHORT,LONG"
        raise UserError(f"--{flag}={text}: {expected} was expected, whole numbers; correct it.")
    first, second = map(int, parts)
    if flag == "sides" and not 1 <= first <= second:
        raise UserError(f"--sides={text}: a short side from 1, and a long one not below it.")
    return first, second
