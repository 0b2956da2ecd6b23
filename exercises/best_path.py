"""Write SpecDiff-2's self-selection: of several chains, the one with the most expected accepted drafts.

Paper: SpecDiff-2 2511.00606, Eq. 7. Lesson: docs/specdiff.md, "K chains".

The chains are merged to a tree of n drafts. Row i = 1 .. n has the token draft[i - 1] and hangs from row
parents[i - 1] < i; row 0 is the last committed token. p[i] is the target's distribution of the token that
follows row i. The target accepts the drafts up to row i with probability

    reach(i) = reach(parent) * p[parent][token of i]        reach(0) = 1

The score of a path is the sum of reach over its rows, without row 0.
"""
PLACE = "minispec.specdiff.best_path"
TESTS = (
    "test_specdiff.py::test_selection_by_hand",
    "test_specdiff.py::test_selection_is_the_best_of_all_paths",
    "test_specdiff.py::test_rules_are_lossless[selection-2-0.7]",
)


def best_path(draft, parents, p):
    """The rows of the path with the largest score: a list of ints, from the child of row 0 to the end of the
    path. draft: n token ids; parents: n rows; p (n + 1, V)."""
    raise NotImplementedError
