"""Layers that architectures share. Torch from here on; weights stay packed, kernels do the arithmetic.

A layer persists and holds weights; what lives for one step comes as an argument (`Step`).
"""
