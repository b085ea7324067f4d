"""`mmqa features`: the regions that a detector finds in every picture, as records and exports."""

import dataclasses
import hashlib
import html
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmqa_jax.core.chunks import WHOLE, Shard
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, check_out
from mmqa_jax.core.progress import Progress
from mmqa_jax.data import region_records
from mmqa_jax.data.batches.vqa import image_id
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.pictures.decode import BrokenPictures, decode_upright, read_picture_file
from mmqa_jax.data.records.corpus_records import MANIFEST as CORPUS
from mmqa_jax.data.records.corpus_records import materials_beside, write_notice
from mmqa_jax.data.records.record_shards import write_records
from mmqa_jax.data.region_records import check_exports, check_held, export_folder, export_regions
from mmqa_jax.data.regions import RegionError
from mmqa_jax.data.schema import Material
from mmqa_jax.inference.region_detector import RegionDetector, RegionEncoder, facts_of

CHUNK = 256  # pictures of a file, the most that a kill loses
Of = Literal["all", "sources", "questions"]

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


class NamedPictures(NamedTuple):
    """Pictures to look at by their ids, their names, and how a name's encoded bytes are read.

    `read` raises PictureError or UserError where there are none; `fingerprint` is of all of them,
    `materials` are what they are taken from.
    """

    names: Mapping[str, str]
    read: Callable[[str], bytes]
    fingerprint: str
    materials: tuple[Material, ...] = ()


def open_pictures(data: Path, of: Of = "all") -> NamedPictures:
    """The pictures of a corpus of `mmqa prepare`, of its sources or questions, or of a folder.

    A source's picture has the source's id, a question's its number in COCO or its name, a file's
    its path below the folder without the ending.
    """
    if (data / CORPUS).is_file():
        return _of_corpus(data, of)
    if not data.is_dir():
        raise UserError(
            f"--data={data}: no such folder; give one of `mmqa prepare`, or of pictures."
        )
    names, digest = {}, hashlib.sha256()
    for path in sorted(data.rglob("*")):
        inside = path.relative_to(data)
        hidden = any(part.startswith(".") for part in inside.parts)
        if hidden or path.suffix.lower() not in _ENDINGS or not path.is_file():
            continue
        _add(names, inside.with_suffix("").as_posix(), inside.as_posix())
        status = path.stat()
        digest.update(f"{inside}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    if not names:
        raise UserError(
            f"--data={data}: neither a corpus of `mmqa prepare` nor a folder with pictures "
            f"({' '.join(_ENDINGS)}); name another folder."
        )

    def read(name: str) -> bytes:
        return read_picture_file(data / name)

    return NamedPictures(names, read, digest.hexdigest(), materials_beside(data))


def _of_corpus(data: Path, of: Of) -> NamedPictures:
    corpus = open_corpus(data)
    names: dict[str, str] = {}
    if of in ("all", "sources"):
        for source in corpus.sources:
            if source.image is not None:
                _add(names, source.id, source.image)
    if of in ("all", "questions"):
        for question in corpus.questions():
            if question.image is not None:
                _add(names, str(image_id(question)), question.image)
    if not names:
        raise UserError(
            f"--data={data}: its {'sources and questions' if of == 'all' else of} have no "
            "pictures; put them into the raw folder and run `mmqa prepare` again."
        )

    def read(name: str) -> bytes:
        encoded = corpus.read_picture(name)
        if encoded is None:
            raise PictureError(f"{name}: is not in the corpus.")
        return encoded

    return NamedPictures(names, read, corpus.fingerprint, corpus.materials)


def _add(names: dict[str, str], picture: str, name: str) -> None:
    if names.setdefault(picture, name) != name:
        raise UserError(
            f"--data: pictures {names[picture]} and {name} have the same id {picture!r}; rename "
            "one, or take those of a corpus's sources or questions alone (--of)."
        )


@dataclasses.dataclass(frozen=True)
class RegionOptions:
    """How records are written."""

    precision: region_records.Precision = "float16"  # of their large arrays
    # names, attribute_names: files of the detector's names; None: not known.
    names: str | None = None
    attribute_names: str | None = None
    chunk: int = CHUNK  # pictures of a file
    shard: Shard = WHOLE  # this process's share of the files
    overwrite: bool = False  # replace records of another job
    max_broken_pictures: int | None = None  # None: see BrokenPictures
    # export, attributes: formats and least probability, checked before the job takes hours.
    export: Sequence[str] = ()
    attributes: float | None = None


def write_regions(
    pictures: NamedPictures,
    detector: RegionDetector,
    out: Path,
    options: RegionOptions,
    *,
    random: bool = False,
) -> dict[str, Any]:
    """Writes the regions of all pictures; continues an interrupted job. `random`: so are the
    weights.

    Returns what `--json` prints, `waiting_for_other_shards` where other processes have not finished
    theirs; RunError for too many broken pictures.
    """
    check_out(out, folder=True)
    if options.chunk < 1:
        raise UserError(f"--chunk={options.chunk}: at least 1 was expected; give more.")
    config = detector.config

    def names(path: str | None, kind: Literal["class", "attribute"], count: int) -> tuple:
        return () if not path else region_records.read_names(Path(path), kind, max(count - 1, 0))

    facts = dataclasses.replace(
        facts_of(detector, options.precision),
        random=random,
        class_names=names(options.names, "class", config.classes),
        attribute_names=names(options.attribute_names, "attribute", config.attributes),
    )
    check_held(options.export, facts, [*pictures.names], options.attributes)
    if options.attributes is not None:
        region_records.check_words(facts, options.attributes)
    total = len(pictures.names)
    broken = BrokenPictures(total, options.max_broken_pictures)
    print(f"features: {detector.serving}", file=sys.stderr)
    if random:
        print("features: random weights, which prove only the plumbing", file=sys.stderr)
    starts = range(0, total, options.chunk)[options.shard.index :: options.shard.count]
    total_here = sum(min(options.chunk, total - start) for start in starts)
    with Progress("Regions", total_here, "pictures") as progress:
        complete = write_records(
            out,
            region_records.REGIONS,
            pictures.names,
            RegionEncoder(pictures.read, detector, options.precision, progress.advance),
            about={"facts": dataclasses.asdict(facts)},
            broken=broken,
            facts=[dataclasses.asdict(facts), pictures.fingerprint],
            shard=options.chunk,
            part=options.shard,
            advance=progress.advance,
            overwrite=options.overwrite,
        )
    for name, reason in broken.reasons.items():
        print(f"features: broken picture {name}: {reason}", file=sys.stderr)
    outcome = {
        "pictures": total_here,
        "broken_pictures": broken.count,
        "detector": facts.detector,
        "random": random,
        **detector.serving.to_json(),
    }
    if not complete:
        print(f"This process's part is in {out}; other processes have not finished theirs.")
        return {**outcome, "waiting_for_other_shards": True}
    write_notice(out, pictures.materials)
    print(f"Regions of {len(region_records.RegionRecords(out)):,} pictures: {out}")
    return outcome


def export_all(out: Path, kinds: Sequence[str], least: float | None = None) -> dict[str, str]:
    """Writes finished records in the formats of originals, below `out`; kind -> folder."""
    check_exports(kinds)
    records = region_records.RegionRecords(out)
    written = {}
    for kind in kinds:
        folder = export_folder(out, kind)
        with Progress(f"Export {kind}", len(records), "pictures") as progress:
            export_regions(records, kind, folder, least=least, advance=progress.advance)
        write_notice(folder, materials_beside(out))
        written[kind] = str(folder)
        print(f"{kind}: {folder}")
    return written


# Pictures with the boxes of their regions, and a page that shows them: for a person to look at.


PAGE = "index.html"

_LARGEST = 1000  # side of a drawn picture in pixels
_BOXES = 15  # of a picture, the most certain; all of them hide it
_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


def draw_regions(out: Path, pictures: NamedPictures, count: int, least: float | None = None) -> str:
    """Draws the first `count` pictures that the records in `out` have; returns the page.

    OUT/drawn gets a PNG each and PAGE; `least`: see `region_words`.
    """
    records, folder = region_records.RegionRecords(out), out / "drawn"
    if least is not None:
        region_records.check_words(records.facts, least)
    folder.mkdir(parents=True, exist_ok=True)
    pages: list[tuple[str, str, list[str]]] = []
    for picture in records.pictures:
        if len(pages) == count:
            break
        if picture not in pictures.names:
            continue
        name = pictures.names[picture]
        try:
            image = decode_upright(pictures.read(name), name)
            regions = records.read(picture)
        except (PictureError, RegionError):
            continue
        titles = region_titles(regions, records.facts, least)
        file = f"{len(pages):04d}.png"
        with atomic_write(folder / file, "wb") as opened:
            opened.write(_png(drawn(image, regions, titles)))
        pages.append((picture, file, titles))
    with atomic_write(folder / PAGE) as opened:
        opened.write(_page(records.facts, pages, pictures.materials))
    print(f"{len(pages)} pictures drawn: {folder / PAGE}")
    return str(folder / PAGE)


def region_titles(
    regions: region_records.DetectedRegions,
    facts: region_records.RegionFacts,
    least: float | None = None,
) -> list[str]:
    """`dog 0.93` for each region; without names the class's number."""
    if facts.class_names:
        words = region_records.region_words(regions, facts, least)
    else:
        words = [f"class {label + 1}" for label in regions.named]
    return [f"{word} {score:.2f}" for word, score in zip(words, regions.scores, strict=True)]


def drawn(
    image: Image.Image, regions: region_records.DetectedRegions, titles: Sequence[str]
) -> Image.Image:
    """The RGB picture with the boxes of its most certain regions; small ones are enlarged."""
    scale = min(_LARGEST / max(image.size), 8.0)
    image = image.resize([max(1, round(side * scale)) for side in image.size])
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=14)
    best = np.argsort(-regions.scores, kind="stable")[:_BOXES]
    for n in reversed(best):  # the most certain on top
        left, top, right, bottom = (regions.boxes[n] * scale).tolist()
        color = _COLORS[n % len(_COLORS)]
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=color, width=2)
        place = left + 2, max(0.0, top - 16)
        draw.rectangle(draw.textbbox(place, titles[n], font=font), fill=color)
        draw.text(place, titles[n], fill="white", font=font)
    return image


def _png(image: Image.Image) -> bytes:
    made = io.BytesIO()
    image.save(made, "png")
    return made.getvalue()


def _page(
    facts: region_records.RegionFacts,
    drawn: Sequence[tuple[str, str, list[str]]],
    materials: Sequence[Material],
) -> str:
    random = " with random weights, which find nothing" if facts.random else ""
    figures = "\n".join(
        f'<figure><img src="{file}" alt=""><figcaption><b>{html.escape(picture)}</b>: '
        f"{len(titles)} regions: {html.escape(', '.join(titles))}</figcaption></figure>"
        for picture, file, titles in drawn
    )
    credits = "\n".join(f"<p>{html.escape(str(material))}</p>" for material in materials)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Regions</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<style>body{font:15px sans-serif;margin:1em}figure{display:inline-block;"
        "vertical-align:top;width:min(480px,100%);margin:8px 0}img{width:100%}"
        "figcaption{font-size:12px;max-height:9em;overflow:auto}</style>\n"
        f"<h1>Regions of {html.escape(facts.detector)}{random}</h1>\n"
        f"<p>Of each picture the {_BOXES} most certain are drawn.</p>\n{figures}\n"
        f"{credits}\n</html>\n"
    )
