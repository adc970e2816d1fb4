"""Lends `utils.course.evaluation` to notebooks that were made when it stood here."""

from utils.course.evaluation import (
    evaluate_additions,
    evaluate_reviews,
    measure_distinct_bigrams,
    sample_prompts,
)

__all__ = ["evaluate_additions", "evaluate_reviews", "measure_distinct_bigrams", "sample_prompts"]
