"""References of the kernels: attention and scores by definition; and the stand-in of a CUDA graph."""
import torch

from kernels.attention import SEEN


def side_by_side(*tensors):
    """Kernels read rows by address, so tensors with repeated or skipped numbers would be read wrongly."""
    assert all(x.is_contiguous() for x in tensors), "a kernel would read other numbers"


def attention(q, k, v, slots, selected, plan):
    """kernels/attention.py by definition: one row, one head, one list at a time, in fp32."""
    side_by_side(plan.requests, plan.sees, plan.items, plan.merges)
    (_, h, d), groups = q.shape, k.shape[0]
    out = torch.zeros_like(q)
    lse = torch.zeros(q.shape[:2], device=q.device)
    for b in set(plan.items[:, 0].tolist()) - {-1}:
        first_row, n_rows, length, n_selected, tail, causal = plan.requests[b].tolist()
        for i in range(n_rows):
            row = first_row + i
            newest = length - n_rows + i if causal else length - 1
            bits = plan.sees[row].item()
            own = []
            for p in range(tail, newest + 1):
                back = length - 1 - p
                if back >= SEEN or bits >> back & 1:
                    own.append(p)
            for head in range(h):
                group = head // (h // groups)
                positions = selected[b, group, :n_selected].tolist()
                index = slots[b, positions + own].long()
                logits = k[group, index].float() @ q[row, head].float() * d ** -0.5
                out[row, head] = (logits.softmax(0) @ v[group, index].float()).to(q.dtype)
                lse[row, head] = logits.logsumexp(0)
    return out, lse


def scores(q, k, lse, slots, plan, which, out):
    """kernels/scores.py by definition, without the lse: a dense softmax per query head, in fp32."""
    (_, h, d), groups = q.shape, k.shape[0]
    for b in [b for b in which.tolist() if b >= 0]:
        first_row, n_rows, length = plan.requests[b, :3].tolist()
        rows = q[first_row:first_row + n_rows].float()
        index = slots[b, :length].long()
        positions = torch.arange(length, device=q.device)
        unseen = positions > positions[length - n_rows:, None]                                  # (n, length)
        for group in range(groups):
            total = torch.zeros(length, device=q.device)
            for head in range(group * h // groups, (group + 1) * h // groups):
                logits = rows[:, head] @ k[group, index].float().T * d ** -0.5
                total += logits.masked_fill(unseen, float("-inf")).softmax(-1).sum(0)
            out[b, group, :length] = total / (n_rows * h // groups)
    return out


class Recorded:
    """A graph's stand-in where there is no CUDA: replaying calls the function again, which knows the static
    inputs only."""

    def __init__(self, function):
        self.function = function
        self.out = function()

    def replay(self):
        for held, new in zip(self.out, self.function()):
            held.copy_(new)


def capture(function, pool):
    """graphs.capture without a GPU."""
    graph = Recorded(function)
    return graph, graph.out
