"""minispec: five papers on fast LLM decoding, one small GPT, one decoding loop.

Importing the package tunes the C allocator and oneDNN, so import it before torch.
"""
from .allocator import keep_kernels, tune_allocator

tune_allocator()
keep_kernels()
