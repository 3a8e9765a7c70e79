"""Pack documents of any length into sequences of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInput
from ..text import shown
from .loss import NO_LABEL


class pack(Iterator[dict[str, Tensor]]):
    """Iterates over batches of one sequence, which is packed from whole documents.

    documents: texts, paths of text files or lists of token ids, in any iterable; `itertools.cycle(...)` for many
        epochs. Each is encoded once, when a batch needs it. Ranks that share sequences must be given the same ones.
    tokens: the length of a batch. It cuts its last document, whose rest begins the next batch as a document of its own.
        Tokens at the end that do not fill a batch are left out.
    encode: makes the token ids of a document, as `tokenizer.encode` does. Default: the bytes of a text.

    A batch has `input_ids`, `labels` and `position_ids`, int64 [1, tokens] on `device`. Positions restart at each
    document, as `shard_batch`, `parallelize` and transformers expect. The first token of a document is no label.

    `state_dict` and `load_state_dict`, which torch.distributed.checkpoint calls, keep the place in the documents.
    """

    def __init__(
        self, documents: Iterable[Any], tokens: int, encode: Callable[[Any], Any] = lambda document: document,
        *, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if isinstance(documents, str) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidInput(
                f"pack takes an iterable of documents and the tokens of a batch, an integer >= 1, got "
                f"{shown(documents)}, {shown(tokens)}; try pack([text], 8192)"
            )
        self.documents, self.tokens, self.encode, self.device = iter(documents), tokens, encode, device
        #: The documents that are used up, the tokens used of the next one, and its other tokens.
        self.done, self.taken, self._rest = 0, 0, np.empty(0, np.int64)

    def __next__(self) -> dict[str, Tensor]:
        parts: list[np.ndarray[Any, Any]] = []
        while (missing := self.tokens - sum(map(len, parts))) > 0:
            if not len(self._rest):
                self._rest = self._read(next(self.documents))[self.taken :]
            parts.append(self._rest[:missing])
            self.taken, self._rest = self.taken + len(parts[-1]), self._rest[missing:]
            if not len(self._rest):
                self.done, self.taken = self.done + 1, 0
        ids, positions = map(torch.from_numpy, map(np.concatenate, (parts, [np.arange(len(part)) for part in parts])))
        batch = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, NO_LABEL), "position_ids": positions}
        return {name: x[None].to(self.device) for name, x in batch.items()}

    def _read(self, document: Any) -> np.ndarray[Any, Any]:
        """The token ids of a document. Raises InvalidInput for other things."""
        ids = self.encode(document.read_text(errors="replace") if isinstance(document, Path) else document)
        found = np.frombuffer(ids.encode(), np.uint8) if isinstance(ids, str) else np.asarray(ids)
        if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
            raise InvalidInput(
                f"document {self.done} must be a text or a list of token ids, got {shown(ids)}; try tokenizer.encode"
            )
        return found.astype(np.int64)

    def state_dict(self) -> dict[str, int]:
        """The place in the documents."""
        return {"done": self.done, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place, before the first batch; the documents before it are read again, but not encoded."""
        if self.done or self.taken:
            raise InvalidInput("documents have been read already; load the state before the first batch")
        self.done, self.taken = state["done"], state["taken"]
        next(islice(self.documents, self.done, self.done), None)
