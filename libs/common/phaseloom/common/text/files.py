"""Read the tokenizer of a model directory as `transformers` reads it.

A tokenizer is spread over up to eight files, and a class of `transformers` may overrule some of
them. `AutoTokenizer` therefore decides, and the result is plain data that needs only the library
`tokenizers`. Code in the directory is never run.

Ranks call `read_tokenizer`. The gateway's processes that encode text run this module as a program
(`python -m …files DIRECTORY`). That costs 1.5 s of processor time, and 70 MB of memory that is free
again afterwards.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import msgspec

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILES = (TOKENIZER_FILE, "vocab.json", "tokenizer.model")
"""Files of which a tokenizer has at least one. `transformers` can convert the others to the
first: `vocab.json` together with `merges.txt`, `tokenizer.model` if sentencepiece is installed."""
HOW_TO_CONVERT = (
    f"write {TOKENIZER_FILE} with AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained("
    "DIRECTORY) of transformers, where sentencepiece is installed, and register the directory again"
)
DEFAULT_TEMPLATE = "default"
MAX_FILE_BYTES = 64 * 2**20
_MAX_MEMORY_BYTES = 4 * 2**30
"""Memory limit of the program. A malformed file can need any amount."""


class TokenizerFacts(msgspec.Struct, frozen=True):
    tokenizer: str
    """The content of a `tokenizer.json` with all facts of other files in it, without truncation and
    padding."""
    special_tokens: dict[str, str]
    """Values of `bos_token`, `eos_token` and their like for chat templates."""
    chat_templates: dict[str, str]
    """Chat templates by name."""
    cleans_up: bool
    """Whether decoding removes spaces before punctuation."""
    splits_special: bool
    """Whether the text of a special token is encoded as ordinary text."""


class NotConvertibleError(ValueError):
    """A tokenizer has no `tokenizer.json`, and `transformers` cannot make one here."""


def read_tokenizer(directory: Path) -> TokenizerFacts:
    """Raises: NotConvertibleError: see there. Exception: the files are missing or invalid;
    `transformers` raises errors of many types."""
    from transformers import AutoTokenizer, TokenizersBackend

    vocabularies = [name for name in VOCABULARY_FILES if (directory / name).is_file()]
    if not vocabularies:
        raise FileNotFoundError(f"{directory / TOKENIZER_FILE} is missing")
    for name in (*vocabularies, "merges.txt"):
        path = directory / name
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes > MAX_FILE_BYTES:
            raise ValueError(f"{name} has {num_bytes} bytes, more than {MAX_FILE_BYTES}")
    problem = "it has a class of its own"
    factory: Any = AutoTokenizer
    backend: Any = TokenizersBackend
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        read: Any = factory.from_pretrained(directory, **options)
    except Exception as error:
        read, problem = None, " ".join(str(error).split())
    if not isinstance(read, TokenizersBackend):
        if TOKENIZER_FILE not in vocabularies:
            names = ", ".join(vocabularies)
            raise NotConvertibleError(
                f"{TOKENIZER_FILE} is missing, and {names} cannot be converted: {problem}"
            )
        # The model has a class of its own, in code that we do not run or without this library.
        read = backend.from_pretrained(directory, **options)
    tokenizer = read.backend_tokenizer
    # Both are left over from training. `transformers` resets them for each call.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    templates = read.chat_template or {}
    is_bpe = type(tokenizer.model).__name__ == "BPE"
    force = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return TokenizerFacts(
        tokenizer.to_str(),
        read.special_tokens_map,
        {DEFAULT_TEMPLATE: templates} if isinstance(templates, str) else dict(templates),
        bool(read.clean_up_tokenization_spaces) and (not is_bpe or getattr(read, force)),
        bool(read.split_special_tokens),
    )


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not need it
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    try:
        facts = read_tokenizer(Path(sys.argv[1]))
    except Exception as problem:  # the parent reports it
        sys.exit(f"{type(problem).__name__}: {problem}")
    sys.stdout.buffer.write(msgspec.json.encode(facts))
