"""What a course bundle must not let pass: typical mistakes fall to a public check that is quick.

Each is run through the check that its entry names, among the tests of the checks themselves.
"""

import pytest

from utils.grading.checks import get_checks
from utils.grading.known_answers import get_mistakes

TYPICAL = {
    "ch0_sampling": {
        "get_logprobs": "prefix_ignored detached",
        "calc_entropy": "detached",
        "masked_mean": "detached",
        "sample_next_token": "greedy_always generator_ignored",
        "get_samples": "never_stops stops_with_the_first_row",
        "calc_reinforce_objective": "advantages_not_detached detached means_multiplied",
        "calc_expected_policy_gradient": "baseline_ignored",
    },
    "ch1_lora": {
        "LoraLayer": "b_starts_at_random alpha_alone",
        "TransformerWithLora.forward": "mask_ignored cached_positions_ignored",
        "TransformerWithLora.reference": "off_after_an_error gradients_stay_off",
        "TransformerWithLora.merged": "weights_stay_after_an_error",
        "calc_sft_loss": "mean_of_row_means first_token_counted",
    },
    "ch2_ppo": {
        "compute_advantages": "gamma_left_out_of_the_sum gamma_left_out_of_delta gradient_kept "
        "multiplied_by_the_mask values_beyond_the_end",
        "compute_token_rewards": "kl_not_detached kl_added",
        "normalize_reward": "plain_batch_normalisation rounding_noise_of_equal_rewards",
        "normalize_advantages": "mask_ignored masked_afterwards padding_counted "
        "plain_batch_normalisation",
        "calc_clipped_surrogate_objective": "clip_coef_high_ignored clip_without_minimum "
        "old_policy_recomputed masked_afterwards mean_of_row_means maximum ratio_of_log_probs "
        "advantages_not_detached",
        "calc_value_function_loss": "values_not_masked multiplied_by_the_mask half_forgotten "
        "mean_of_row_means returns_not_detached",
        "calc_entropy_bonus": "masked_afterwards logits_for_log_probs exponential_of_the_logits "
        "mean_of_row_means weights_detached",
        "calc_kl_penalty": "masked_afterwards logits_for_log_probs exponential_of_the_logits "
        "mean_of_row_means reference_not_detached the_other_direction",
        "get_optimizer_and_scheduler": "minimizes",
        "ReplayMemory": "not_shuffled one_epoch one_order_for_all_epochs groups_torn_apart "
        "fields_shuffled_apart",
        "make_replay_memory": "never_normalizes kl_charged_always kl_never_charged "
        "returns_after_whitening",
        "RLHFTrainer.rollout_phase": "reference_with_its_adapters values_not_shifted "
        "temperature_forgotten_in_scoring",
        "RLHFTrainer.compute_rlhf_objective": "kl_charged_twice kl_added kl_never "
        "old_policy_recomputed values_not_shifted",
        "RLHFTrainer.learning_phase": "minibatches_ignored first_minibatch_only downhill "
        "gradients_add_up",
        "RLHFTrainer.train": "counted_after_the_end",
    },
    "ch3_grpo": {
        "GrpoTrainer.rollout_phase": "a_prompt_for_each_row too_many_rows "
        "one_completion_of_each_prompt scored_by_the_reference policy_for_reference "
        "scores_normalized_first",
        "group_advantages": "rounding_noise_of_constant_groups normalised_over_the_batch "
        "one_group_for_the_batch batch_mean std_of_a_population strided_groups not_detached",
        "calc_single_update_objective": "single_mean_over_tokens no_gradient",
        "calc_per_token_kl": "other_direction reference_not_detached digits_lost k2 "
        "policy_detached",
        "calc_grpo_objective": "mean_over_tokens kl_rewarded kl_by_k1 maximum upper_clip_ignored "
        "advantages_not_detached masked_at_the_end loss",
        "process_advantages": "steps_that_have_ended normalised_by_row "
        "normalised_over_the_batch std_of_a_population_of_steps",
        "make_grpo_memory": "groups_torn_apart one_group nothing_detached scale_by_default",
        "GrpoTrainer.compute_rlhf_objective": "a_loss temperature_forgotten entropy_subtracted "
        "adapters_off reference_runs_without_kl",
        "measure_loss_and_gradient_at_start": "norm_squared sum_of_norms temperature_forgotten "
        "mask_forgotten",
    },
    "ch4_kl": {
        "calc_kl_estimate": "k1_detached reference_not_detached k4_without_its_gradient",
        "calc_exact_kl": "reference_not_detached",
        "calc_expected_gradient": "sampler_ignored",
    },
    "ch5_rlvr": {
        "calc_rlvr_objective": "upper_clip_ignored clipped_alone advantages_not_detached",
        "calc_sequence_ratio": "old_not_detached",
        "leave_one_out_advantages": "others_not_detached",
        "RlvrTrainer.sample_groups": "never_dynamic stops_at_the_first",
        "RlvrTrainer.rollout_phase": "nothing_masked",
        "RlvrTrainer.compute_rlhf_objective": "kl_charged_twice loss_mode_not_handed_on",
    },
    "ch6_preferences": {
        "calc_preference_loss": "sigmoid_then_log raw_difference chosen_and_rejected_swapped",
        "calc_preference_accuracy": "ties_are_wrong",
        "RewardModel.forward": "last_column number_of_real_tokens hidden_detached",
        "make_reward_fn": "gradient_left_on standardised_by_the_batch",
        "calc_dpo_loss": "detached_before_the_loss reference_not_detached "
        "policy_and_reference_swapped chosen_and_rejected_swapped rewards_not_detached",
        "best_of_n": "the_best_of_all index_within_the_group",
        "rejection_sample": "not_shuffled max_of_all_rows drawn_by_a_softmax "
        "temperature_multiplied sorted_instead_of_shuffled too_many with_replacement "
        "generator_ignored",
        "pool_advantages": "std_of_a_population mean_and_std_of_the_kept all_pools_together "
        "constant_pools_divided",
    },
    "ch7_scale": {
        "accumulate_gradients": "mean_of_means one_backward_at_the_end tokens_for_every_mode",
        "checkpoint_blocks": "nothing_recomputed forward_left_in_place not_after_an_error "
        "hooks_off_in_the_backward last_block_forgotten",
        "shard_model": "nothing_sharded root_alone blocks_alone root_as_it_comes "
        "value_head_not_registered",
        "sync_gradients": "missing_gradients_skipped skipped_in_a_loop "
        "one_message_per_parameter needs_a_group",
        "global_masked_mean": "masked_by_multiplication mean_of_means no_tokens_anywhere "
        "needs_a_group",
        "to_trl_config": "exact_kl_dropped dropped_silently token_mean_is_bnpo",
        "unsharded": "not_after_an_error",
        "estimate_memory": "mlp_adapters_forgotten",
    },
    "ch8_inside": {"steer": "every_hook_removed"},
    "ch9_async": {
        "RolloutQueue": "newest_first age_is_the_staleness age_counted_in_rollouts",
        "measure_mismatch": "ratio_upside_down k3_of_the_other_direction weights_of_tokens "
        "mean_in_place_of_the_product",
        "get_kept_logprobs": "not_renormalised nothing_is_minus_infinity crossing_token_dropped "
        "temperature_forgotten",
        "calc_importance_weights": "not_detached mean_of_the_sequence truncated_below_too "
        "masked_by_multiplication",
        "calc_async_objective": "gradient_through_the_weight denominator_of_all_tokens "
        "masked_but_not_weighed advantages_not_detached",
        "may_start": "strictly_less itself_counted",
    },
    "ch10_tools": {
        "run_calculator": "eval_of_what_the_policy_wrote line_break_forgotten computed_in_floats "
        "dollar_before_a_line_break",
        "get_own_mask": "padding_is_own everything_that_was_written turns_alternate calls_left_out",
        "sample_in_turns": "answers_drawn_instead whole_completion_to_the_tool one_call_too_many "
        "logprobs_of_what_nobody_took numbers_drawn_in_the_loop",
        "reward_fn_priced": "price_paid_once only_who_is_right_pays the_tools_number_counts",
        "calc_tool_objective": "counted_in_the_mean zeros_in_place_of_nan "
        "masked_by_multiplication mean_over_all_tokens advantages_not_detached",
        "calc_call_value": "price_forgotten only_who_is_right_pays",
        "measure_exactly": "end_forgotten call_and_the_choice_to_call the_tools_words_predicted",
        "compare_within_kinds": "parted_over_all_kinds parted_by_the_calls calls_left_in_place",
    },
}


@pytest.mark.parametrize("chapter", TYPICAL)
def test_a_typical_mistake_falls_to_a_public_check(chapter):
    checks = {check.name: check for found in get_checks(chapter).values() for check in found}
    rejected_by = {(m.exercise, m.name): m.mistakes[0].rejected_by for m in get_mistakes(chapter)}
    for exercise, names in TYPICAL[chapter].items():
        for name in names.split():
            check = checks[rejected_by[exercise, name]]
            assert check.public, (exercise, name, check.name)
            assert not check.slow, (exercise, name, check.name)
