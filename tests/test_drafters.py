import pytest
from conftest import toy_model, whole

from minispec.core.drafters import NGram, SmallLM
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import Sampling


def test_ngram_proposes_what_followed_last_time():
    drafter = NGram(max_n=3, min_n=2)
    propose = lambda r, limit=4: drafter.propose([r], [limit])[0][0]
    r = Request([1, 2, 3, 4, 5, 9, 2, 3])
    assert propose(r) == [4, 5, 9, 2]  # the only earlier 2, 3
    assert propose(r, 2) == [4, 5]
    assert propose(r, 0) == []
    r.tokens += [7, 8, 2, 3]
    assert propose(r) == [7, 8, 2, 3]  # now the most recent one
    r.tokens += [4]
    assert propose(r) == [5, 9, 2, 3]  # the longest match, 2 3 4, before the most recent one
    assert propose(Request([1, 2, 3])) == []
    assert propose(Request([1])) == []
    assert propose(Request([6, 6, 6])) == [6]  # a match that overlaps the end
    drafter.release(r)
    assert r not in drafter.index


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ours, theirs", [(40, 64), (64, 40)])
def test_only_tokens_of_both_models_are_drafted(ours, theirs, temperature):
    target = toy_model(vocab=theirs)
    small = toy_model(vocab=ours, seed=1)
    drafter = whole(SmallLM(small, target))
    drafted = []
    propose = drafter.propose
    drafter.propose = lambda *args: [drafted.extend(d[0]) or d for d in propose(*args)]
    ask = lambda: Request([theirs - 1, 2, 3], 40, Sampling(temperature))
    (got,) = Engine(target, lambda e: SyncScheduler(e, drafter, 4), 1).generate([ask()])
    assert len(drafted) > 40 > max(drafted)
    # The target says its other tokens all the same.
    (want,) = Engine(target, SyncScheduler, 1).generate([ask()])
    assert got.token_ids == want.token_ids
