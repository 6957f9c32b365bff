"""Speed measurements in llama-bench's terms, so that rows can be compared."""

from __future__ import annotations

from .measure import BenchRow, BenchSpec, BenchTest, run_bench

__all__ = ["BenchRow", "BenchSpec", "BenchTest", "run_bench"]
