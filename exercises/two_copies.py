"""Write the mask with which a CDLM student learns all blocks of an answer in one forward.

Paper: CDLM 2511.19269 trains a block-causal student; the mask is that of BD3-LM 2503.09573. Lesson:
docs/cdlm.md draws it.

The sequence is the prompt, the clean answer, and the noisy answer: the same slots, some of them masked. Each
row has the number of its block: -1 padding, 0 the prompt, then 1, 2, .. The noisy answer has the numbers of
the clean one. The prompt belongs to the clean copy.

1. A row sees all of its own block in its own copy.
2. A row sees the earlier blocks of the clean copy, and no other block of the noisy copy.
3. No row sees padding, but every row sees itself, so that no softmax is empty: see `bidirectional`.
"""
import torch  # noqa: F401

from minispec.cdlm import bidirectional  # noqa: F401

PLACE = "minispec.cdlm.two_copies"
TESTS = (
    "test_docs.py::test_masks_of_cdlm_by_drawing",
    "test_cdlm.py::test_padding_is_unseen_and_no_softmax_is_empty",
    "test_cdlm.py::test_two_copies_train_every_block_as_decoding_meets_it",
)


def two_copies(blocks, gen_length):
    """The mask, bool (n, 1, T + L, T + L), True where a row (third axis) sees a key (fourth axis). blocks (n,
    T): the block numbers of the prompt and the clean answer, whose slots are the last L = gen_length."""
    raise NotImplementedError
