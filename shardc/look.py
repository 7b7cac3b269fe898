"""Look: the commands `plan`, `draw`, `explain` and `simulate`, for models on the meta device and any world size.

python -m shardc plan --model gpt --topology dgx-h100 --nodes 128 --memory 80GB
python -m shardc explain --model gpt --plan zero3 --topology dgx-h100 --nodes 8
python -m shardc simulate --model hf:config.json --plan IIG --topology a800 --nodes 16 --trace trace.json
python -m shardc draw --model gpt --layers 80 --plan hpz --topology frontier --nodes 48 --out out
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import Error
from shardc.explain import explain
from shardc.plan import Plan
from shardc.program import Program
from shardc.search import search
from shardc.simulate import simulate
from shardc.topology import Topology
from shardc.trace import trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLANS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "mics", "hpz", "zeropp", "frontier")


def add_to(commands: Any) -> None:
    """The four commands."""
    for run, says in (
        (plan_it, "the best plans"),
        (draw_it, "pictures of the graphs"),
        (explain_it, "a table of collectives"),
        (simulate_it, "a timeline"),
    ):
        name = run.__name__.removesuffix("_it")
        it = commands.add_parser(name, help=f"{says} of a model on a cluster that one need not have", epilog=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        it.add_argument("--model", required=True, help="gpt, or hf:CONFIG.json with a config of transformers")
        it.add_argument(
            "--topology", required=True, help="a preset (dgx-h100, a800, frontier, ...) or a topology's JSON file"
        )
        it.add_argument("--nodes", type=int, default=2, help="hosts, for a preset (default: 2)")
        it.add_argument("--layers", type=int, help="in the place of the model's own number")
        it.add_argument("--batch", type=int, default=1, help="sequences a rank and micro-batch (default: 1)")
        it.add_argument("--sequence", type=int, default=2048, help="tokens in one (default: 2048)")
        it.add_argument("--micro-batches", type=int, default=1, help="a step (default: 1)")
        it.add_argument("--dtype", choices=DTYPES, default="bf16", help="that plans compute in (default: bf16)")
        it.set_defaults(run=run)
        if name == "plan":
            it.add_argument("--memory", help='what a rank may hold: "80GB" (default: what its device has)')
            it.add_argument("--gather-wires", nargs="*", default=(), help="formats that gathers may have: int8 ...")
            it.add_argument("--reduce-wires", nargs="*", default=(), help="formats that reductions may have: int4 ...")
            it.add_argument("--out", default="plan.json", help="the best plan as JSON (default: plan.json)")
            continue
        it.add_argument(
            "--plan", required=True, help=f"{', '.join(PLANS)}, letters of PaRO (IIG), or a plan's JSON file"
        )
        it.add_argument("--unfold", action="store_true", help="every layer on its own, equal or not")
        if name == "draw":
            it.add_argument("--out", default="out", help="the folder (default: out)")
        if name == "simulate":
            it.add_argument("--svg", help="a picture of the timeline")
            it.add_argument("--trace", help="a file for Perfetto")


def plan_it(options: argparse.Namespace) -> None:
    topology = topology_of(options.topology, options.nodes)
    model, call = model_of(options.model, options.layers)
    found = search(
        model,
        topology,
        memory=options.memory,
        micro_batches=options.micro_batches,
        gather_wires=options.gather_wires,
        reduce_wires=options.reduce_wires,
        param_dtype=DTYPES[options.dtype],
        **call(_ids(options)),
    )
    print(found)
    found.plan.save(options.out)
    print(f"\nwritten to {options.out}")


def draw_it(options: argparse.Namespace) -> None:
    for path in program_of(options).svg(options.out, fold=not options.unfold):
        print(path)


def explain_it(options: argparse.Namespace) -> None:
    timeline = simulate(program_of(options), micro_batches=options.micro_batches)
    print(explain(timeline, fold=not options.unfold), end="")


def simulate_it(options: argparse.Namespace) -> None:
    timeline = simulate(program_of(options), micro_batches=options.micro_batches)
    print(timeline)
    if options.svg:
        timeline.svg(options.svg)
    if options.trace:
        timeline.chrome_trace(options.trace)


def program_of(options: argparse.Namespace) -> Program:
    """What the command line asks for, traced."""
    topology = topology_of(options.topology, options.nodes)
    plan = plan_of(options.plan, topology, DTYPES[options.dtype])
    model, call = model_of(options.model, options.layers)
    print(f"tracing {options.model} under {options.plan} on {plan.topology} ...", file=sys.stderr, flush=True)
    return trace(model, plan, keep=False, **call(_ids(options)))


def _ids(options: argparse.Namespace) -> Tensor:
    return torch.zeros((options.batch, options.sequence), dtype=torch.long, device="meta")


def topology_of(name: str, nodes: int) -> Topology:
    if name.endswith(".json"):
        return Topology.load(name)
    return Topology.preset(name, nodes=nodes)


def plan_of(name: str, topology: Topology, dtype: torch.dtype) -> Plan:
    """By name for a topology; a file's plan has its own."""
    if name.endswith(".json"):
        return Plan.load(name)
    if name in PLANS:
        return getattr(Plan, name)(topology, param_dtype=dtype)
    if len(name) == 3 and set(name) <= set("NIG"):
        return Plan.paro(topology, name, param_dtype=dtype)
    raise Error(
        f"There is no plan {name!r}.", fix=f"One of {', '.join(PLANS)}, three letters of N, I and G, or a .json file."
    )


Call = Callable[[Tensor], dict[str, Tensor]]
"""Keyword arguments for token ids."""


def model_of(name: str, layers: int | None) -> tuple[nn.Module, Call]:
    """On the meta device, with how it is called."""
    if name == "gpt":
        with torch.device("meta"):
            return GPT(layers or 24), lambda ids: {"ids": ids}
    if name.startswith("hf:"):
        return _from_transformers(name.removeprefix("hf:"), layers)
    raise Error(f"There is no model {name!r}.", fix="gpt, or hf:CONFIG.json with a config of transformers.")


class GPT(nn.Module):
    """GPT-2 medium's widths, of torch's own layers: 350M parameters with 24 of them. Token ids in, their loss out."""

    def __init__(self, layers: int, dim: int = 1024, heads: int = 16, vocab: int = 50304):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


def _from_transformers(path: str, layers: int | None) -> tuple[nn.Module, Call]:
    try:
        import transformers
    except ImportError as error:
        raise Error("hf:CONFIG.json needs transformers.", fix="pip install transformers") from error
    saved = _json(path, "a config of transformers")
    if layers:
        saved[_layers_key(saved, path)] = layers
    try:
        config = transformers.AutoConfig.for_model(**saved)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise Error(
            f"transformers makes no causal language model of this config: {str(error).splitlines()[0]}",
            where=path,
            fix="A config.json of such a model names its `model_type`.",
        ) from error
    takes = inspect.signature(model.forward).parameters
    quiet = {"use_cache": False} if "use_cache" in takes else {}
    return model, lambda ids: {"input_ids": ids, "labels": ids, **quiet}


def _layers_key(saved: dict[str, Any], path: str) -> str:
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if key in saved:
            return key
    raise Error("This config does not say how many layers it has.", where=path, fix="Leave out --layers.")


def _json(path: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise Error(f"There is no {path} to read {what} from: {error.strerror}.", fix="Check the path.") from error
    except ValueError as error:
        raise Error(f"This file is no JSON: {error}.", where=path, fix=f"Give {what} as JSON.") from error
    if not isinstance(found, dict):
        raise Error(f"This file holds a {type(found).__name__}, not {what}.", where=path, fix=f"Give {what} as JSON.")
    return found
