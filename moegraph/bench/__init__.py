"""Speed measurements in llama-bench's terms, so that rows can stand side by side."""

from __future__ import annotations

from .measure import BenchRow, BenchSpec, run_bench

__all__ = ["BenchRow", "BenchSpec", "run_bench"]
