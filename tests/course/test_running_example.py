"""The four completions that chapters 0 to 6 compute with, and what each chapter says of them."""

import math

import pytest
import torch

from solutions.ch0_sampling import calc_reinforce_objective
from solutions.ch2_ppo import calc_clipped_surrogate_objective
from solutions.ch3_grpo import group_advantages
from solutions.ch4_kl import calc_kl_estimate
from solutions.ch5_rlvr import aggregate_tokens, leave_one_out_advantages
from utils.authoring.notebooks import ROOT

LOGPROBS = [[-2.0], [-1.0], [-2.0, -1.0], [-3.0, -1.0, -0.5, -0.5]]
REWARDS = torch.tensor([0.0, 1.0, 1.0, 1.0])
MASK = torch.tensor([[t < len(row) for t in range(4)] for row in LOGPROBS])
PADDED = torch.tensor([row + [0.0] * (4 - len(row)) for row in LOGPROBS])
ADVANTAGES = REWARDS - REWARDS.mean()


@pytest.mark.parametrize(
    ("chapter", "phrase"),
    [
        ("ch0_sampling", "| d | `0+2=2` `3+1=4` `so` `42` | −3, −1, −0.5, −0.5 | 1 |"),
        ("ch0_sampling", r"(1.5 - 0.25 - 0.75 - 1.25) / 8 = -0.094"),
        ("ch2_ppo", r"$\min(0.37,\, 0.30) = 0.30$"),
        ("ch2_ppo", r"$\min(-1.12, -0.90) = -1.12$"),
        ("ch3_grpo", "so the advantages are $-1.5, 0.5, 0.5, 0.5$"),
        ("ch3_grpo", r"/4 = 0$, and a mean over tokens would be $"),
        ("ch4_kl", "$k_1 = -0.4$, $k_2 = 0.08$, $k_3 = 1.492 - 1 - 0.4 = 0.092$"),
        ("ch5_rlvr", "$0 - 1 = -1$, and the other three are $1 - 2/3 = 1/3$"),
        ("ch5_rlvr", r"Token: $(-0.75 + 7 \cdot 0.25)/8 = 1/8$. Constant with $L = 4$: $1/16$"),
        ("ch6_preferences", r"= 0.45$ and the loss $-\log \sigma(0.45) = 0.493$"),
    ],
)  # fmt: skip
def test_a_chapter_says_it(chapter, phrase):
    assert phrase in (ROOT / f"chapters/source/{chapter}.md").read_text(encoding="utf-8")


def test_it_is_what_the_solutions_compute():
    logprobs = PADDED.clone().requires_grad_()
    objective = calc_reinforce_objective(logprobs, ADVANTAGES, MASK)
    assert round(objective.item(), 3) == -0.094
    (gradient,) = torch.autograd.grad(objective, logprobs)
    expected = torch.tensor([-3 / 32, 1 / 32, 1 / 32, 1 / 32])[:, None] * MASK
    torch.testing.assert_close(gradient, expected)

    for row, value in ((1, 0.30), (0, -1.12)):  # b and a, whose tokens have become likelier
        found = calc_clipped_surrogate_objective(
            PADDED[row : row + 1, :1] + 0.4,
            PADDED[row : row + 1, :1],
            ADVANTAGES[row].view(1, 1),
            MASK[row : row + 1, :1],
            0.2,
        )
        assert round(found.item(), 2) == value

    scaled = group_advantages(REWARDS, 4)
    assert scaled.tolist() == pytest.approx([-1.5, 0.5, 0.5, 0.5], rel=1e-3)
    over_tokens = (scaled[:, None] * MASK).sum() / MASK.sum()
    assert over_tokens.item() == pytest.approx(0.25, rel=1e-3)

    policy, reference = torch.tensor([[-2.0]]), torch.tensor([[-1.6]])
    estimates = [calc_kl_estimate(policy, reference, kind).item() for kind in ("k1", "k2", "k3")]
    assert estimates == pytest.approx([-0.4, 0.08, 0.092], abs=5e-4)

    others = leave_one_out_advantages(REWARDS, 4)
    assert others.tolist() == pytest.approx([-1, 1 / 3, 1 / 3, 1 / 3])
    x = ADVANTAGES[:, None] * MASK
    modes = {"sequence": 0.0, "token": 1 / 8, "constant": 1 / 16}
    for mode, mean in modes.items():
        assert aggregate_tokens(x, MASK, mode, 4).item() == pytest.approx(mean, abs=1e-7)

    assert round(math.log1p(math.exp(-0.45)), 3) == 0.493
