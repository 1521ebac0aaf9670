"""What a person runs: train, sweep, account, report."""
