"""int8 attention with a per-key bias and a log-sum-exp: limits, quantisation, kernel, reference and torch op."""
