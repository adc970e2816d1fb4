"""Chapter 4: what an estimator of the KL estimates, and what its gradient does.

Builds the estimators k1 to k4 of KL(policy ‖ reference), their exact bias and spread, and the exact
expectation of the gradient that each has, as a term of the loss or of the reward, on samples from
the policy itself or from an older one. Then a GRPO trainer that can use any of them as its penalty.

Simplified: the exact results are for one token, by enumerating a vocabulary; the notebook
enumerates two.

Papers: Schulman's note on approximating the KL (http://joschu.net/blog/kl-approx.html); GRPO (Shao
et al., 2024, arXiv:2402.03300, eq. 4); on estimators in the loss and in the reward,
arXiv:2510.01555 and arXiv:2512.21852.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from solutions.ch0_sampling import at_least_float32, masked_mean
from solutions.ch2_ppo import ReplayMinibatch
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer, calc_grpo_objective
from utils.validation import require, require_option, shape_checked

KINDS = ("k1", "k2", "k3", "k4")

# --- Values -------------------------------------------------------------------------------------


@shape_checked
def calc_kl_estimate(
    logprobs: Float[Tensor, "*shape"],
    ref_logprobs: Float[Tensor, "*shape"],
    kind: str,
    old_logprobs: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Estimate KL(policy ‖ reference) from each sampled token's log-probabilities, in nats.

    With l = logprobs - ref_logprobs: k1 = l; k2 = l² / 2; k3 = exp(-l) - 1 + l, with `expm1`; k4 =
    ratio l, where ratio = exp(logprobs - old_logprobs). `old_logprobs` come from the policy that
    sampled; None means the policy itself, so use `logprobs`, detached. Only k4 reads them.
    (k1 to k3: Schulman; k3 as a penalty: GRPO, eq. 4.)

    Gradient flows through `logprobs` alone; in k4 it flows through the ratio too.

    Raises ValueError if `kind` is none of these.
    """
    require(kind in KINDS, f"kind should be one of {', '.join(KINDS)}, but is {kind!r}")
    logratio = logprobs - ref_logprobs.detach()
    if kind == "k1":
        return logratio
    if kind == "k2":
        return logratio.square() / 2
    if kind == "k3":
        return torch.expm1(-logratio) + logratio
    old_logprobs = logprobs if old_logprobs is None else old_logprobs
    return torch.exp(logprobs - old_logprobs.detach()) * logratio


@shape_checked
def calc_exact_kl(
    logits: Float[Tensor, "*rest vocab"], ref_logits: Float[Tensor, "*rest vocab"]
) -> Float[Tensor, "*rest"]:
    """Return KL(policy ‖ reference) = sum_v p_v (log p_v - log q_v), over all tokens v, in nats.

    p = softmax(logits), q = softmax(ref_logits). A token with p = 0 (a logit of -inf) counts as 0,
    in the gradient too. The reference is a constant: detached.
    """
    logprobs = at_least_float32(logits).log_softmax(-1)
    ref_logprobs = at_least_float32(ref_logits.detach()).log_softmax(-1)
    # 0 * -inf is nan, so impossible tokens are masked out before the product.
    logratio = (logprobs - ref_logprobs).masked_fill(logits == -torch.inf, 0.0)
    return (logprobs.exp() * logratio).sum(-1)


@shape_checked
def calc_estimator_stats(
    logits: Float[Tensor, "vocab"], ref_logits: Float[Tensor, "vocab"], kind: str
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the exact bias and standard deviation of an estimate from one sampled token.

    Over the whole vocabulary, with p = softmax(logits): mean = sum_v p_v k(v), bias = mean -
    KL(policy ‖ reference), std = sqrt(sum_v p_v (k(v) - mean)²), in nats.

    Raises ValueError if `kind` is none of `calc_kl_estimate`'s.
    """
    logprobs = logits.log_softmax(-1)
    estimates = calc_kl_estimate(logprobs, ref_logits.log_softmax(-1), kind)
    probs = logprobs.exp()
    mean = probs @ estimates
    std = (probs @ (estimates - mean).square()).sqrt()
    return mean - calc_exact_kl(logits, ref_logits), std


# --- Gradients ----------------------------------------------------------------------------------


@shape_checked
def calc_expected_gradient(
    logits: Float[Tensor, "vocab"],
    ref_logits: Float[Tensor, "vocab"],
    kind: str,
    place: str,
    sampler_logits: Float[Tensor, "vocab"] | None = None,
) -> Float[Tensor, "vocab"]:
    """Return the exact expected gradient, with respect to the logits, of one token's estimate.

    The token v is drawn from s = softmax(sampler_logits), or from the policy itself if it is None.
    The drawing is not differentiated: s is a constant. With p = softmax(logits),

    - place "loss": sum_v s_v grad k(v), of the estimate as a loss, to be minimised;
    - place "reward": sum_v s_v k(v) grad log p_v. This is the policy gradient (REINFORCE, without
      a ratio of its own) of the reward -k(v), a number without gradient, and then negated, so you
      can compare it with the gradient of a loss.

    s is k4's old policy. The result carries no gradient, and the inputs stay as they were, without
    a `.grad`. Raises ValueError if `kind` or `place` is none of these.
    """
    require(place in ("loss", "reward"), f"place should be 'loss' or 'reward', but is {place!r}")
    logits = logits.detach().requires_grad_()
    logprobs = logits.log_softmax(-1)
    old_logits = logits if sampler_logits is None else sampler_logits
    old_logprobs = old_logits.detach().log_softmax(-1)
    ref_logprobs = ref_logits.log_softmax(-1)
    per_token = calc_kl_estimate(logprobs, ref_logprobs, kind, old_logprobs)
    if place == "reward":
        per_token = per_token.detach() * logprobs
    return torch.autograd.grad(old_logprobs.exp() @ per_token, logits)[0]


# --- A trainer with any of them -----------------------------------------------------------------


@dataclass
class KlArgs(GrpoArgs):
    """Say what a run is made of: GRPO whose penalty is kl_coef times the estimate `kl_estimator`,
    in the loss.

    Raises ValueError unless `kl_estimator` is given: what you compare should not have a default.
    """

    kl_estimator: str | None = None  # k1, k2, k3 or k4

    def __post_init__(self):
        super().__post_init__()
        require_option(self, "kl_estimator", *KINDS)
        require_option(self, "kl_kind", "k3")  # the field of chapter 3, which is not used


class KlTrainer(GrpoTrainer):
    """Train as chapter 3 does, with a choice of KL estimate."""

    args: KlArgs
    args_class = KlArgs

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Return GRPO objective - KL penalty + entropy bonus (maximised).

        The penalty is the mean estimate over each completion, then over the batch; "kl_term" in the
        metrics, before it is multiplied by the coefficient.
        """
        args, mask, prompt_len = self.args, minibatch.mask, minibatch.prompt_len
        scored = self.score(minibatch.input_ids, minibatch.attention_mask, prompt_len)
        logprobs = scored.logprobs
        old_logprobs = self.get_old_logprobs(minibatch, logprobs)
        objective = calc_grpo_objective(
            logprobs,
            old_logprobs,
            None,
            minibatch.advantages,
            mask,
            args.clip_coef,
            args.clip_coef_high,
            beta=0.0,
        )
        if args.kl_coef > 0:
            kept = (logprobs, minibatch.ref_logprobs, old_logprobs)
            current, ref, old = (x.masked_fill(~mask, 0.0) for x in kept)
            estimates = calc_kl_estimate(current, ref, args.kl_estimator, old)
            kl_term = masked_mean(estimates, mask, dim=-1).mean()
            self.metrics["kl_term"].append(kl_term.item())
            objective = objective - args.kl_coef * kl_term
        objective = objective + args.ent_coef * self.measure_entropy(minibatch, scored)
        self.record_ratios(logprobs, minibatch)
        return objective
