"""The operations as a CPU does them: the same sums in fewer passes over memory, or with fewer multiplications.

Each function equals the plain form in `credit_like.ops` to rounding; `policy` says where it is taken.
"""
