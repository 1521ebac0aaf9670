"""What it cost: the ledger of what happened, the accountants that read it, calibration.

Knows nothing of training: no torch, lightning, hydra or mlflow may be imported here.
"""
