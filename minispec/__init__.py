"""minispec: five papers on fast LLM decoding, one small GPT, one decoding loop.

Importing the package tunes the C allocator, so import it before torch.
"""
from .allocator import tune_allocator

tune_allocator()
