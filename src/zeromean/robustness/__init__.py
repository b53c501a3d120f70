"""Attacks on classifiers, random ones too, and what their success is worth.

An attack on a random network averages over its noise, or it flatters; and what it found counts only
when judged with fresh noise. `evaluate` does all of it, with checks for masked gradients.
"""

from zeromean.robustness.adapter import MeanClassifier
from zeromean.robustness.auto_attack import autoattack
from zeromean.robustness.checks import Check, checks_table, gradient_masking_checks
from zeromean.robustness.detection import Detection, detect
from zeromean.robustness.examples import AdversarialExamples, random_noise
from zeromean.robustness.judgement import Judgement, judge
from zeromean.robustness.pgd import eot_pgd, iterative_fast_sign
from zeromean.robustness.report import RobustnessReport, evaluate

__all__ = [
    "AdversarialExamples",
    "Check",
    "Detection",
    "Judgement",
    "MeanClassifier",
    "RobustnessReport",
    "autoattack",
    "checks_table",
    "detect",
    "eot_pgd",
    "evaluate",
    "gradient_masking_checks",
    "iterative_fast_sign",
    "judge",
    "random_noise",
]
