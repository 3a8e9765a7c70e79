"""What is wrong with a block-sparse pattern, and what to try."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ringattn import (
    BlockSparse,
    Dilated,
    InvalidInput,
    Window,
    dilated_blocks,
    global_local,
    hierarchical,
    local_window,
    make_plan,
    strided_blocks,
    top_k,
)

TEXT = repr(BlockSparse(2, np.eye(3)[None].astype(bool))).split("'")[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockSparse(0, [[1]]), "BlockSparse: block=0 must be an integer >= 1"),
        (lambda: BlockSparse(2, [[1, 0], [1]]), "not a rectangular array"),
        (lambda: BlockSparse(2, [[0.5]]), "must hold bools"),
        (lambda: BlockSparse(2, [[2]]), "must hold bools"),
        (lambda: BlockSparse(2, np.ones((1, 2, 3), bool)), "expected [heads or 1, blocks, blocks]"),
        (lambda: BlockSparse(2, "eye"), "is not a table that repr printed"),
        (lambda: BlockSparse(2, "1x3x4" + TEXT[5:]), "expected [heads or 1, blocks, blocks]"),
        (lambda: BlockSparse(2, "9x9x9" + TEXT[5:]), "the 92 bytes that the shape needs"),
        (lambda: BlockSparse(2, TEXT[:-3]), "is not a table that repr printed"),
        (lambda: BlockSparse(2, [[1]]).check(3, 1), "3 tokens make 2 blocks"),
        (lambda: BlockSparse(4, np.ones((2, 1, 1), bool)).check(3, 4), "for 2 heads, but there are 4"),
        (lambda: local_window(4), "give blocks= or density="),
        (lambda: local_window(4, 1, density=0.5), "give one"),
        (lambda: local_window(4, -1), "blocks=-1 must be an integer >= 0"),
        (lambda: local_window(4, density=0), "0 < density <= 1"),
        (lambda: local_window(4, density=1.5), "0 < density <= 1"),
        (lambda: local_window(4, density=True), "0 < density <= 1"),
        (lambda: local_window(4, density="x"), "0 < density <= 1"),
        (lambda: local_window(4, density=0.5).count(range(4), range(4)), "a density needs the tokens"),
        (lambda: global_local(4, density=0.5).count(range(4), range(4)), "a density needs the tokens"),
        (lambda: hierarchical(4, density=0.5).count(range(4), range(4)), "a density needs the tokens"),
        (
            lambda: strided_blocks(4, density=0.5).visible(np.arange(4), np.arange(4), 0, 4),
            "a density needs the tokens",
        ),
        (lambda: strided_blocks(4), "give stride= or density="),
        (lambda: strided_blocks(4, 0), "stride=0 must be an integer >= 1"),
        (lambda: dilated_blocks(4, (1, -2)), "an offset=-2"),
        (lambda: dilated_blocks(4, 3), "must be a list of integers"),
        (lambda: dilated_blocks(4, (1,), density=0.5), "give one"),
        (lambda: global_local(4), "give blocks= or density="),
        (lambda: global_local(4, globals=-1, blocks=1), "globals=-1"),
        (lambda: make_plan(global_local(4, globals=3, density=0.5), tokens=24, ranks=2), "try globals=2"),
        (lambda: hierarchical(4), "give levels= or density="),
        (lambda: hierarchical(4, ((1, 2, 3),)), "must be a list of (stride, w)"),
        (lambda: hierarchical(4, ((0, 1),)), "a stride=0"),
        (lambda: hierarchical(4, ((1, -2),)), "a w=-2"),
        (lambda: top_k(4, None, np.ones((2, 2))), "give k or density"),
        (lambda: top_k(4, 1, np.ones((2, 2)), density=0.5), "give k or density"),
        (lambda: top_k(4, 0, np.ones((2, 2))), "k=0 must be an integer >= 1"),
        (lambda: top_k(4, 1, np.ones((2, 3))), "scores of shape (1, 2, 3)"),
        (lambda: top_k(4, 1, [[np.nan]]), "hold NaN"),
        (lambda: top_k(4, 1, [["a"]]), "hold dtype"),
        (lambda: top_k(4, 1, [[1], [1, 2]]), "numpy cannot read"),
        (lambda: Dilated((4, 8), (1, 2)) | local_window(4, 1), "try Dilated(..., mix='union')"),
        (lambda: Dilated((4, 8), (1, 2), mix="group", heads=2).mask(8, 3), "heads=2): there are 3"),
        (lambda: Window(3) | local_window(4, density=2), "density=2"),
    ],
)
def test_errors(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()
    assert words in str(caught.value)


def test_a_density_may_be_any_real_number() -> None:
    assert local_window(4, density=np.float32(0.5)) == local_window(4, density=0.5)
    assert repr(local_window(4, density=1)) == "local_window(4, density=1.0)"
    assert global_local(4, globals=0, density=0.1).bind(1, 8).mask(8).sum() == 32  # one block per row, at least
