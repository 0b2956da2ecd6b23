"""Write the attention of PRISM's training, in which every row of a text drafts several tokens at once.

Paper: PRISM 2602.01762 trains on unrolled draft steps; in EAGLE-3 2503.01840 they are the training-time test.
Lesson: docs/prism.md draws the mask under "Training as in decoding".

1. The first call for a layer is step 1: causal attention over whole texts. Keep its keys and values.
2. The next calls for this layer are steps 2, 3, ..: row r sees the step-1 keys of its text up to r, and its
   own keys from step 2 up to the present step, under one softmax.
3. Logits are scaled by D ** -0.5. H query heads share G key heads: query head h reads key head h // (H / G).

Shapes: B texts, S rows, D dimensions per head. Every step: q (B, S, H, D), k and v (B, S, G, D) -> (B, S, H,
D). Gradients must reach q, k and v.
"""
import torch  # noqa: F401

PLACE = "minispec.prism.unrolled_attend"
TESTS = (
    "test_prism.py::test_states_in_training_equal_states_in_drafting[step_map1-1]",
    "test_prism.py::test_states_in_training_equal_states_in_drafting[step_map3-2]",
    "test_prism.py::test_gradients_reach_the_keys_and_values_of_every_step",
)


def unrolled_attend():
    """attend(layer, q, k, v) of unrolled drafting, a function that remembers the keys and values of each
    layer's steps."""
    raise NotImplementedError
