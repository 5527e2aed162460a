"""Requests → tokens: prefill in chunks, decode, sampling, timings.

The engine speaks token ids. It knows no text, no file and no budget; `sampling` imports no torch.
"""
