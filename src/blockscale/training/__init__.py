"""Training a small GPT under several recipes, to see what each does to its loss."""

from .compare import compare
from .data import Corpus, Text, read_text
from .gpt import GPT
from .launch import RankLost, Work, torchrun_place, train_as_rank
from .pace import steps_within
from .ranks import Ranks
from .recipes import BASELINE, DEFAULT_RECIPES, RECIPES, check_recipes, default_recipes
from .report import prepare_folder, write_report
from .results import Comparison, Row
from .run import Progress, Run, train
from .saves import Plan, Saves, Stopped
from .settings import Settings
from .sources import choose_text, python_sources
from .statistics import Statistics

__all__ = [
    "BASELINE",
    "DEFAULT_RECIPES",
    "GPT",
    "RECIPES",
    "Comparison",
    "Corpus",
    "Plan",
    "Progress",
    "RankLost",
    "Ranks",
    "Row",
    "Run",
    "Saves",
    "Settings",
    "Statistics",
    "Stopped",
    "Text",
    "Work",
    "check_recipes",
    "choose_text",
    "compare",
    "default_recipes",
    "prepare_folder",
    "python_sources",
    "read_text",
    "steps_within",
    "torchrun_place",
    "train",
    "train_as_rank",
    "write_report",
]
