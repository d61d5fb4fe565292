"""Recording how a model routes tokens to experts.

Routed expert: chosen per token by a router. Shared expert: always active, never cached, never traced.
MoE layer l: the l-th sparse layer of the model. Topology: the list of MoE layers. Trace: for each token and MoE layer
the chosen experts in router order. See `topology` and `trace` for worked examples.
"""
