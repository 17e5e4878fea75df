"""Names of weights in files of other programs, for readers without `transformers`.

Files may lack the first part of the names in memory, as GPT-2's on the hub do, or name GPT-NeoX's
head as memory does. Old files contain buffers that models compute themselves. Ranks, which have
`transformers`, follow all of its rules instead. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of an output head that is not tied to the embedding; the second is GPT-NeoX's in files."""
DERIVED = (
    r"(^|\.)rotary_emb\.\w+$",
    r"(^|\.)position_ids$",
    r"(^|\.)(self_)?(attn|attention)\.(masked_)?bias$",
)
"""Patterns of buffers in old files."""
_DERIVED = re.compile("|".join(DERIVED))


def stored_name(name: str, stored: Collection[str]) -> str:
    """Return a weight's name in files with these names; the name itself if they lack it."""
    candidates = [name, name.partition(".")[2], *(HEADS if name in HEADS else ())]
    return next((candidate for candidate in candidates if candidate in stored), name)


def stored_names(names: Iterable[str], stored: Collection[str]) -> dict[str, str]:
    """Return the names that weights have in files. Names that match no weight stand for themselves,
    unless they belong to buffers."""
    by_stored = {stored_name(name, stored): name for name in names}
    others = (name for name in stored if not _DERIVED.search(name))
    return {by_stored.get(name, name): name for name in (*by_stored, *others) if name in stored}
