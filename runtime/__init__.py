"""Running a model whose experts do not fit in fast memory.

Expert block: one expert's weights as one contiguous byte range. Cache slot: a place for one block in the arena.
Resident: the block is in a slot. In flight: it is being read. Pin: it must not leave. Hit: resident at need; delayed
hit: in flight at need; miss: absent. Event: one (step, MoE layer), whose distinct experts are needed at once.
"""
