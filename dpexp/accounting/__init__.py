"""Privacy costs: ledgers of rounds, done or planned; the accountants that read them; calibration; audits; budgets.

Imports nothing of training: no torch, lightning, hydra or mlflow may be imported here.
"""
