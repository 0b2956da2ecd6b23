"""Claims of the pages about the shipped models, on held-out problems. results/ has the full numbers."""

import glob
import os

import pytest
import torch
from conftest import attend_alone, ids_of, only_keys, ROOT, TARGET, values

import bench
import compare_checkpoints
from minispec.core.kv_cache import KVCache
from minispec.core.verify import Sampling
from minispec.data import tasks
from minispec.studies import cdlm as cdlm_studies
from minispec.tools import answers, checkpoints, methods

SETTINGS = methods.settings(min_budget=16)
pytestmark = pytest.mark.usefixtures("usual_blocks")
PROBLEMS = [tasks.make(family, 2000 + i, "heldout") for family in tasks.FAMILIES for i in range(4)]


def generate(name, model, tokenizer, problems=PROBLEMS, limit=48):
    requests = answers.requests_of(problems, tokenizer, model, limit)
    return methods.make_engine(name, model, SETTINGS, 20).generate(requests)


@pytest.fixture(scope="module")
def reference(shipped):
    return ids_of(generate("ar", *shipped))


@pytest.mark.parametrize("name", ["ngram", "draft", "specgen", *methods.TRAINED, "adaptive"])
def test_greedy_output_is_identical_on_20_heldout_prompts(name, shipped, reference):
    generations = generate(name, *shipped)
    assert ids_of(generations) == reference
    assert sum(s.accepted for g in generations for s in g.rounds) > 20  # and it did speculate


@torch.inference_mode()
def row_count_noise(model, tokenizer):
    """Largest difference of a logit between feeding a held-out chain one row and nine rows at a time."""
    p = tasks.make("trace", 0, "heldout", 12)
    ids = torch.tensor((tokenizer.prompt_ids(p.prompt) + tokenizer.encode(p.think))[:90])
    logits = []
    for rows in (1, 9):
        cache = KVCache(model.config, 90, model.dtype)
        hidden = [
            model(ids[i : i + rows], torch.arange(i, i + rows), attend_alone(only_keys(cache, i, rows)))
            for i in range(0, 90, rows)
        ]
        logits.append(model.logits(torch.cat(hidden)).float())
    return (logits[0] - logits[1]).abs().max().item()


def test_bf16_differs_at_near_ties_only(shipped):
    """At a first difference the two best logits are closer than four times the row-count noise."""
    model = checkpoints.load(TARGET, dtype=torch.bfloat16)
    noise = row_count_noise(model, shipped[1])
    want, got = (generate(name, model, shipped[1], PROBLEMS[::4], 20) for name in ("ar", "specgen"))
    for a, b in zip(want, got):
        assert answers.tie_gap(model, a.prompt_ids, a.token_ids, b.token_ids) <= 4 * noise


def test_solves_what_it_was_trained_for(shipped):
    """4 problems a family, below the middle of the trained sizes; the floor is well below the accuracies in
    docs/appendix/cdlm.md."""
    model, tokenizer = shipped
    problems = [
        tasks.make(family, 3000 + i, "heldout", sum(sizes) // 4)
        for family, sizes in tasks.SIZES.items()
        for i in range(4)
    ]
    generations = generate("ar", model, tokenizer, problems, limit=None)
    asked = answers.requests_of(problems[:2], tokenizer, model, 5, Sampling(seed=7))
    assert [r.sampling.seed for r in asked] == [7, 8]
    right = [answers.verdict(p, g, tokenizer) for p, g in zip(problems, generations)]
    assert min(sum(right[i : i + 4]) for i in range(0, len(right), 4)) >= 3


@pytest.mark.parametrize("method, threshold, families, tokens", values("""
    "dlm"  | 0.99 | 3 | 3
    "cdlm" | null | 5 | 5
"""))
def test_diffusion_models_solve_problems_with_several_tokens_a_step(
    method, threshold, families, tokens, shipped, monkeypatch
):
    """The student with more than its teacher."""
    monkeypatch.setattr(tasks, "FAMILIES", tasks.FAMILIES[:families])
    target, tokenizer = shipped
    decoder = methods.make_engine(method, target, methods.settings(threshold=threshold), 5)
    row = cdlm_studies.figures([cdlm_studies.solve(decoder, cdlm_studies.held_out(tokenizer, 1), tokenizer)])
    assert row["solved"] >= 0.6
    assert row["tokens"] > tokens * row["steps"]


def test_transformers_agrees_on_the_shipped_folder():
    pytest.importorskip("transformers")
    assert compare_checkpoints.compare_logits(TARGET) < 1e-4


@pytest.mark.parametrize("page", bench.pages(), ids=lambda page: os.path.relpath(page, ROOT))
def test_tables_are_rendered_from_results(page, tmp_path):
    text = page.read_text("utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    bench.report(str(copy))
    assert copy.read_text(encoding="utf-8") == text


def test_checkpoints_stay_small():
    own = "target", "draft", "prism", "eagle", "specdiff", "cdlm", "smollm2"
    files = sum((glob.glob(f"{ROOT}/checkpoints/{name}/**/*.*", recursive=True) for name in own), [])
    sizes = [os.path.getsize(file) for file in files if not file.endswith("resume.pt")]
    assert 20e6 < sum(sizes) < 95e6  # 47 MB are SmolLM2's drafters
