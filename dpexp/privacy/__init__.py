"""What is released and how: rounds, their mechanisms and other releases, run by `PrivacyCallback` or `Private`; what is
refused; audits. Folders: plan, sampling, gradients, noise."""
