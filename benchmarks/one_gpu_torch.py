"""A group of `one_gpu.py`: what PyTorch's copies and additions reach on the card."""

from __future__ import annotations

import importlib.util
import pathlib
import statistics
from typing import Any

from benchmarks.one_gpu_rows import emit, resnet50_shapes, row, run_group, wait_for_turn

CALLS, REPEATS = 10, 7


def peer_rates(folder: pathlib.Path) -> None:
    """Flatten, copy and add of ResNet-50's gradients, in GB/s."""
    if importlib.util.find_spec("torch") is None:
        emit("PyTorch", "ok", 0.0, {"note": "it is not installed"})
        return
    import torch

    if not torch.cuda.is_available():
        emit("PyTorch", "ok", 0.0, {"note": "it sees no GPU"})
        return
    torch.cuda.synchronize()
    wait_for_turn()
    values = [torch.randn(shape, device="cuda") for shape in resnet50_shapes()]
    size = 4 * sum(value.numel() for value in values)
    flat = torch.cat([value.reshape(-1) for value in values])
    other = torch.empty_like(flat)
    views, first = [], 0
    for value in values:
        views.append(flat[first : first + value.numel()].view_as(value))
        first += value.numel()

    def measure(call: Any, moved: int) -> dict[str, Any]:
        figures = []
        for _ in range(3):
            call()
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            figures.append(begin.elapsed_time(end) / CALLS)
        taken = statistics.median(figures)
        return {"ms": taken, "GB/s": moved / taken / 1e6}

    ways = {
        "copy": (lambda: other.copy_(flat), 2 * size),
        "add 1": (lambda: torch.add(flat, 1.0, out=other), 2 * size),
        "add two buffers": (lambda: other.add_(flat), 3 * size),
        "flatten (cat)": (
            lambda: torch.cat([value.reshape(-1) for value in values], out=other),
            2 * size,
        ),
        "copies back": (lambda: torch._foreach_copy_(values, views), 2 * size),
    }
    for way, (call, moved) in ways.items():
        row(f"PyTorch {torch.__version__}, {way}", measure, call, moved)


if __name__ == "__main__":
    run_group({"torch": peer_rates})
