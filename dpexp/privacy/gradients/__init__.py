"""Per-example gradients and clipping, for all vectors of a plan at once.

`step` decides how records are processed. By default the training step is traced for one record (`one_record`); the
factors of each gradient are read off its graph (`factors`), which `torch.func.vmap` maps over records (`lifted`). Each
kind of factors gives squared norms and weighted sums over records (`layer_gradients`), from which `clipped_sums` are
made. The graph of a whole chunk (`graphs`) is proved to keep records apart (`graph`), and possibly compiled
(`compiled`), or computed in two runs that take less memory (`two_runs`). A step that cannot be traced is called for one
record at a time, on a copy of the module each (`one_at_a_time`). Private records reach the step in rounds alone;
before, their shapes and types do (`chunk`).
"""
