"""Speculative decoding on one screen. `python -m minispec` shows it at work.

A language model reads all of its weights to write one token. On a GPU, checking eight tokens takes hardly
longer. So something cheap guesses the next tokens (draft), the model checks all guesses in one forward
(verify), keeps those that it would have written itself, and adds one token of its own. The text is the
model's, token by token; only the number of forwards changes.

All other files answer two questions about this loop: which drafter proposes, and which keys may a query see?
Batches, sampling, trees of drafts and timing are in engine.py and verify.py.
"""
import torch
import torch.nn.functional as F


def forward(model, tokens, start, cache):
    """Feed `tokens` (n of them) at positions start, start + 1, .. and return the logits (n, V).
    cache: keys and values of every layer, (2, G heads, T positions, D), with all positions before `start`."""
    positions = torch.arange(start, start + len(tokens))

    def attend(layer, q, k, v):                                  # q (n, H, D), k and v (n, G, D)
        keys, values = cache[layer]
        keys[:, positions] = k.transpose(0, 1)
        values[:, positions] = v.transpose(0, 1)
        # Causal: a query sees all keys up to its own.
        end = start + len(tokens)
        sees = torch.arange(end) <= positions[:, None]           # (n, end)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None, :, :end], values[None, :, :end], sees, enable_gqa=True)
        return out[0].transpose(0, 1)                            # (n, H, D)

    return model.logits(model(torch.tensor(tokens), positions, attend))


@torch.inference_mode()
def generate(model, prompt, draft, k=8, max_new_tokens=200, stop_ids=()):
    """Yield (accepted drafts, the model's own token) of every round. draft(tokens, k): up to k guesses."""
    c = model.config
    longest = len(prompt) + max_new_tokens
    cache = [torch.zeros(2, c.n_kv_head, longest, c.head_dim, dtype=model.dtype) for _ in range(c.n_layer)]
    tokens, n_cached = list(prompt), 0
    while True:
        # 1. Draft. Any function may guess; a bad guess costs time and never changes the text.
        guess = draft(tokens, min(k, longest - len(tokens) - 1))

        # 2. Verify: one forward over what the cache lacks (the prompt, later one token) and the guesses.
        logits = forward(model, tokens[n_cached:] + guess, n_cached, cache)
        #    best[i] is the model's choice after guess[:i].
        best = logits[-len(guess) - 1:].argmax(-1).tolist()

        # 3. Accept guesses as long as the model would have written the same.
        n = 0
        while n < len(guess) and guess[n] == best[n]:
            n += 1

        # 4. The model's own token follows: a correction of the first wrong guess, or a bonus after the last.
        #    Keys of wrong guesses stay in the cache after n_cached. The next forward overwrites them.
        n_cached = len(tokens) + n
        new = guess[:n] + [best[n]]
        stops = [i for i, token in enumerate(new) if token in stop_ids]
        new = new[:stops[0] + 1] if stops else new
        tokens += new
        yield new[:n], new[n:]
        if stops or len(tokens) >= longest:
            return


def prompt_lookup(tokens, k):
    """Guess the tokens that followed the last earlier occurrence of the newest three tokens."""
    for i in range(len(tokens) - 4, -1, -1):
        if tokens[i:i + 3] == tokens[-3:]:
            return tokens[i + 3:i + 3 + k]
    return []
