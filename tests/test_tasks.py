import re

import pytest
from conftest import refused

from minispec.data import tasks


of_every_family = pytest.mark.parametrize("family", tasks.FAMILIES)


@of_every_family
def test_reference_solutions_pass_and_others_fail(family):
    some = [tasks.make(family, seed, "heldout") for seed in range(101)]
    for p, other in zip(some, some[1:]):
        assert tasks.check(p, p.answer)
        assert tasks.check(p, p.answer + "\n")
        assert not tasks.check(p, "")
        assert other.answer == p.answer or not tasks.check(p, other.answer)
        assert not tasks.check(p, p.answer + " 0")


@of_every_family
def test_seeded_and_splits_are_disjoint(family):
    a = [tasks.make(family, i, "train").prompt for i in range(300)]
    b = [tasks.make(family, i, "heldout").prompt for i in range(300)]
    assert a[:30] == [tasks.make(family, i, "train").prompt for i in range(30)]
    assert len(set(a)) > 280
    assert all(tasks.is_heldout(p) for p in b)
    assert not any(tasks.is_heldout(p) for p in a)


@of_every_family
def test_size_is_a_difficulty_knob(family):
    small, large = (
        sum(len(tasks.make(family, i, "train", n).prompt) for i in range(20)) for n in (4, 20)
    )
    assert large > 2 * small


def test_trace_is_the_program_run():
    """Run the printed program by itself; the answer and every value stated in the chain agree."""
    for seed in range(40):
        p = tasks.make("trace", seed, "heldout", 30)
        values = {n: int(v) for n, v in re.findall(r"([a-z]+)(\d)", p.prompt.split("Given")[1])}
        for name, a, op, b in re.findall(r"^ (\w+) = (\w+) ([+-]) (\w+)$", p.prompt, re.M):
            x = values[a]
            y = int(values.get(b, b))
            values[name] = (x + y if op == "+" else x - y) % 10
        assert p.answer == str(values[name])
        for n, v in re.findall(r"so ([a-z]+)(\d)", p.think):
            assert values[n] == int(v)


def test_arith_is_arithmetic():
    for seed in range(200):
        p = tasks.make("arith", seed, "heldout")
        x, op, y = re.search(r"(\d+) (plus|minus|times) (\d+)", p.prompt).groups()
        sign = {"plus": "+", "minus": "-", "times": "*"}[op]
        assert int(p.answer) == eval(f"{x} {sign} {y}")


def test_story_counts():
    for seed in range(100):
        size = 3 + seed % 8
        p = tasks.make("story", seed, "heldout", size)
        hero = re.search(r"of (\w+), who", p.think)[1]
        thing = re.search(r"follow the (\w+) of", p.think)[1]
        count = int(re.search(rf"{hero} has (\d+) {thing}", p.prompt)[1])
        events = [line[3:] for line in p.prompt.split("\n") if line.startswith(" ")]
        assert len(events) == len(set(events)) == size
        for s in events:
            n = re.search(rf"(\d+) (?:more )?(?:of the )?{thing}", s)
            if n and s.startswith(f"{hero} "):
                count += int(n[1]) * (1 if re.search("finds|buys|gets", s) else -1)
        assert p.answer == str(count)


def test_search_checker_wants_a_real_way():
    p = tasks.make("search", 3, "heldout", 10)
    path = p.answer.split()
    assert not tasks.check(p, " ".join(path[1:]))
    assert not tasks.check(p, " ".join(path[:-1]))
    assert not tasks.check(p, " ".join([path[0], path[-1]])) or len(path) == 2
    assert not tasks.check(p, "nowhere")


def test_revise_edits_are_applied():
    kinds = set()
    for seed in range(60):
        p = tasks.make("revise", seed, "heldout")
        order, text = p.prompt.split("\n", 1)
        lines = text.splitlines()
        answer = p.answer.split("\n")
        if new := re.match(r"Write (\w+) wherever it says name", order):
            assert answer == [re.sub(r"\bname\b", new[1], line) for line in lines] != lines
        elif new := re.match(r"Add this line at the end:( .*) Print the whole", order):
            assert answer == [*lines, new[1]]
        else:
            dropped = re.match(r"Leave out line (\w)", order)[1]
            assert answer == [line for line in lines if line[1] != dropped]
            assert len(answer) == len(lines) - 1
        assert p.think.split("lines ")[1].rstrip(".\n").split() == [line[1] for line in answer]
        kinds.add(order[0])
    assert kinds == {"W", "A", "L"}


@of_every_family
def test_sizes_are_checked(family):
    low, high = tasks.ALLOWED[family]
    for size in (low, high):
        p = tasks.make(family, 0, "heldout", size)
        assert tasks.check(p, p.answer)
    for size in (low - 1, high + 1):
        with refused(f"size must be {low} to {high} for '{family}', got {size}"):
            tasks.make(family, 0, "heldout", size)
