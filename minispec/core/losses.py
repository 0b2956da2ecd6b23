"""The distillation loss, and the choice of the rows that it is computed for."""
import torch

ROWS = 128                  # gathered rows are a multiple of this


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


def numbers_of(mask):
    """(the indices of the true entries of a mask (N,), followed by false ones up to a multiple of ROWS; the
    number of true ones). oneDNN compiles a kernel for every number of rows, which takes longer than to run
    it, so products of gathered rows should have few shapes."""
    n = int(mask.sum())
    return mask.logical_not().byte().argsort(stable=True)[:-(-n // ROWS) * ROWS], n
