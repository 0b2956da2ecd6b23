"""The distillation loss."""
import torch
import torch.nn.functional as F


def kl(goal, q, reverse=False):
    """KL(goal || q) (...) of logits (..., V), in fp32: q must cover all of the goal's mass. reverse: KL(q ||
    goal), q may keep to a part of it. No gradient reaches the goal."""
    p, q = (logits.log_softmax(-1, dtype=torch.float32) for logits in (goal.detach(), q))
    p, q = (q, p) if reverse else (p, q)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
