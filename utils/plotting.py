"""Plots of what trainers record."""

from pathlib import Path

from matplotlib.figure import Figure

PANELS = {  # the first of the metrics that a run recorded
    "mean reward": ("reward",),
    "KL(policy ‖ reference), nats per token, {}": ("kl_exact", "kl_k3"),
    "entropy, nats per token": ("entropy",),
    "completion length, tokens": ("completion_len",),
}


def plot_history(histories: dict[str, list[dict]], path: Path | None = None) -> Figure:
    """Reward, KL, entropy and completion length by phase, one line for each named run.

    The KL is the exact one where the run computed it, else the k3 estimate; a run without a
    reference has no line there. Saved as an image if `path` is given.
    """
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(" · ".join(histories))
    for axes, (label, keys) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, history in histories.items():
            key = next((key for key in keys if history and key in history[0]), None)
            if key is not None:
                label = label.format({"kl_k3": "k3 estimate (noisy)"}.get(key, "exact"))
                phases = [row["phase"] for row in history]
                axes.plot(phases, [row[key] for row in history], label=name)
        axes.set_xlabel("phase")
        axes.set_title(label.replace(", {}", ""), fontsize=10)
        axes.grid(alpha=0.3)
        if len(histories) > 1:
            axes.legend(fontsize=8)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return figure
