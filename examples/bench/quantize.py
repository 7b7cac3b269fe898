"""How fast values are quantized and restored, against a copy of the same bytes.

    python examples/bench/quantize.py

Each op is compiled by Inductor as it is in a graph. A rate is bytes of the value (float32) a second; medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import fx

from passes.parse import parse
from passes.wire import LARGEST, message_bytes
from shardc import _torch
from shardc.lower import in_aten

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ELEMENTS = 1 << (26 if DEVICE == "cuda" else 22)
BLOCK = 256


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(ELEMENTS, device=DEVICE)
    other = torch.empty_like(x)
    copied = rate(lambda inputs: other.copy_(inputs[0]), x)
    print(f"torch {torch.__version__}, {DEVICE}, {x.nbytes / 1e6:.0f} MB of float32, blocks of {BLOCK}")
    print(f"copy: {copied:.2f} GB/s of the value\n")
    print("| format | quantize GB/s | of a copy | restore GB/s | of a copy | both, of a copy |")
    print("|---|---|---|---|---|---|")
    for wire in LARGEST:
        there, back = compiled(wire)
        first, second = rate(there, x), rate(back, there([x])[0])
        both = 1 / (1 / first + 1 / second)
        cells = (f"{first:.2f}", f"{first / copied:.2f}", f"{second:.2f}", f"{second / copied:.2f}")
        print(f"| {wire} | {' | '.join(cells)} | {both / copied:.2f} |", flush=True)


def compiled(wire: str) -> list[Callable[[list[torch.Tensor]], list[torch.Tensor]]]:
    size = message_bytes(ELEMENTS, wire, BLOCK)
    on = "" if DEVICE == "cpu" else f"device = '{DEVICE}:0'\n\n"
    texts = (
        f"{on}def forward(x: f32[{ELEMENTS}]):\n    m = quantize(x, '{wire}', {BLOCK}, 1)\n    return [m]\n",
        f"{on}def forward(m: u8[1, {size}]):\n"
        f"    x = shardc.dequantize(m, '{wire}', {BLOCK}, [{ELEMENTS}], f32)\n    return [x]\n",
    )
    graphs = [parse(text) for text in texts]
    return [_torch.compile_graph(in_aten(fx.GraphModule(torch.nn.Module(), graph))) for graph in graphs]


def rate(call: Callable[[list[torch.Tensor]], object], value: torch.Tensor) -> float:
    """GB of the value a second."""
    seconds = []
    for _ in range(23):
        wait()
        began = time.perf_counter()
        call([value])
        wait()
        seconds.append(time.perf_counter() - began)
    return 4 * ELEMENTS / statistics.median(seconds[3:]) / 1e9


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
