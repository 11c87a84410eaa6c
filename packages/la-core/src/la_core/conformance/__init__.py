"""What it takes to judge a backend: the float64 truth, cases, inputs, tolerances and the comparison.

Imports no test framework, so that tests, benchmarks and backends written elsewhere can all use it.
"""
