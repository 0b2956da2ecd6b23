"""The distillation loss."""
import torch
import torch.nn.functional as F


def goal_of(logits):
    """The log-probabilities (..., V) of logits, in fp32 and without a gradient: the goal of `kl`."""
    return logits.detach().log_softmax(-1, dtype=torch.float32)


def kl(goal, logits, reverse=False):
    """KL(goal || q) (...) of a goal and the logits of q (..., V): q must cover all of the goal's mass.
    reverse: KL(q || goal), q may keep to a part of it."""
    p, q = goal, logits.log_softmax(-1, dtype=torch.float32)
    p, q = (q, p) if reverse else (p, q)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
