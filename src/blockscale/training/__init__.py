"""Training a small GPT under several recipes, to see what each does to its loss."""

from .compare import compare
from .data import Corpus, read_text
from .gpt import GPT
from .recipes import BASELINE, DEFAULT_RECIPES, RECIPES, check_recipes
from .report import prepare_folder, write_report
from .results import Comparison, Row
from .run import Progress, Run, train
from .settings import Settings
from .statistics import Statistics

__all__ = [
    "BASELINE",
    "DEFAULT_RECIPES",
    "GPT",
    "RECIPES",
    "Comparison",
    "Corpus",
    "Progress",
    "Row",
    "Run",
    "Settings",
    "Statistics",
    "check_recipes",
    "compare",
    "prepare_folder",
    "read_text",
    "train",
    "write_report",
]
