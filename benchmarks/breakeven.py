"""`kvferry bench map`: where splitting pays. Goodput ratio over prompt length and output length.

Each cell is a small comparison of its own: the best split against the best colocated arm, at an SLO that follows from
the cell: so many times what an idle machine needs. Cells where colocated wins are drawn as plainly as the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.arms import Load
from benchmarks.arms_under_test import ArmUnderTest, Say
from benchmarks.compare import CompareSettings, compare
from benchmarks.metrics import Slo
from benchmarks.verdict import ratio
from benchmarks.workload import Lengths, synthetic


@dataclass(frozen=True)
class Cell:
    """One point of the map."""

    prompt_tokens: int
    output_tokens: int
    slo: Slo
    colocated_goodput: float
    two_tier_goodput: float
    goodput_ratio: float | None


def measure_map(
    arms: list[ArmUnderTest],
    prompt_lengths: list[int],
    output_lengths: list[int],
    settings: CompareSettings,
    slo_factor: float,
    say: Say,
) -> list[Cell]:
    """One comparison per cell; the settings' SLO is replaced by the cell's own."""
    cells = []
    for prompt_tokens in prompt_lengths:
        for output_tokens in output_lengths:
            load = Load(
                f"{prompt_tokens}-{output_tokens}",
                f"prompts of {prompt_tokens} tokens, answers of {output_tokens}",
                lambda count, seed, p=prompt_tokens, o=output_tokens: synthetic(  # type: ignore[misc]
                    count, Lengths("uniform", p, 0.1), Lengths("fixed", o), seed
                ),
            )
            slo, seconds_each = idle_slo(arms, load, slo_factor)
            cell_settings = replace(settings, slo=slo, first_rate=1 / seconds_each, with_timeline=False)
            comparison = compare(arms, load, cell_settings, say)
            cells.append(
                Cell(
                    prompt_tokens,
                    output_tokens,
                    slo,
                    comparison.best_colocated.goodput if comparison.best_colocated else 0.0,
                    comparison.best_two_tier.goodput if comparison.best_two_tier else 0.0,
                    ratio(comparison),
                )
            )
    return cells


def idle_slo(arms: list[ArmUnderTest], load: Load, factor: float) -> tuple[Slo, float]:
    """`factor` times the TTFT and TPOT of lone requests, the slowest arm's, so that every arm can meet it when idle.

    Also returns the seconds that a lone request takes.
    """
    ttft, tpot, whole = 0.0, 0.0, 0.0
    for under_test in arms:
        for request in load.make(2, 17):
            [record] = under_test.offer([replace(request, arrival=0.0)], timeout=120).records
            if not record.is_ok:
                raise ValueError(f"{load.describe}: {under_test.name} can't serve it: {record.error}")
            ttft, tpot = max(ttft, record.ttft or 0.0), max(tpot, record.tpot or 0.0)
            whole = max(whole, record.e2e or 0.0)
    return Slo(ttft_ms=ttft * factor * 1e3, tpot_ms=(tpot * factor * 1e3) or None), whole


def write_map(cells: list[Cell], folder: Path) -> Path:
    """Writes map.png and map.json. Returns the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = sorted({cell.prompt_tokens for cell in cells})
    outputs = sorted({cell.output_tokens for cell in cells})
    values = np.full((len(outputs), len(prompts)), np.nan)
    for cell in cells:
        if cell.goodput_ratio:
            values[outputs.index(cell.output_tokens), prompts.index(cell.prompt_tokens)] = np.log2(cell.goodput_ratio)
    figure, axes = plt.subplots(figsize=(6.4, 4.4), dpi=110, layout="constrained")
    image = axes.imshow(values, origin="lower", cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(len(prompts)), [str(p) for p in prompts])
    axes.set_yticks(range(len(outputs)), [str(o) for o in outputs])
    for cell in cells:
        where = prompts.index(cell.prompt_tokens), outputs.index(cell.output_tokens)
        text = "none" if cell.goodput_ratio is None else f"{cell.goodput_ratio:.2f}"
        axes.text(*where, text, ha="center", va="center")
    axes.set(
        title="Goodput of the best split over the best colocated arm\n(blue: splitting pays; red: colocated wins)",
        xlabel="prompt tokens", ylabel="output tokens",
    )  # fmt: skip
    figure.colorbar(image, label="log2 of the ratio")
    picture = folder / "map.png"
    figure.savefig(picture)
    plt.close(figure)
    (folder / "map.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1, allow_nan=False))
    return picture
