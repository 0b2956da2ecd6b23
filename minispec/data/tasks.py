"""The workloads: five families of procedural reasoning problems with a checker. (Prompt files: prompts.py.)

    problem = make("trace", seed=7, split="heldout", size=40)
    problem.prompt, problem.think, problem.answer      # text; `think` is one correct chain of thought
    check(problem, text)                               # whether the text of an answer solves it

The families differ in the regularities that a drafter can use:

| family | problem | size counts | drafting behaviour |
|---|---|---|---|
| trace  | run a program, restating each line with looked-up values | lines | long-range, sparse retrieval |
| arith  | column addition, subtraction, multiplication by a digit | digits | rigid form, computed digits |
| story  | word problem with distractors | events | prose, copying with few computed numbers |
| search | find a way through a tree of rooms, with dead ends | rooms | high entropy: any order is right |
| revise | fill in, add to or cut a text or code, and print all of it | lines | n-gram friendly copying |

A step of a chain needs one look-up, one single-digit operation or one carry, so a small model can learn it.
Splits are disjoint: prompts with hash 0 modulo 8 are held out, the others are for training.
"""
import random
import re
import zlib
from dataclasses import dataclass, field

NAMES = """
ant ape arm ash axe bag ball band bank barn bat bean bear bed bee bell belt bird boat bolt bone book boot bow
bowl box bread brick broom brush bud bulb bull bun bus bush cage cake calf camp can cap car card cart case cat
cave chain chair chalk chest chin clam claw clay clip clock cloth cloud club coal coat cod coin comb cone cook
cord cork corn crab crane crow crown cube cup curb dam deck deer desk dice dish dock doll dome door dove drum
duck dust ear egg elk elm eye fan farm fawn fern fig film fin fire fish fist flag flame flax flea flute foam
fog foil fork fort fox frog fruit fur gate gear gem goat gold goose grape grass gull gum hall ham hare harp
hat hawk hay heel hen herb hill hive hoe hog hook horn horse hose ice ink iris iron ivy jam jar jaw jet jug
kelp key kite knee knot lace lake lamb lamp lark leaf lens lid lily lime line lion lip loaf lock log loom
maple map mask mast mat maze melon mill mint mist moat mole moon moss moth mud mug mule nail neck nest net
newt node noon nose note nut oak oar oat oil olive onion orb owl ox pail palm pan pea peach pear pearl pen
perch pie pig pike pin pine pipe plum pond pony pool post pot prism pump quail queen quilt quiz rail rain rake
ram rat reed reef rice ring road robe rock rod roof root rope rose rug rye sack sage sail salt sand scarf seal
seed shed sheep shell ship shirt shoe silk silo skate sled sloth snail snow soap sock sofa soil soup spade
spoon spur star stem stone stool stork straw suit sun swan sword tack tail tank tape tar tea tent tile tin
toad tooth torch tower toy train tray tree trout truck tub tulip tuna tusk twig urn vase veal veil vest vine
wagon wall wand wasp wave wax web well whale wheat wheel whip wick wig wind wing wire wolf wood wool worm wren
yak yam yard yarn yew yolk zebra zinc
""".split()
PEOPLE = """Mia Tom Ana Ben Eva Max Ida Leo Amy Sam Zoe Dan
Kim Ned Uma Raj Lia Jon Fay Gus Ivy Hal Meg Ron""".split()
ITEMS = """shells books coins apples stamps cards pens marbles
stones tickets beads nuts plums cups eggs buttons""".split()
TRACE_MAX = 210             # lines of the longest program: prompt and chain have about 9,900 tokens
# Sizes in training, and allowed sizes: lists are lettered, so they have 25 lines at most.
SIZES = {"trace": (6, 30), "arith": (2, 8), "story": (3, 10), "search": (5, 14), "revise": (3, 10)}
ALLOWED = {"trace": (1, TRACE_MAX), "arith": (1, 25), "story": (1, 25), "search": (2, 60), "revise": (2, 24)}
FAMILIES = tuple(SIZES)
LONGEST_PROMPT = 160        # tokens; every family has problems that fit, see `fitting`


def lines_for(tokens):
    """Lines of a `trace` program whose prompt and chain have at least `tokens` tokens; a line has 44."""
    return min(int(tokens / 43) + 2, TRACE_MAX)


@dataclass
class Problem:
    family: str
    prompt: str
    think: str = ""           # a correct chain of thought; "" when unknown
    answer: str = ""          # "" when unknown
    facts: dict = field(default_factory=dict)   # for the checker, besides the answer


def is_heldout(prompt):
    """Whether no training reads this prompt. It may end with its newline or not."""
    return zlib.crc32((prompt.rstrip("\n") + "\n").encode("utf-8", "replace")) % 8 == 0


def make(family, seed, split="train", size=None):
    """The problem of this family, seed and split ("train" or "heldout"). size None: drawn from the sizes in
    training. ValueError names the allowed sizes."""
    low, high = ALLOWED[family]
    if size is not None and not low <= size <= high:
        raise ValueError(f"size must be {low} to {high} for '{family}', got {size}")
    rng = random.Random(f"{family}/{split}/{seed}/{size}")
    while True:
        n = rng.randint(*SIZES[family]) if size is None else size
        problem = Problem(family, *GENERATORS[family](rng, n))
        if is_heldout(problem.prompt) == (split == "heldout"):
            return problem


def fitting(tokenizer, family, seed, split, length):
    """A problem whose solution fits `length` answer slots: (problem, prompt ids, answer ids (L,) padded with
    ends of text). Sizes are drawn from 3 or less to the largest in training, smaller until a problem fits."""
    rng = random.Random(f"{family}/{split}/{seed}/fitting")
    low, high = SIZES[family]
    low = min(low, 3)
    while True:
        size = rng.randint(low, high)
        problem = make(family, rng.randrange(1 << 40), split, size)
        prompt = tokenizer.prompt_ids(problem.prompt)
        answer = tokenizer.response_ids(problem)
        if len(prompt) <= LONGEST_PROMPT and len(answer) <= length:
            return problem, prompt, answer + answer[-1:] * (length - len(answer))
        high = max(size - 1, low)


def check(problem, text):
    """Whether `text`, the part of an answer after the answer mark, solves the problem."""
    if problem.family != "search":
        return text.strip() == problem.answer.strip()
    path = text.split()
    if not path or path[0] != problem.facts["start"] or path[-1] != problem.facts["goal"]:
        return False
    edges = problem.facts["edges"]
    return all(b in edges.get(a, ()) for a, b in zip(path, path[1:]))


# -- trace: run a program ----------------------------------------

def _apply(a, op, b):
    """One operation modulo ten: its text and its result."""
    if op == "+":
        keep = (a + b) % 10
        text = f"{a} plus {b} is {a + b}"
        return (text if a + b < 10 else f"{text}, keep {keep}"), keep
    if a >= b:
        return f"{a} minus {b} is {a - b}", a - b
    return f"{a} is too small, so {a + 10} minus {b} is {a + 10 - b}", a + 10 - b


TRACE_STYLES = (  # (open a step: the line before, this line, its expression; put the values in)
    ("After {} {} is {}. ", "I put in {}"),
    ("Past {} {} takes {}. ", "So far that is {}"),
    ("Below {} {} gets {}. ", "I have {}"),
)


def trace(rng, size):
    """Single-assignment programs modulo ten. Operands are mostly recent results, sometimes one of the givens.

    A step of the chain has the same distance between key and value as the place where it looks the value up:
    a value follows its name, a name follows the name of the line before (in the list of names between
    `start` and `end`), an expression is one word after its name. So one induction step (find the name, read
    on) is enough; with "lamp is 4" in place of lamp4 a 5M-parameter model did not learn the task in 22M
    tokens. A name is the first operand of one line at most, because "gets car plus" must have one
    continuation.
    """
    given = rng.randint(3, 8)
    names = rng.sample(NAMES, size + given)
    value = {name: rng.randrange(10) for name in names[:given]}
    opens, recalls = rng.choice(TRACE_STYLES)

    def says(name):
        """A name with its value, lamp4; a number stays a number."""
        return f"{name}{value.get(name, '')}"

    def operand(i, taken=()):
        """A name known in line i that is not in taken, mostly a recent result. The loop ends, because taken
        never holds the name of the line before."""
        while True:
            if i > given and rng.random() >= 0.15:
                name = names[max(i - 1 - int(rng.expovariate(1 / 4)), 0)]
            else:
                name = rng.choice(names[:given])
            if name not in taken:
                return name

    lines, firsts = [], set()
    think, before = "", "start"
    for i, name in enumerate(names[given:], given):
        op = rng.choice("+-")
        a = operand(i, firsts)
        firsts.add(a)
        b = operand(i) if rng.random() < 0.4 else str(rng.randint(1, 9))
        lines.append(f" {name} = {a} {op} {b}")

        # The chain: which line is next, what it says, the values put in, the result.
        word = "plus" if op == "+" else "minus"
        total, value[name] = _apply(value[a], op, int(value.get(b, b)))
        think += opens.format(before, name, f"{a} {word} {b}")
        think += recalls.format(f"{says(a)} {word} {says(b)}")
        think += f". Then {total}, so {says(name)}.\n"
        before = name

    ask = rng.choice(["Run this program, keeping one digit. What is the last value?",
                      "What does the last line of this program give? Keep one digit everywhere.",
                      "Work through the program line by line, modulo ten. What is its result?"])
    known = ", ".join(says(name) for name in names[:given])
    order = " ".join(names[given:])
    program = "\n".join(lines)
    prompt = f"{ask}\nGiven {known}. In order: start {order} end.\n{program}\n"
    think += f"{opens.split()[0]} {before} end comes, so the result is {says(before)}.\n"
    return prompt, think, str(value[before])


# -- arith: column arithmetic ----------------------------------------

LETTERS, CAPITALS = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def arith(rng, size):
    """Columns have letters from the right, capitals in the upper number, so every digit has a name."""
    op = rng.choice(["plus", "minus", "times"])
    x = [rng.randrange(10) for _ in range(size - 1)] + [rng.randint(3, 9)]     # least significant digit first
    y = [rng.randrange(10) for _ in range(size - 1)] + [rng.randint(1, 9)]
    if op == "minus":
        y[-1] = rng.randint(1, x[-1] - 2)                # so that the difference has as many digits
    think = f"The upper number has the digits {_digits(x, CAPITALS)}. "
    if op == "times":
        y = [rng.randint(2, 9)]
        think += f"The factor is {y[0]}.\n"
    else:
        think += f"The lower number has the digits {_digits(y, LETTERS)}.\n"

    # Column by column from the right.
    carry, result = 0, []
    for i in range(size):
        lower = y[0] if op == "times" else y[i]
        text, digit, carry = _column(op, i, x[i], lower, carry)
        name = "borrow" if op == "minus" else "carry"
        think += f"Column {LETTERS[i]}: {text}. So slot {LETTERS[i]} gets {digit} and {name} {carry}.\n"
        result.append(digit)
    if carry:
        think += f"The last carry goes in front, so slot {LETTERS[size]} gets {carry}.\n"
        result.append(carry)

    slots = [f"slot {LETTERS[i]} gets {digit}" for i, digit in enumerate(result)]
    think += f"From the top: {', '.join(reversed(slots))}.\n"
    ask = rng.choice(["What is {} {} {}?",
                      "Work out {} {} {} column by column.",
                      "Please calculate {} {} {}."])
    upper, lower, answer = ("".join(map(str, reversed(digits))) for digits in (x, y, result))
    return ask.format(upper, op, lower) + "\n", think, answer


def _digits(digits, letters):
    """Digits in written order, each after its column's letter."""
    return " ".join(f"{letters[i]}{digits[i]}" for i in reversed(range(len(digits))))


def _column(op, i, x, y, carry):
    """One column: (text, digit of the result, carry or borrow of the next column)."""
    upper, lower = f"{CAPITALS[i]}{x}", f"{LETTERS[i]}{y}"
    if op == "minus":
        take = y + carry
        text = f"{lower} and the borrow {carry} make {take}, and {upper} "
        if x < take:
            return f"{text}is too small, {x + 10} minus {take} is {x + 10 - take}", x + 10 - take, 1
        return f"{text}minus {take} is {x - take}", x - take, 0
    if op == "plus":
        both = x + y
        text = f"{upper} and {lower} make {both}"
    else:
        both = x * y
        text = f"{upper} times {y} makes {both}"
    total = both + carry
    return f"{text}, with the carry {carry} that is {total}", total % 10, total // 10


# -- story: word problems ----------------------------------------

LABELS = "ABCDEFGHJKLMNOPQRSTUVWXYZ"           # labels of lines in a list; I is a word


def labels(lines):
    """The labels of these lines, each after a space."""
    return "".join(f" {LABELS[i]}" for i in lines)


OTHERS = ("a friend", "the teacher", "a child", "the baker", "the nurse", "a sailor")
SCENERY = ("It rains all morning.", "A dog barks outside.", "The sun comes out.", "Lunch is late today.",
           "The bus is full.", "Somebody opens a window.", "The clock strikes nine.",
           "A cat sleeps on the stairs.")


def story(rng, size):
    """One person's count of one thing through a list of events, some of them distractors."""
    hero = rng.choice(PEOPLE)
    others = rng.sample(OTHERS, 2)
    thing, other_thing = rng.sample(ITEMS, 2)
    count = rng.randint(5, 20)
    opening = [f"{hero} has {count} {thing}.", f"{hero} also has {rng.randint(2, 9)} {other_thing}.",
               f"{others[0].capitalize()} has {rng.randint(5, 20)} {thing}."]
    scenery = rng.sample(SCENERY, len(SCENERY))
    events = {}                                          # as drawn: with their labels
    think = f"I follow the {thing} of {hero}, who starts with {count}, through{labels(range(size))}.\n"
    while len(events) < size:
        # Draw an event: scenery, another thing, another person, or a change of the count.
        n = rng.randint(1, 9)
        who = rng.choice(others)
        kind = rng.random()
        change = 0
        if kind < 0.2 and scenery:
            event, why = scenery.pop(), "That changes nothing"
        elif kind < 0.32:
            event, why = f"{hero} buys {n} {other_thing}.", f"Those are {other_thing}"
        elif kind < 0.44:
            event, why = f"{who.capitalize()} finds {n} {thing}.", f"Those belong to {who}"
        else:
            up = [f"{hero} finds {n} {thing}.", f"{hero} buys {n} more {thing}.",
                  f"{hero} gets {n} {thing} from {who}."]
            down = [f"{hero} loses {n} {thing}.", f"{hero} sells {n} of the {thing}.",
                    f"{hero} gives {n} {thing} to {who}."]
            if rng.random() < 0.5 and count - n >= 0 or count + n > 60:
                event, change = rng.choice(down), -n
            else:
                event, change = rng.choice(up), n
            word = "add" if change > 0 else "take away"
            why = f"From {count} I {word} {n}, which makes {count + change}"
        if event in events:
            continue

        # The line of the event, and its effect on the count.
        events[event] = line = f" {LABELS[len(events)]} {event}"
        count += change
        think += f"{line} {why}, so {hero} has {count} {thing}.\n"
    think += f"In the end {hero} has {count} {thing}.\n"
    ask = rng.choice(["How many {t} does {h} have in the end?",
                      "What is the number of {t} that {h} has now?"])
    prompt = "\n".join([" ".join(opening), *events.values(), ask.format(t=thing, h=hero)]) + "\n"
    return prompt, think, str(count)


# -- search: a way through rooms ----------------------------------------

def search(rng, size):
    """A tree of rooms: try the newest or the oldest open room, abandon dead ends, walk back. An open room is
    followed by the room before it, so each step back is one induction step."""
    # A random tree: a room leads to at most three others.
    rooms = rng.sample(NAMES, size)
    edges = {room: [] for room in rooms}
    parent = {}
    start, *others = rooms
    inner = [start]
    for room in others:
        parent[room] = rng.choice(inner)
        edges[parent[room]].append(room)
        if len(edges[parent[room]]) == 3:
            inner.remove(parent[room])
        inner.append(room)
    goal = rng.choice([room for room in others if not edges[room]])

    def say(room):
        behind = " ".join(edges[room]) or "nothing"
        return f"{room}: {'exit' if room == goal else behind}"

    def open_room(room):
        return f"{room} {parent[room]}" if room in parent else room

    listing = ". ".join(say(room) for room in rng.sample(rooms, size))
    prompt = f"Behind each room lie others. {listing}. Find the way from {start} to the exit.\n"

    # Search the exit, one open room after the other.
    think = f"I start in {start} and look for the exit. Behind each open room I note where it lies.\n"
    still = [start]
    while True:
        room = still.pop(-1 if rng.random() < 0.65 else 0)
        think += f"I try {open_room(room)}. {say(room)}"
        if room == goal:
            break
        if not edges[room]:
            think += ", a dead end"
        still += edges[room]
        think += f". Still open: {', '.join(map(open_room, still))}.\n"

    # Walk back.
    path = [goal]
    while path[-1] != start:
        path.append(parent[path[-1]])
    think += f", there it is.\nBack to the start: {' '.join(path)}.\n"
    return prompt, think, " " + " ".join(reversed(path)), {"edges": edges, "start": start, "goal": goal}


# -- revise: edit and print ----------------------------------------

def revise(rng, size):
    """A lettered list of facts or assignments: fill its gap, add a line or drop one, then print all lines."""
    subjects = rng.sample(NAMES, size + 1)
    new = subjects.pop()
    kind = rng.choice(["fill"] * 3 + ["add"] * 2 + ["drop"])
    if kind == "fill":
        subjects[rng.randrange(size)] = "name"
    code = rng.random() < 0.4
    lines = []
    for i, name in enumerate(subjects):
        n = rng.randint(2, 99)
        friend = rng.choice(subjects[:i]) if i else "zero"
        if code:
            facts = [f"= make({n}, {friend})", f"= {friend} + {n}", f"= print({n})", f"= lambda x: x * {n}"]
        else:
            facts = [f"costs {n} coins.", f"stands next to {friend}.", f"was seen {n} times.",
                     f"needs {friend} every day.", f"was painted in {n} minutes by {rng.choice(PEOPLE)}."]
        lines.append(f" {LABELS[i]} {name} {rng.choice(facts)}")

    # The order and the right answer.
    kept = list(range(size))
    text = "\n".join(lines)
    if kind == "fill":
        order, answer = f"Write {new} wherever it says name.", re.sub(r"\bname\b", new, text)
    elif kind == "add":
        line = f" {LABELS[size]} {new} " + ("= zero" if code else "is new.")
        order, answer = f"Add this line at the end:{line}", f"{text}\n{line}"
        kept.append(size)
    else:
        drop = kept.pop(rng.randrange(size))
        order, answer = f"Leave out line {LABELS[drop]}.", "\n".join(lines[i] for i in kept)
    think = f"I print the lines{labels(kept)}.\n"
    prompt = f"{order} Print the whole {'code' if code else 'list'}.\n{text}\n"
    return prompt, think, answer


# A generator returns the fields of a Problem after its family.
GENERATORS = {"trace": trace, "arith": arith, "story": story, "search": search, "revise": revise}
