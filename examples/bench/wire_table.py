"""Tables and plots of what `wire.py` has measured. A record is one finished job."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from wire_rows import ALONE, BASELINE, CONFIG, OURS, ROWS

import shardc

Record = dict[str, Any]
HEAD = (
    *("row", "precision", "step s", "p10-p90", "MB sent", "MB closed form", "ratio", "exposed s"),
    *("bound s", "bound / step", "foretold s", "off", "pace", "off at pace", "best baseline / step"),
    *("of no more memory", "peak MiB", "first loss", "last loss", "losses off"),
)
NOTE = """\
step: median; a step is over when the last rank is through with it. MB sent: by the first host in a step; closed form:
of the plan, over the node axis. exposed: the step less that of the same model without communication (its update of as
many parameters as a rank has). bound: the largest of that, of the closed form's bytes at the goodput of the link, and
of the bound of the simulation with the update. off: of what is foretold, from what `calibrate` has measured. pace: how
many times as long as while that measured all ranks took, between steps of the row, for forwards and backwards without
communication: machines get slower and faster. off at pace: where all compute takes so many times as long. best
baseline / step: how many times as fast as the fastest baseline of the same precision (of bf16 for int8 and int4), and
as the fastest of those whose peak memory is not above the row's own (by 1%). losses off: the largest relative
difference from one process. in turns: once more, in one job, a few steps of one row after a few of the other."""
SAME_MEMORY = 1.01
"""An allocator is looked at now and then, and is never twice at the same."""


class Setting(NamedTuple):
    """What a table is of."""

    layout: str
    """hosts x processes"""
    rate: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.rate}, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"

    @property
    def hosts(self) -> int:
        return int(self.layout.partition("x")[0])

    @property
    def processes(self) -> int:
        """A host."""
        return int(self.layout.partition("x")[2])


def settings(records: Iterable[Record]) -> list[Setting]:
    """Of all rows that have been measured over links, in the order of the records."""
    of_rows = (r for r in records if r["row"] in ROWS and ROWS[r["row"]].kind != ALONE)
    return list(dict.fromkeys(Setting(r["layout"], r["rate"], r["micro_batches"]) for r in of_rows))


class Table:
    """Of one setting."""

    def __init__(self, records: Sequence[Record], setting: Setting):
        self.setting = setting
        alike = [r for r in records if r["layout"] == setting.layout and "error" not in r]
        of_batches = [r for r in alike if r["micro_batches"] == setting.micro_batches]
        self.rows = {r["row"]: r for r in of_batches if r["rate"] == setting.rate and r["row"] in ROWS}
        self.others = {r["row"]: r for r in of_batches if not r["rate"]}
        """whose step does not depend on links"""
        in_turns = (r for r in of_batches if r["rate"] == setting.rate and "turns_s" in r)
        self.turns = {next(iter(r["turns_s"])): r for r in in_turns}
        """by the planner's row: seconds of its steps, and of those of rows that took turns with it in one job"""
        calibrated = [r for r in alike if r["row"] == "calibrate" and r["rate"] == setting.rate]
        self.topology = shardc.Topology.from_dict(calibrated[-1]["topology"]) if calibrated else None

    def __str__(self) -> str:
        lines = [f"## {self.setting}", "", *markdown([HEAD, *(self.cells(name) for name in self.ordered)])]
        return "\n".join([*lines, "", *self.summary()])

    @property
    def ordered(self) -> list[str]:
        return [name for name in ROWS if name in self.rows]

    def cells(self, name: str) -> tuple[str, ...]:
        record, row, step_s = self.rows[name], ROWS[name], self.step_s(name)
        sent, closed = record["sent_bytes"] / 1e6, record.get("closed_bytes", 0) / 1e6
        foretold_s, bound_s, alone_s = record.get("foretold_s"), self.bound_s(name), self.alone_s(name)
        return (
            *(name, row.precision, f"{step_s:.3f}", "{:.3f}-{:.3f}".format(*spread(record["steps_s"])), f"{sent:.2f}"),
            *((f"{closed:.2f}", f"{sent / closed:.3f}") if closed else ("-", "-")),
            *(number(alone_s and step_s - alone_s), number(bound_s), number(bound_s and bound_s / step_s)),
            *(number(foretold_s), off(foretold_s, step_s), number(record.get("pace"))),
            off(record.get("foretold_at_pace_s"), step_s),
            *(self.ratio(name), self.ratio(name, record["peak_bytes"] * SAME_MEMORY)),
            *(f"{record['peak_bytes'] / 2**20:.1f}", f"{record['losses'][0]:.4f}", f"{record['losses'][-1]:.4f}"),
            self.losses_off(name),
        )

    def step_s(self, name: str) -> float:
        return statistics.median(self.rows[name]["steps_s"])

    def tokens_per_s(self, name: str) -> float:
        """Of all ranks together."""
        setting = self.setting
        tokens = setting.hosts * setting.processes * setting.micro_batches * CONFIG.context
        return tokens / self.step_s(name)

    def alone_s(self, name: str) -> float | None:
        """Seconds without communication, if that has been measured. A rank updates its own part."""
        compute = self.others.get(ROWS[name].beside)
        update_s = self.update_s(name)
        return statistics.median(compute["accumulate_s"]) + update_s if compute and update_s is not None else None

    def update_s(self, name: str) -> float | None:
        """Of masters in float32, whatever the model computes in."""
        whole = self.others.get("alone-lora" if ROWS[name].lora else "alone")
        return statistics.median(whole["update_s"]) / self.rows[name]["shared_by"] if whole else None

    def bound_s(self, name: str) -> float | None:
        record, alone_s = self.rows[name], self.alone_s(name)
        if "bound_s" not in record or alone_s is None:
            return None
        sent_s = record["closed_bytes"] / self.goodput if record["closed_bytes"] else 0.0
        return max(alone_s, sent_s, record["bound_s"] + (self.update_s(name) or 0.0))

    @cached_property
    def goodput(self) -> float:
        """Bytes a second that a host has sent at the best, as calibrated."""
        assert self.topology
        tables = self.topology.link("node").tables.values()
        return self.topology.group_size("gpu") * 1e6 * max(sent / us for table in tables for sent, us in table)

    def best(self, name: str, memory_bytes: float = float("inf")) -> str | None:
        """The fastest baseline that a row is compared with."""
        row = ROWS[name]
        alike = [n for n in self.rows if (ROWS[n].kind, ROWS[n].precision) == (BASELINE, row.against)]
        fitting = [n for n in alike if ROWS[n].lora == row.lora and self.rows[n]["peak_bytes"] <= memory_bytes]
        return min(fitting, key=self.step_s, default=None)

    def ratio(self, name: str, memory_bytes: float = float("inf")) -> str:
        best = self.best(name, memory_bytes)
        return f"{self.step_s(best) / self.step_s(name):.2f} ({best})" if best else "-"

    def losses_off(self, name: str) -> str:
        """Only where nothing on the way is less precise than in one process."""
        expected = self.others.get("one-process/alone-lora" if ROWS[name].lora else "one-process/alone")
        if not expected or ROWS[name].precision != "fp32":
            return "-"
        pairs = zip(self.rows[name]["losses"], expected["losses"], strict=True)
        return f"{max(abs(found / wanted - 1) for found, wanted in pairs):.1e}"

    def summary(self) -> Iterator[str]:
        """The fastest row of ours against baselines, and the planner's choice against the fastest."""
        for precision in dict.fromkeys(ROWS[name].precision for name in self.ordered):
            ours = [n for n in self.ordered if (ROWS[n].kind, ROWS[n].precision) == (OURS, precision)]
            for name in sorted((n for n in ours if not ROWS[n].lora), key=self.step_s)[:1]:
                yield f"- {precision}: {name} takes {self.step_s(name):.3f} s; {self._against(name)}"
        for name in (n for n in self.ordered if n.startswith("planner")):
            yield self._choice(name)
            if name in self.turns:
                yield self._in_turns(name)

    def _against(self, name: str) -> str:
        whole = [n for n in ("fsdp2", "fsdp2-compiled") if n in self.rows]
        best = self.best(name)
        ratios = {f"{best}, the best baseline": best, "FSDP2 over all": min(whole, key=self.step_s, default=None)}
        found = [f"{self.step_s(n) / self.step_s(name):.2f} times as fast as {text}" for text, n in ratios.items() if n]
        return ", ".join(found) or "there is no baseline"

    def _choice(self, name: str) -> str:
        record, limit_bytes = self.rows[name], self.limit_bytes(name)
        steps_s = {n: self.step_s(n) for n in self.ordered}
        over = record["peak_bytes"] / limit_bytes - 1
        note = f", itself {over:.1%} above the limit" if over > SAME_MEMORY - 1 else ""
        return f"- {name} ({record['plan']}): {self._against_rivals(name, steps_s)}{note}"

    def _in_turns(self, name: str) -> str:
        record = self.turns[name]
        median_s = {row: statistics.median(steps_s) for row, steps_s in record["turns_s"].items()}
        at_pace_s = record.get("foretold_at_pace_s", {})
        found = (
            f"{row} {s:.3f} s ({off(self.rows[row].get('foretold_s'), s)}, {off(at_pace_s.get(row), s)})"
            for row, s in median_s.items()
        )
        against = self._against_rivals(name, median_s)
        about = f"(off, off at pace; pace {number(record.get('pace'))})"
        return f"- in turns {about}: {', '.join(found)}: {name} {against}"

    def _against_rivals(self, name: str, steps_s: Mapping[str, float]) -> str:
        limit_bytes = self.limit_bytes(name) * SAME_MEMORY
        timed = (n for n in self.alike(name) if n in steps_s)  # a row that was run later is in no turns
        fitting = (n for n in timed if self.rows[n]["peak_bytes"] <= limit_bytes)
        fastest = min(fitting, key=steps_s.__getitem__, default=None)
        than = f"{steps_s[name] / steps_s[fastest] - 1:+.1%} against {fastest}, the fastest" if fastest else "none"
        return f"{than} of those that fit"

    def alike(self, name: str) -> list[str]:
        """Rows that the planner's could have been."""
        return [n for n in self.ordered if n.startswith("shardc-") and _suffix(n) == name.removeprefix("planner")]

    def limit_bytes(self, name: str) -> float:
        """Of the memory that the planner may use."""
        return self.rows[name].get("memory") or float("inf")


def scaling(tables: Sequence[Table]) -> Iterator[str]:
    """Tokens a second on more and more hosts, a table for each rate, of what ran on several numbers of them; and how
    many times as many as on the fewest, as a part of how many times as many hosts there are."""
    alike: dict[tuple[int, str, int], dict[int, Table]] = {}
    for table in tables:
        key = (table.setting.processes, table.setting.rate, table.setting.micro_batches)
        alike.setdefault(key, {})[table.setting.hosts] = table
    for (processes, rate, micro_batches), by_hosts in alike.items():
        if len(by_hosts) > 1:
            about = f"{processes} process{'es' * (processes > 1)} a host, {rate}, M = {micro_batches}"
            yield "\n".join([f"## Scaling, {about}", "", *markdown(list(_scaled(dict(sorted(by_hosts.items())))))])


def _scaled(by_hosts: dict[int, Table]) -> Iterator[tuple[str, ...]]:
    counts = list(by_hosts)
    rates = (f"tokens/s, {n} host{'s' * (n > 1)}" for n in counts)
    yield ("row", *rates, *(f"efficiency, {n}" for n in counts[1:]))
    for name in by_hosts[counts[0]].ordered:
        if all(name in table.rows for table in by_hosts.values()):
            found = {n: table.tokens_per_s(name) for n, table in by_hosts.items()}
            parts = {n: found[n] / n * counts[0] / found[counts[0]] for n in counts[1:]}
            yield (name, *(f"{rate:.0f}" for rate in found.values()), *(f"{part:.0%}" for part in parts.values()))


def _suffix(name: str) -> str:
    """`-bf16` of shardc-IIG-bf16."""
    return "".join(f"-{part}" for part in name.split("-")[2:])


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    if len(values) < 2:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def off(foretold_s: float | None, step_s: float) -> str:
    return f"{foretold_s / step_s - 1:+.1%}" if foretold_s else "-"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *body = rows
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in body)


COLOURS = {BASELINE: "#9aa5b1", OURS: "#4c9a6a"}


def plot(tables: Sequence[Table], folder: Path) -> list[Path]:
    """A picture a layout as PNG and SVG: a panel for each rate and number of micro-batches. Raises `ImportError` where
    there is no matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    written = []
    for layout in dict.fromkeys(table.setting.layout for table in tables):
        figure = _figure([table for table in tables if table.setting.layout == layout])
        for ending in ("png", "svg"):
            written.append(folder / f"wire-{layout}.{ending}")
            figure.savefig(written[-1], dpi=120)
    return written


def _figure(tables: Sequence[Table]) -> Any:
    from matplotlib import pyplot

    rates = list(dict.fromkeys(table.setting.rate for table in tables))
    counts = sorted({table.setting.micro_batches for table in tables})
    tall = 1 + 0.22 * max(len(table.rows) for table in tables)
    size = (8 * len(counts), tall * len(rates))
    figure, axes = pyplot.subplots(len(rates), len(counts), figsize=size, squeeze=False, layout="constrained")
    for table in tables:
        _panel(axes[rates.index(table.setting.rate)][counts.index(table.setting.micro_batches)], table)
    for panel in axes.flat:
        if not panel.has_data():  # of what was not measured
            panel.set_axis_off()
    return figure


def _panel(axes: Any, table: Table) -> None:
    """Rows by their step, fastest first, with their spread and their bound."""
    names = sorted(table.rows, key=table.step_s)
    steps_s = [table.step_s(name) for name in names]
    spreads = [spread(table.rows[name]["steps_s"]) for name in names]
    errors = [[abs(s - at[i]) for s, at in zip(steps_s, spreads, strict=True)] for i in (0, 1)]
    places = range(len(names))
    axes.barh(places, steps_s, xerr=errors, color=[COLOURS[ROWS[name].kind] for name in names], ecolor="#555555")
    bounds = [(place, bound_s) for place, name in zip(places, names, strict=True) if (bound_s := table.bound_s(name))]
    axes.plot([bound_s for _, bound_s in bounds], [place for place, _ in bounds], "|", color="#d43d3d", markersize=10)
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step (red: bound; green: shardc)", fontsize=8)
    axes.set_title(str(table.setting), fontsize=9)
