"""Per-example gradients and clipping, for all vectors of a plan at once.

`step` decides how records are processed. By default the pass of a chunk (loss, gradients, norms, clipped sums) is
computed under `torch.func.vmap`, where each record's loss is that of a batch of one; it is traced into a graph, proved
to keep records apart (`traced`, `graphs`), and possibly compiled (`compiled`). A step that cannot be traced runs as
written (`per_example`).

Where a parameter enters a known operation (`layer_rules`), the operation runs on the whole chunk and saves its inputs
and output gradients; elsewhere each record gets its own copy of the parameter (`interception`). A tensor computed from
parameters alone is treated as a parameter, and its gradients are propagated to them (`derived_parameters`). Each kind
gives squared norms and weighted sums over records (`layer_gradients`), from which `clipped_sums` are made.
"""
