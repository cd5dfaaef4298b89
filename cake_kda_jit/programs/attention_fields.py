"""Codes in the argument blocks of the programs: dtypes, gate forms and beta forms."""

from __future__ import annotations

DTYPE_CODES = {"bf16": 0, "fp16": 1, "fp32": 2}
GATE_FORMS = {"ready": 0, "softplus": 1, "bounded": 2}
BETA_FORMS = {"ready": 0, "sigmoid": 1, "two_sigmoid": 2}
