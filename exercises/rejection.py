"""Write rejection sampling: whatever the drafter proposes, the text has the target's distribution.

Paper: Leviathan et al. 2211.17192, Algorithm 1 and appendix A.1, for one chain; SpecInfer 2305.09781,
multi-step speculative sampling, for several. Lesson: docs/00-start.md does one round by hand.

1. Start at row 0 with left = p[0] in fp64, shape (V,): the distribution that the next draft is compared with.
2. For place j = 0, 1, ..: try the chains in turn, but only those that have a row j and whose first j rows are
   the accepted path.
3. The draft of row r has the coin coins[r - 1]. If coin * q(draft) < left(draft), accept it, set left = p[r]
   and go on with place j + 1. For a chain whose q is None, q is a point mass on its draft.
4. After a rejection, set left = max(left - q, 0), divided by its sum. If the sum is 0, which only rounding
   can cause, keep left.
5. If no chain has an accepted draft at place j, draw(left, coins[-1]) is the token that follows.
"""
import torch  # noqa: F401

from minispec.core.verify import draw  # noqa: F401

PLACE = "minispec.core.verify.rejection"
TESTS = (
    "test_docs.py::test_the_round_by_hand",
    "test_docs.py::test_point_masses_by_hand",
    "test_verify.py::test_identical_distributions_accept_everything",
    "test_specdiff.py::test_rules_are_lossless[rejection-2-0.7]",
    "test_specdiff.py::test_rejection_at_the_edges",
)


def rejection(chains, draft, p, coins):
    """Rejection sampling of chains that were drawn independently, of one or of several in turn.

    chains: pairs (rows, q): token j of a chain is row rows[j] and was drawn from q[j], q (k, V); q None: it
    was chosen without chance. Chains that begin alike share rows. draft: n token ids, of rows 1 .. n; p (n +
    1, V); coins (n + 1,) independent and uniform in [0, 1): coin i - 1 is for row i, the last one draws the
    token that follows. Returns (accepted rows, next token), a list of ints and an int.
    """
    raise NotImplementedError
