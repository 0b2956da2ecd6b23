"""The distillation loss."""
import torch


class Divergence:
    """KL(target || model) (...) of two sets of logits (..., V), in fp32: it makes the model cover all of the
    target's mass. No gradient reaches the target, whose softmax and entropy are computed once for all models
    that are compared with it."""

    def __init__(self, target):
        self.p = target.detach().softmax(-1, dtype=torch.float32)
        self.entropy = torch.special.entr(self.p).sum(-1)

    def __call__(self, logits):
        log_q = logits.log_softmax(-1, dtype=torch.float32)
        # Not as a product of vectors, which autocast would round to bf16.
        return -(self.p * log_q).sum(-1) - self.entropy
