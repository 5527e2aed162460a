"""What models are: one file per architecture, on shared layers.

`registry.find` understands a file without torch (config, tensor names, numbers for the plan); `Architecture.build`
makes the model that runs. Speaks tensors; knows no text, no request, and not where an expert's bytes come from.
"""
