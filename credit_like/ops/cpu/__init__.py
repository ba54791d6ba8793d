"""CPU forms of the operations, with fewer passes over memory or fewer multiplications.

Each function equals the plain form in `credit_like.ops` up to rounding; `policy` decides when it is used.
"""
