"""What memory there is, what a model needs of it, and how bytes come from the file into it.

    topology     what this machine (or container) has: RAM, cores, the disk under the model
    budget       how much of it this process may take
    placement    shapes and a budget in, a plan or a refusal out; pure arithmetic
    arena        pages that experts live in
    reader       file bytes to addresses
    peak         the most memory this process ever had resident
    heap         large buffers go back to the system when freed

Topology, budget and placement decide and know no torch; arena and reader carry out. Nothing here knows what an expert
computes.
"""
