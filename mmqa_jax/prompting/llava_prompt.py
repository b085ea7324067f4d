"""LLaVA-1.5's conversation as text and as token ids.

Originals: haotian-liu/LLaVA llava/conversation.py (`conv_vicuna_v1`), llava/mm_utils.py
(`tokenizer_image_token`). The original answers greedily with at most 1,024 new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PLACEHOLDER = "<image>"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


def question(
    text: str,
    pictures: int = 1,
    shield: Callable[[str], str] = str,
    placeholder: str = PLACEHOLDER,
) -> str:
    """A user's message: placeholders of its pictures, each on a line, then the question.

    A literal `<image>` in the question is removed, as in the original.

    Args:
      shield: of the tokenizer, for a prompt that is encoded.
      placeholder: what stands for a picture.
    """
    return f"{placeholder}\n" * pictures + shield(text.replace(PLACEHOLDER, "").strip())


def conversation(turns: Sequence[tuple[str, str | None]]) -> str:
    """The prompt of a conversation (version `vicuna_v1`).

    Args:
      turns: (user's message, assistant's answer); the last answer may be None: the one to
        generate.

    Returns:
      E.g. `SYSTEM + " USER: <image>\\nWhat is this? ASSISTANT:"`. An answer ends in `</s>`, which
      the tokenizer must read as its end-of-text token.
    """
    assert all(answer is not None for _, answer in turns[:-1]), "only the last answer may be None"
    text = f"{SYSTEM} "
    for message, answer in turns:
        text += f"USER: {message} ASSISTANT:"
        if answer is not None:
            text += f" {answer}</s>"  # no space after it, as LLaVA was trained
    return text


def prompt_ids(
    prompt: str, encode: Callable[[str], Sequence[int]], *, image_token: int, bos: int | None = 1
) -> list[int]:
    """Token ids of a prompt, one `image_token` per placeholder (see `models.llava`).

    The text between placeholders is tokenized piece by piece, each as a separate text: Vicuna's
    tokenizer puts a space before a piece that starts with a line break, as in LLaVA's training.

    Args:
      prompt: as `conversation` gives it.
      encode: text -> ids without special tokens added, e.g. a transformers tokenizer with
        `add_special_tokens=False`.
      image_token: the placeholder's id (`LlavaConfig.image_token`).
      bos: prepended once; None if the tokenizer has none.
    """
    ids = [] if bos is None else [bos]
    for number, piece in enumerate(prompt.split(PLACEHOLDER)):
        if number:
            ids.append(image_token)
        ids.extend(encode(piece))
    return ids
