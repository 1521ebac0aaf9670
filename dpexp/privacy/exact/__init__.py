"""Noise whose privacy does not rest on real numbers (`noise=exact`; the paper, section 8, leaves it open).

Each record's clipped vector becomes whole multiples of a grid (`lattice`), sums are whole numbers, and the noise is a
discrete Gaussian (Canonne, Kamath & Steinke 2020, arXiv 2004.00010) drawn exactly (`sampler`, `probabilities`). What it
costs is said by `DiscreteSumQueryEvent`.
"""
