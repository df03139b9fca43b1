"""Hadamard matrices of many orders, computed from finite fields.

A Hadamard matrix has entries +-1 and orthogonal rows. Kronecker products of them are Hadamard
matrices again, so an order 2^k m needs one of order 2^j m for some j <= k:

- Sylvester: order 2.
- Paley I: order q + 1 for a prime power q = 3 mod 4 (12, 20, 44, 60, 108, ...).
- Paley II: order 2 (q + 1) for a prime power q = 1 mod 4 (12, 28, 36, 52, 76, 148, ...).

q is a prime or the square of one. Orders that this does not reach (92 = 4 x 23, 172 = 4 x 43) are
known from other constructions that need a search; `blocks` then says how far it gets.

Source: R. E. A. C. Paley, "On orthogonal matrices", 1933.
Dimensions: Q elements of the field.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_SYLVESTER = 64
"""Powers of two are split into factors of at most this order."""
_LARGEST_PALEY = 2048


class Blocks(NamedTuple):
    """A block-diagonal orthogonal matrix of equal Hadamard blocks."""

    factors: tuple[int, ...]
    """Orders of the matrices whose Kronecker product a block is, outermost first."""
    number: int
    """Blocks; 1 where the width as a whole has a Hadamard matrix."""

    @property
    def size(self) -> int:
        """Width of a block."""
        return math.prod(self.factors)


@lru_cache(maxsize=64)
def hadamard(order: int) -> Tensor:
    """Return a Hadamard matrix of a power of two, or of an order that Paley's give directly.

    Returns:
        [order, order] of +-1, float64; not to be written to.

    Raises:
        ValueError: Neither construction has this order.
    """
    if order & (order - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        while matrix.shape[0] < order:
            matrix = torch.kron(matrix, two)
        return matrix
    if order % 4 == 0:
        for field_order, build in ((order - 1, _paley_one), (order // 2 - 1, _paley_two)):
            characters_QQ = _jacobsthal(field_order)
            wanted = 3 if build is _paley_one else 1
            if characters_QQ is not None and field_order % 4 == wanted:
                return build(characters_QQ)
    raise ValueError(f"no Hadamard matrix of order {order} is constructed here")


def blocks(width: int) -> Blocks:
    """Return the largest Hadamard blocks that fill a width.

    One block where 2^k m or one of its divisors 2^j m (m odd) has a Paley matrix; else as many as
    it takes of the largest order that divides the width, in the worst case blocks of 1.
    """
    for size in (divisor for divisor in range(width, 0, -1) if width % divisor == 0):
        factors = _factors(size)
        if factors is not None:
            return Blocks(factors, width // size)
    raise AssertionError("1 divides every width")


def _factors(order: int) -> tuple[int, ...] | None:
    """Return a Kronecker factorization of an order, the odd part first; None: there is none."""
    odd = order
    while odd % 2 == 0:
        odd //= 2
    base = 1
    if odd > 1:
        base = 4 * odd
        while not (order % base == 0 and _is_paley(base)):
            base *= 2
            if base > min(order, _LARGEST_PALEY):
                return None
    rest = (order // base).bit_length() - 1
    # Equal shares: a product of two small matrices beats one small and one tiny.
    parts = -(-rest // (LARGEST_SYLVESTER.bit_length() - 1))
    shares = [rest // parts + (index < rest % parts) for index in range(parts)]
    factors = ([base] if base > 1 else []) + [2**share for share in shares]
    return tuple(factors) or (1,)


def _is_paley(order: int) -> bool:
    return (order % 4 == 0) and (
        ((order - 1) % 4 == 3 and _root(order - 1) is not None)
        or ((order // 2 - 1) % 4 == 1 and _root(order // 2 - 1) is not None)
    )


def _root(field_order: int) -> tuple[int, int] | None:
    """Return (p, degree) of a field of p or p^2 elements; None for other orders."""
    if _is_prime(field_order):
        return field_order, 1
    root = math.isqrt(max(field_order, 0))
    return (root, 2) if root * root == field_order and _is_prime(root) else None


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _jacobsthal(field_order: int) -> Tensor | None:
    """Return the quadratic characters of all differences [Q, Q]: 1, -1, and 0 on the diagonal.

    Elements of a field of p^2 are a + b r with r^2 a non-residue; one is a square exactly where
    its norm a^2 - r^2 b^2 is a square modulo p.
    """
    found = _root(field_order)
    if found is None:
        return None
    prime, degree = found
    squares = {value * value % prime for value in range(1, prime)}
    character = torch.tensor(
        [0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)],
        dtype=torch.float64,
    )
    values = torch.arange(field_order)
    if degree == 1:
        return character[(values[:, None] - values[None, :]) % prime]
    non_residue = next(value for value in range(2, prime) if value not in squares)
    high, low = values // prime, values % prime
    real = (low[:, None] - low[None, :]) % prime
    other = (high[:, None] - high[None, :]) % prime
    return character[(real * real - non_residue * other * other) % prime]


def _paley_one(characters_QQ: Tensor) -> Tensor:
    """I + S, where S is the skew matrix of characters with a border."""
    order = characters_QQ.shape[0] + 1
    skew = torch.zeros(order, order, dtype=torch.float64)
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1.0, -1.0, characters_QQ
    return skew + torch.eye(order, dtype=torch.float64)


def _paley_two(characters_QQ: Tensor) -> Tensor:
    """Each +-1 of the bordered, symmetric matrix of characters as +-[[1, 1], [1, -1]]."""
    order = characters_QQ.shape[0] + 1
    symmetric = torch.zeros(order, order, dtype=torch.float64)
    symmetric[0, 1:], symmetric[1:, 0], symmetric[1:, 1:] = 1.0, 1.0, characters_QQ
    outer = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(symmetric, outer) + torch.kron(
        torch.eye(order, dtype=torch.float64), diagonal
    )
