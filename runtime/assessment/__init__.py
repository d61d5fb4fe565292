"""What prefetching and caching can gain on a recorded model, before anything is trained. NumPy only; no tensors.

Hot set: the experts that are used most. Overlap: the share of a token's experts that the tokens before it used too.
Demand recall: the share of a token's experts that a signal names. Covered misses: the share of a cache's misses that a
signal names; what is resident needs no prefetch, so only these can save time. Chance level: what independent, uniform
routing would show; popularity level: what independent routing with the recorded popularity would show.
On demand: experts are read when needed, and compute waits. Limit: Belady's misses, all hidden behind compute.

Worked example: one MoE layer of 4 experts, top-1, a sequence that uses experts 0, 0, 1, 0. Loads are (3, 1, 0, 0); the
normalised entropy is 0.41 and the effective number of experts 1.75. Of the three tokens with a predecessor one uses
the expert that the predecessor used: an overlap of 1/3, where chance would give 1/4 and popularity
(3/4)^2 + (1/4)^2 = 0.625. The hottest quarter, expert 0, covers 3 of the 4 accesses.
"""
