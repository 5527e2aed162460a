"""Experts that come and go: which are in memory, where, for how long, and how a layer gets the ones it needs.

    policies       whom to evict, whom to admit; numbers in, a slot out
    cache          books of slots and runs: reserve, evict, recycle
    stats          what it cost
    layer_step     the experts of one layer, computed: native, or in torch with the reference kernels
    executor       one layer of one step: issue reads, compute hits, wait for misses and compute them
    uninterrupted  a Ctrl-C waits until the layer is done

Knows addresses, slots and bytes; no model, no token. Only `layer_step` and `executor` import torch.

    absent --reserve--> loading --last read ended--> resident --evict--> absent
                           +---------- a read failed, last lease gone ----> absent
"""
