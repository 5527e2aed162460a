"""Models from a hub: which file is meant, getting it, and where it lies afterwards.

    names      `ORG/NAME[:FILE or quant]`, split sets, quant labels; which one to take. No network, no files
    store      the folder of pulled models; what is complete in it
    download   listing (huggingface_hub), transfer that goes on where it broke off, checksums

A file has its own name in the store only when its size and SHA-256 are what the hub says.
"""
