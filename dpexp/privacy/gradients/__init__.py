"""The gradient engine: per-record clipping of every vector at once.

The loss is computed under `torch.func.vmap`: a record's loss is what `training_step` returns for a batch of that record
alone, whatever the loss reduction. Where a parameter enters a known operation (`rules`), the operation runs on the
whole chunk and its inputs and output gradients are saved; where it enters any other, each record gets its own copy
(`capture`). What is computed from parameters alone is treated as a parameter, and its gradients go back to those behind
it (`derived`). All answer the two operations that a mechanism needs of a vector: squared norms, and a weighted sum over
records.

The pass of a chunk is traced into a graph and proved to treat each record by itself before the first round (`graphs`,
`traced`); the rounds run the graph. What cannot be traced runs as written (`passes`). `step` decides which.
"""
