"""The two mini models, trained from nothing on local text within 45 minutes of one CPU core each.

foregate-mini: a Qwen3-MoE language model, 6 MoE layers of 32 experts, top-4; an expert of 3 * 128 * 64 bf16 weights
is 48 KiB, so that experts widened 128 times have the 6 MiB of a large model's.
foregate-mini-switch: a Switch Transformers model, top-1, MoE layers in encoder and decoder; answers SST-2 and MRPC.

Card: the figures of a model, measured on held-out text with the bf16 weights that are shipped.
Held out: the dev sets and the last tenth of the WikiText-2 articles, see `text`.
"""
