"""Measuring arms against each other and against the physical limit.

Arms: `resident` (plain transformers, every expert in memory), `lru` (this engine, LRU, reads on demand), `foregate`
(the same slots with a predictor). All arms of a comparison run in one process, in interleaved passes over the same
prompts. The limit of an arm: the larger of the resident arm's time, and the misses of Belady's optimum over the same
events times the block's read time, probed in the same passes with the same block size.
"""
