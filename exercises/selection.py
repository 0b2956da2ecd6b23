"""Write SpecGen's selection, a method of SpecGen: the cached positions that the next drafts read.

Paper: SpecGen 2512.01278, PillarAttn. Lesson: docs/specgen.md, "The idea" and "Look ahead".

1. The budget is b = self.budget(r.n_cached) of the r.n_cached cached positions. If that is all of them, the
   drafts read everything: return SpecGenState().
2. The newest positions, recent = min(b, accepted + 2), are read in any case.
3. self.select == "pillar": of the older positions, select those with the largest keys.scores, in each layer
   and KV head. "ahead": the same with look_ahead(scores, memory); memory is r.state.memory, or None if there
   is no r.state.
4. "window": no scores. Select the first positions instead, up to N_SINKS: recent grows to
   max(recent, b - N_SINKS), and the first b - recent positions are selected.

Shapes: L layers, G KV heads. keys.scores (L, G, T): take the first r.n_cached positions. In the state,
selected (L, G, b - recent), in any order, and memory, the scores (L, G, r.n_cached) that were ranked.
"""
import torch  # noqa: F401

from minispec.specgen import N_SINKS, SpecGenState, look_ahead  # noqa: F401

PLACE = "minispec.specgen.SpecGen._select"
TESTS = (
    "test_specgen.py::test_selection_is_topk_of_the_scores_per_layer_and_head",
    "test_specgen.py::test_the_end_of_the_prompt_selects_for_the_first_round[512]",
    "test_specgen.py::test_a_window_is_the_first_and_the_newest_positions",
    "test_specgen.py::test_output_never_depends_on_the_selection[window-1-0.02]",
    "test_specgen.py::test_output_never_depends_on_the_selection[ahead-4-1.0]",
)


def _select(self, r, keys, accepted):
    """The SpecGenState (selected, recent, memory) of the next round of request r. keys: the FullKeys of the
    verification; accepted: how many of its drafts were accepted. self.engine.cache.k is (L, G, slots, D)."""
    raise NotImplementedError
