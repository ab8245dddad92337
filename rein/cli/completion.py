"""`rein --completion SHELL`: a static script that completes commands, recipes and options.

The words are those of the help texts. Making the script imports torch and all recipes, and completing a word starts no
process.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence

import attrs

from rein.cli.catalog import recipe_names
from rein.cli.experiment import agent_names

_OPTION = re.compile(
    r"(?:^|│|  ) *(?:-h, )?(--[a-z][\w-]*(?:, --[a-z][\w-]*)*)(?: \{([^{}|]+)\}(?!\|))?", re.MULTILINE
)  # groups of options are side by side
_OF_RECIPES = ("train", "sweep")  # commands whose first argument is a recipe
_TOP = ("--help", "--version", "--completion")


@attrs.frozen
class _Words:
    """Words to complete."""

    commands: Sequence[str]
    flags: Mapping[str, list[str]]  # of each command
    recipes: Mapping[str, list[str]]  # further options of each recipe
    choices: Mapping[str, str]  # values of an option, separated by spaces


def completion_script(shells: Sequence[str], commands: Sequence[str], main: Callable[[list[str]], None]) -> str:
    """Return the script for the shell that the user has named, which completes `commands` and their options.

    `main` runs a command, and prints its help.
    """
    if len(shells) != 1 or shells[0] not in _SCRIPTS:
        raise ValueError(f"rein {' '.join(['--completion', *shells])}: give one of the shells {', '.join(_SCRIPTS)}")
    choices = {"--agent": " ".join(agent_names())}
    flags = {command: _options(choices, main, [command]) for command in commands}
    recipes = {name: _options(choices, main, ["train", name]) for name in recipe_names()}
    own = {name: [flag for flag in named if flag not in flags["train"]] for name, named in recipes.items()}
    return _SCRIPTS[shells[0]](_Words(commands, flags, own, choices))


def _options(choices: dict[str, str], main: Callable[[list[str]], None], words: list[str]) -> list[str]:
    """Return the flags in the help of a command, and add the values that an option accepts to `choices`."""
    shown, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"  # one line per option
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        del os.environ["COLUMNS"]
        os.environ |= {} if columns is None else {"COLUMNS": columns}
    flags: list[str] = []
    for names, values in _OPTION.findall(shown.getvalue()):
        flags += names.split(", ")
        if values:
            choices[names] = values.replace(",", " ")
    return flags


def _bash(words: _Words) -> str:
    of_recipes = "|".join(_OF_RECIPES)
    return f"""\
_rein() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{_cases(words.choices)}
    esac
    case "$COMP_CWORD:$current" in
        1:*)
            words="{" ".join((*words.commands, *_TOP))}" ;;
        *:-*)
            case "$command" in
{_cases({name: " ".join(flags) for name, flags in words.flags.items()})}
            esac
            case "$command" in
                {of_recipes})
                    case "${{COMP_WORDS[2]}}" in
{_cases({name: "$words " + " ".join(flags) for name, flags in words.recipes.items()})}
                    esac ;;
            esac ;;
        2:*)
            case "$command" in
                {of_recipes}) words="{" ".join(words.recipes)}" ;;
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _rein rein
"""


def _cases(values: Mapping[str, str]) -> str:
    return "\n".join(f'                {name}) words="{text}" ;;' for name, text in values.items())


def _zsh(words: _Words) -> str:
    return f"autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n{_bash(words)}"


def _fish(words: _Words) -> str:
    recipes = f"__fish_seen_subcommand_from {' '.join(_OF_RECIPES)}"
    lines = [f"-n __fish_use_subcommand -f -a '{' '.join(words.commands)}'"]
    lines += [f"-n __fish_use_subcommand -l {flag[2:]}" for flag in _TOP]
    lines.append(f"-n '{recipes}; and test (count (commandline -opc)) -eq 2' -f -a '{' '.join(words.recipes)}'")
    of_recipes = {f"{recipes}; and __fish_seen_subcommand_from {name}": own for name, own in words.recipes.items()}
    of_commands = {f"__fish_seen_subcommand_from {name}": own for name, own in words.flags.items()}
    for condition, flags in (of_commands | of_recipes).items():
        for flag in flags:
            values = f" -x -a '{words.choices[flag]}'" if flag in words.choices else ""
            lines.append(f"-n '{condition}' -l {flag[2:]}{values}")
    return "".join(f"complete -c rein {line}\n" for line in lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
