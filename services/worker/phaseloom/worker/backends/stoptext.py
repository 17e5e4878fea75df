"""The texts of a deployment's tokens, in which stop strings are recognized.

They come from the deployment's `token_texts` or from a registered model's tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.text.codec import TextCodec
from phaseloom.common.text.files import (
    HOW_TO_CONVERT,
    VOCABULARY_FILES,
    NotConvertibleError,
    read_tokenizer,
)
from phaseloom.common.text.parts import Decoder, TextOfTokens


def text_decoder(spec: ModelSpec) -> tuple[Decoder, list[str]]:
    """Return the decoder of the model's tokens, and the texts of special tokens.

    Raises: CallerError: FAILED_PRECONDITION: the texts are unknown, or cannot be read here.
            ResourceError: DATA_LOSS: the tokenizer's files cannot be read.
    """
    if spec.token_texts:
        return TextOfTokens(spec.token_texts), []
    names = [] if spec.pinned is None else [file.name for file in spec.pinned.files]
    if spec.pinned is None or not {*VOCABULARY_FILES}.intersection(names):
        raise CallerError(
            "stop_strings cannot be used: the model has no token texts",
            code=Code.FAILED_PRECONDITION,
            field="args.sampling.stop_strings",
            remedy="declare the deployment with model.token_texts, or use stop_token_ids",
        )
    try:
        codec = TextCodec(read_tokenizer(Path(spec.pinned.path)))
    except NotConvertibleError as error:
        raise CallerError(
            f"stop_strings cannot be used: {error}",
            code=Code.FAILED_PRECONDITION,
            field="args.sampling.stop_strings",
            remedy=f"{HOW_TO_CONVERT}, or use stop_token_ids",
        ) from error
    except Exception as error:  # `transformers` and `tokenizers` raise errors of many types
        raise ResourceError(
            f"the tokenizer of the registered model in {spec.pinned.path} cannot be read: "
            f"{error!r}",
            code=Code.DATA_LOSS,
            field="model.registered",
            remedy="restore its files, or register the directory under another name",
        ) from error
    return codec, [*codec.special_tokens.values()]
