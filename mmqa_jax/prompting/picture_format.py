"""How the prompts of a vision-language model hold pictures: what differs between LLaVA, OneVision,
models of tiles (SmolVLM), Gemma 3, Gemma 4 and Qwen-VL.

The engine's backend asks for nothing else. A model is added with a class here, its config
(`models.llava.config.PictureConfig`, whose `picture_kind` chooses the class) and its tower
(`decoding.image_tower`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures import decode, resize
from mmqa_jax.models.llava.config import (
    ORIGINAL_IMAGE_TOKEN,
    LlavaConfig,
    PictureConfig,
)
from mmqa_jax.models.llava.tiles import CanvasTiles, Cut
from mmqa_jax.models.mistral3.network import Mistral3Config
from mmqa_jax.models.onevision.network import OnevisionConfig, TiledPicture, best_resolution
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.prompting import llava_prompt, text_tokenizer
from mmqa_jax.prompting.backends import Message, Picture
from mmqa_jax.prompting.backends.thinking import Thinking
from mmqa_jax.prompting.llava_prompt import PLACEHOLDER, question

if TYPE_CHECKING:
    from PIL import Image


class Shown(NamedTuple):
    """A picture in a prompt, and whether it is the only one there."""

    picture: Picture
    alone: bool


def shown_pictures(pictures: Sequence[Picture]) -> list[Shown]:
    """All pictures of a prompt."""
    return [Shown(picture, len(pictures) == 1) for picture in pictures]


class PictureFormat(Protocol):
    """How a model's prompts hold pictures.

    Attributes:
      chat_format: of conversations, with one `placeholder` for each picture; None: it has none.
      placeholder: what stands for a picture in a prompt.
      video: the same of a video, which is refused in a text to be continued; None: the model knows
        none.
    """

    chat_format: text_tokenizer.ChatFormat | None
    placeholder: str
    video: str | None

    def with_places(self, text: str, pictures: int) -> str:
        """The prompt of a text to be continued, whose pictures are marked by `<image>` or come
        first; of a text without pictures `<image>` is a part, as all other marks are."""

    def encode(self, text: str, pictures: Sequence[Shown] = ()) -> list[int]:
        """Token ids of a text with its pictures, one of the model's `image_token` for each of what
        `read_all` gives; raises PictureError."""

    def tokens(self, shown_picture: Shown) -> int:
        """Tokens of a picture, by its header, without what `encode` writes around it; raises
        PictureError."""

    def places(self, shown_picture: Shown) -> int:
        """How many placeholders a picture has, by its header; raises PictureError."""

    def read_all(self, shown_picture: Shown) -> list[np.ndarray | TiledPicture]:
        """The pixels that the model takes, for each placeholder of a picture; raises
        PictureError."""


class _OnePlace(abc.ABC):
    """A picture has one placeholder."""

    def places(self, shown_picture: Shown) -> int:
        """See PictureFormat."""
        return 1

    def read_all(self, shown_picture: Shown) -> list[np.ndarray | TiledPicture]:
        """See PictureFormat."""
        return [self.read(shown_picture)]

    @abc.abstractmethod
    def read(self, shown_picture: Shown) -> np.ndarray | TiledPicture:
        """The pixels that the model takes; raises PictureError."""


class LlavaFormat(_OnePlace):
    """LLaVA's: `<image>` for each picture.

    The original's conversation is Vicuna's, whatever its tokenizer's template says; that of a
    checkpoint in transformers' layout is its template's, and Vicuna's for a LLaVA-1.5 without one.
    """

    placeholder, video = PLACEHOLDER, None

    def __init__(self, config: LlavaConfig, tokenizer: text_tokenizer.TextTokenizer):
        self.chat_format = _conversation(config, tokenizer)
        self._config, self._tokenizer = config, tokenizer
        self._has_token = tokenizer.encode_plain(PLACEHOLDER) == [config.image_token]

    def with_places(self, text: str, pictures: int) -> str:
        """See PictureFormat."""
        return _with_places(text, pictures, PLACEHOLDER, f"{PLACEHOLDER}\n", self._tokenizer.shield)

    def encode(self, text: str, pictures: Sequence[Shown] = ()) -> list[int]:
        """See PictureFormat."""
        bos = self._tokenizer.bos
        if bos is not None and text.startswith(self._tokenizer.decode([bos])):
            bos = None  # the template has written it
        if self._has_token:
            tokens = self._tokenizer.encode_plain(text)
            return tokens if bos is None else [bos, *tokens]
        return llava_prompt.prompt_ids(
            text, self._tokenizer.encode_plain, image_token=self._config.image_token, bos=bos
        )

    def tokens(self, shown_picture: Shown) -> int:
        """Returns the tokens of a picture, the same for every one."""
        return self._config.features

    def read(self, shown_picture: Shown) -> np.ndarray:
        """See PictureFormat."""
        picture = shown_picture.picture
        image = self._image(picture)
        vision = self._config.vision
        if self._config.resize == "pad":
            color = resize.pad_color(vision.pixel_mean)
            return resize.llava_pixels(image, vision.image_size, picture.name, color)
        return resize.to_pixels(image, vision.image_size, self._config.resize, picture.name)

    def _image(self, picture: Picture) -> Image.Image:
        return decode.decode(picture.data, picture.name)


class MarkedFormat(LlavaFormat):
    """Gemma 3's: the token before a picture is its place in a text, and is written around it.

    Original: transformers models/gemma3/processing_gemma3.py, without crops. Pictures are turned as
    EXIF says, as by transformers' load_image.
    """

    def __init__(self, config: LlavaConfig, tokenizer: text_tokenizer.TextTokenizer):
        self._config, self._tokenizer = config, tokenizer
        tokens = (config.before_token, config.image_token, config.after_token)
        before, picture, after = (tokenizer.decode([token]) for token in tokens)
        for text, token in zip((before, picture, after), tokens, strict=True):
            _check_placeholder(text, token, tokenizer)
        self.placeholder, self._place = before, f"\n\n{before}{picture}{after}\n\n"
        template = tokenizer.template
        self.chat_format = template and PictureTemplate(template, before)

    def with_places(self, text: str, pictures: int) -> str:
        """See PictureFormat."""
        place = self.placeholder
        return _with_places(text, pictures, place, f"{place}\n", self._tokenizer.shield)

    def encode(self, text: str, pictures: Sequence[Shown] = ()) -> list[int]:
        """See PictureFormat."""
        return _with_bos(self._tokenizer, text.replace(self.placeholder, self._place))

    def _image(self, picture: Picture) -> Image.Image:
        return decode.decode_upright(picture.data, picture.name)


class FirstFormat(LlavaFormat):
    """PaliGemma's: pictures in front of the first token, and a line's end behind the words.

    It is asked once. Original: transformers models/paligemma/processing_paligemma.py. Pictures are
    turned as EXIF says, as by transformers' load_image.
    """

    before_answer = ""

    def __init__(self, config: LlavaConfig, tokenizer: text_tokenizer.TextTokenizer):
        self._config, self._tokenizer, self.chat_format = config, tokenizer, self
        self.placeholder = tokenizer.decode([config.image_token])
        _check_placeholder(self.placeholder, config.image_token, tokenizer)

    def with_places(self, text: str, pictures: int) -> str:
        """See PictureFormat."""
        if pictures:
            text = text.replace(PLACEHOLDER, "")
        bos = self._tokenizer.bos
        first = "" if bos is None else self._tokenizer.decode([bos])
        return f"{self.placeholder * pictures}{first}{self._tokenizer.shield(text)}\n"

    def render(
        self, request_id: Hashable, messages: Sequence[Message], thinking: Thinking | None = None
    ) -> str:
        """The prompt of one message; see ChatFormat."""
        if [message.role for message in messages] != ["user"]:
            roles = ", ".join(message.role for message in messages)
            raise UserError(
                f"request {request_id!r}: its messages are {roles or 'none'}, expected one of the "
                "user: a PaliGemma is asked once; put all into it."
            )
        return self.with_places(messages[0].text, len(messages[0].pictures))

    def encode(self, text: str, pictures: Sequence[Shown] = ()) -> list[int]:
        """See PictureFormat."""
        return self._tokenizer.encode_plain(text)

    def _image(self, picture: Picture) -> Image.Image:
        return decode.decode_upright(picture.data, picture.name)


class OnevisionFormat(LlavaFormat):
    """LLaVA-OneVision's: as LLaVA's, with a picture in tiles where it is alone.

    Pictures are turned as EXIF says, as by transformers' load_image; LLaVA's original does not.
    """

    def __init__(self, config: OnevisionConfig, tokenizer: text_tokenizer.TextTokenizer):
        super().__init__(config, tokenizer)
        self._config: OnevisionConfig = config
        self.video = tokenizer.decode([config.video_token]) or None

    def tokens(self, shown_picture: Shown) -> int:
        """See PictureFormat."""
        return self._config.picture_tokens(self.shape(shown_picture))

    def shape(self, shown_picture: Shown) -> tuple[int, int, int, int]:
        """`TiledPicture.shape` of a picture, by its header; raises PictureError."""
        width, height = decode.upright_size_of(
            shown_picture.picture.data, shown_picture.picture.name
        )
        return self._tiles((height, width), shown_picture), height, width, 3

    def read(self, shown_picture: Shown) -> TiledPicture:
        """See PictureFormat."""
        name, side = shown_picture.picture.name, self._config.vision.image_size
        image = decode.decode_upright(shown_picture.picture.data, name)
        size = image.height, image.width
        if shown_picture.alone:
            canvas = best_resolution(size, self._config.resolutions)
            return TiledPicture(resize.tiled_pixels(image, canvas, side, name), size)
        whole = resize.llava_pixels(
            image, side, name, resize.pad_color(self._config.vision.pixel_mean)
        )
        return TiledPicture(whole[None], size)

    def _tiles(self, size: tuple[int, int], shown_picture: Shown) -> int:
        if not shown_picture.alone:
            return 1
        rows, columns = self._config.tiles.grid(best_resolution(size, self._config.resolutions))
        return 1 + rows * columns


class _Marked(abc.ABC):
    """That of a model whose placeholder is a token of its own; pictures are turned as EXIF says, as
    by transformers' load_image."""

    video, _after = None, "\n"

    def __init__(self, config: LlavaConfig, tokenizer: text_tokenizer.TextTokenizer):
        self._config, self._tokenizer = config, tokenizer
        self.placeholder = tokenizer.decode([config.image_token])
        _check_placeholder(self.placeholder, config.image_token, tokenizer)
        template = tokenizer.template
        self.chat_format = template and PictureTemplate(template, self.placeholder)

    def with_places(self, text: str, pictures: int) -> str:
        """See PictureFormat."""
        place = self.placeholder
        return _with_places(text, pictures, place, f"{place}{self._after}", self._tokenizer.shield)

    def encode(self, text: str, pictures: Sequence[Shown] = ()) -> list[int]:
        """See PictureFormat."""
        first, *pieces = text.split(self.placeholder)
        for shown_picture, piece in zip(pictures, pieces, strict=True):
            first += self._written(shown_picture) + piece
        return _with_bos(self._tokenizer, first)

    @abc.abstractmethod
    def _written(self, shown_picture: Shown) -> str:
        """What stands for a picture, with its placeholders."""


class TilesFormat(_Marked):
    """That of a model whose pictures are tiles, each with a placeholder of its own."""

    def __init__(self, config: LlavaConfig, tokenizer: text_tokenizer.TextTokenizer):
        super().__init__(config, tokenizer)
        self._piece = self.placeholder
        if isinstance(config.split, CanvasTiles):  # whose templates have another token
            self.placeholder = "<|image|>"
            template = tokenizer.template
            self.chat_format = template and PictureTemplate(template, self.placeholder)

    def _written(self, shown_picture: Shown) -> str:
        cut = self._cut(shown_picture)
        return self._config.split.written(self._piece, cut.rows, cut.columns)

    def _cut(self, shown_picture: Shown) -> Cut:
        picture = shown_picture.picture
        return self._config.cut(*decode.upright_size_of(picture.data, picture.name))

    def places(self, shown_picture: Shown) -> int:
        """See PictureFormat."""
        return len(self._cut(shown_picture).sizes)

    def tokens(self, shown_picture: Shown) -> int:
        """See PictureFormat."""
        sizes = self._cut(shown_picture).sizes
        return sum(self._config.picture_tokens((high, wide, 3)) for wide, high in sizes)

    def read_all(self, shown_picture: Shown) -> list[np.ndarray | TiledPicture]:
        """See PictureFormat."""
        name, split = shown_picture.picture.name, self._config.split
        image = decode.decode_upright(shown_picture.picture.data, name)
        return resize.cut_tiles(
            image,
            self._config.cut(*image.size),
            split.resample,
            whole_of_canvas=split.whole_of_canvas,
            name=name,
        )


class SizedFormat(_OnePlace, _Marked):
    """Gemma 4's: a picture of any size, between two tokens, within a number of tokens."""

    def _written(self, shown_picture: Shown) -> str:
        around = (self._config.before_token, self._config.after_token)
        return self.placeholder.join(self._tokenizer.decode([token]) for token in around)

    def tokens(self, shown_picture: Shown) -> int:
        """See PictureFormat."""
        size = decode.upright_size_of(shown_picture.picture.data, shown_picture.picture.name)
        width, height = self._size(*size)
        return self._config.picture_tokens((height, width, 3))

    def read(self, shown_picture: Shown) -> np.ndarray:
        """See PictureFormat."""
        image = decode.decode_upright(shown_picture.picture.data, shown_picture.picture.name)
        return resize.unit_pixels(image, self._size(*image.size), shown_picture.picture.name)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a picture as the model takes it."""
        units = self._config.units
        return resize.budget_size(width, height, self._config.budget, units.patch, units.merge)


class BreaksFormat(SizedFormat):
    """Mistral 3's: `[IMG]` for each picture, whose tokens include those behind its rows."""

    _after = ""

    def __init__(self, config: Mistral3Config, tokenizer: text_tokenizer.TextTokenizer):
        super().__init__(config, tokenizer)
        for token in (config.break_token, config.end_token):
            _check_placeholder(tokenizer.decode([token]), token, tokenizer)

    def _written(self, shown_picture: Shown) -> str:
        return self.placeholder

    def _size(self, width: int, height: int) -> tuple[int, int]:
        longest = self._config.vision.image_size
        return resize.within_size(width, height, longest, self._config.units.unit)


def _with_bos(tokenizer: text_tokenizer.TextTokenizer, text: str) -> list[int]:
    """Token ids of a text, which begins with the tokenizer's first token: a template may have
    written that."""
    bos, tokens = tokenizer.bos, tokenizer.encode_plain(text)
    written = bos is not None and text.startswith(tokenizer.decode([bos]))
    return tokens if bos is None or written else [bos, *tokens]


def _check_placeholder(
    placeholder: str, token: int, tokenizer: text_tokenizer.TextTokenizer
) -> None:
    if tokenizer.encode_plain(placeholder) != [token]:
        raise UserError(
            "--tokenizer, or the config's key tokenizer: it has no token of its own for pictures "
            f"(id {token}); name the model's own."
        )


def _conversation(
    config: LlavaConfig, tokenizer: text_tokenizer.TextTokenizer
) -> text_tokenizer.ChatFormat | None:
    if config.image_token != ORIGINAL_IMAGE_TOKEN and tokenizer.template is not None:
        return PictureTemplate(tokenizer.template)
    is_known = config.image_token == ORIGINAL_IMAGE_TOKEN or config.llama.family == "llama"
    return text_tokenizer.VicunaV1(tokenizer.shield) if is_known else None


def _with_places(
    text: str, pictures: int, place: str, first: str, shield: Callable[[str], str]
) -> str:
    """A shielded text with `place` for each `<image>`, or with `first` for each picture before."""
    pieces = text.split(PLACEHOLDER) if pictures else [text]
    front = first * pictures if len(pieces) == 1 else ""
    return front + place.join(map(shield, pieces))


class QwenFormat(_OnePlace):
    """Qwen-VL's: `<|vision_start|><|image_pad|><|vision_end|>` for each picture.

    Its chat template writes that itself. Pictures are turned as EXIF says, as by transformers'
    load_image.
    """

    def __init__(self, config: QwenVLConfig, tokenizer: text_tokenizer.TextTokenizer):
        vision = config.vision
        self.chat_format: text_tokenizer.ChatFormat | None = tokenizer.template
        self._tokenizer = tokenizer
        self._sizes = resize.PictureSizes(
            vision.unit, vision.min_pixels, vision.max_pixels, vision.switches.grown
        )
        self.placeholder, self.video, before, after = (
            tokenizer.decode([token])
            for token in (
                *(config.image_token, config.video_token),
                *(config.vision_start_token, config.vision_end_token),
            )
        )
        self._place = f"{before}{self.placeholder}{after}"
        _check_placeholder(self.placeholder, config.image_token, tokenizer)

    def with_places(self, text: str, pictures: int) -> str:
        """See PictureFormat."""
        return _with_places(text, pictures, self._place, self._place, self._tokenizer.shield)

    def encode(self, text: str, pictures: Sequence[Shown] = ()) -> list[int]:
        """See PictureFormat."""
        return self._tokenizer.encode_plain(text)

    def tokens(self, shown_picture: Shown) -> int:
        """One for each unit of the picture as it is resized."""
        height, width, _ = self.shape(shown_picture.picture)
        return width * height // self._sizes.unit**2

    def shape(self, picture: Picture) -> tuple[int, int, int]:
        """[H, W, 3] of what `read` gives, by the picture's header; raises PictureError."""
        size = decode.upright_size_of(picture.data, picture.name)
        width, height = resize.qwen_size(*size, self._sizes, picture.name)
        return height, width, 3

    def read(self, shown_picture: Shown) -> np.ndarray:
        """See PictureFormat."""
        picture = shown_picture.picture
        image = decode.decode_upright(picture.data, picture.name)
        return resize.qwen_pixels(image, self._sizes, picture.name)


def picture_format(config: PictureConfig, tokenizer: text_tokenizer.TextTokenizer) -> PictureFormat:
    """Finds the picture format of a model."""
    kinds = {
        "square": LlavaFormat,
        "first": FirstFormat,
        "marked": MarkedFormat,
        "tiles": TilesFormat,
        "pieces": TilesFormat,
        "anyres": OnevisionFormat,
        "units": QwenFormat,
        "budget": SizedFormat,
        "rows": BreaksFormat,
    }
    return kinds[config.picture_kind](config, tokenizer)


# Chat templates of models that see: how they take pictures is found by trying.
#
# A processor's template takes a message as parts, and writes a placeholder for each picture. A
# tokenizer's own (that of the language model that a LLaVA was made of) takes words alone; the
# placeholders are then written into the words, in front, as LLaVA was trained.


_WORD = "flag"  # any that a template does not write itself


class PictureTemplate:
    """A ChatFormat (see text_tokenizer) of a model's own template, with `placeholder` for a
    picture."""

    before_answer = ""

    def __init__(self, template: text_tokenizer.ChatTemplate, placeholder: str = PLACEHOLDER):
        self._template, self._placeholder = template, placeholder
        self._takes_parts = _takes_parts(template, placeholder)

    def render(
        self, request_id: Hashable, messages: Sequence[Message], thinking: Thinking | None = None
    ) -> str:
        """The prompt; see ChatFormat."""
        fields = self._template.in_parts if self._takes_parts else self._in_words
        return self._template.written(request_id, map(fields, messages), thinking)

    def _in_words(self, message: Message) -> text_tokenizer.Fields:
        count = len(message.pictures)
        if not count:
            return self._template.fields(message)
        content = question(message.text, count, self._template.shield, self._placeholder)
        return {"role": message.role, "content": content}


def _takes_parts(template: text_tokenizer.ChatTemplate, placeholder: str) -> bool:
    """Whether a template shows both parts of a message, the picture and the words."""
    parts = [{"type": "image"}, {"type": "text", "text": _WORD}]
    try:
        text = template.written("a trial", [{"role": "user", "content": parts}])
    except UserError:
        return False
    return text.count(placeholder) == 1 and _WORD in text
