"""Output of the command line in terminals of 80 and 140 columns, and in a pipe."""

from __future__ import annotations

import json
import subprocess

import pytest

from rein.cli import main
from rein.cli.completion import completion_script

HELPFUL = ("train", "resume", "sweep", "evaluate", "show", "plot", "replay", "view", "verify", "compact", "export")
REASON = "RuntimeError: the simulator has no license, so that nothing could be computed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs with long names and many options, and two that failed for the same reason."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(4):
        options = {f"option_{letter}": letter * 8 + str(number) for letter in "abcdef"}
        recipe = {"config": {"name": "cartpole", "options": {"seed": number, **options}}}
        run = folder / f"a-comparison-of-learning-rates/seed-{number}"
        run.mkdir(parents=True)
        ended = {"status": "failed", "reason": REASON} if number > 1 else {"status": "completed"}
        (run / "run.json").write_text(json.dumps({"parts": {"recipe": recipe}, "ended": ended}))
        (run / "metrics.csv").write_text(
            f"epoch,env_steps,seconds,episode_return_100\n1,{1000 * number},2.5,{number}.5\n"
        )
    return folder


def printed(capsys, *words):
    main(words)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [80, 140])
def test_table_of_runs_fits_with_whole_names(capsys, monkeypatch, folder, width):
    monkeypatch.setenv("COLUMNS", str(width))
    header, *lines = printed(capsys, "runs", str(folder))
    assert all(len(line) <= width for line in (header, *lines[:4]))
    assert lines[3].startswith("a-comparison-of-learning-rates/seed-3  failed")
    assert ("option a" in header, "option f" in lines[-1]) == (width == 140, True)
    assert [line.rpartition(": ")[0] for line in lines if REASON[14:] in line] == [
        "a-comparison-of-learning-rates/seed-2, a-comparison-of-learning-rates/seed-3: RuntimeError"
    ]


def test_piped_table_of_runs_has_all_columns_separated_by_tabs(capsys, monkeypatch, folder):
    monkeypatch.delenv("COLUMNS", raising=False)
    header, *rows = (line.split("\t") for line in printed(capsys, "runs", str(folder)))
    assert header[-2:] == ["option f", "reason"]
    assert [row[header.index("status")] for row in rows] == ["completed", "completed", "failed", "failed"]
    assert rows[3][-2:] == ["ffffffff3", REASON]


def test_runs_are_printed_as_json(capsys, folder):
    runs = json.loads("\n".join(printed(capsys, "runs", str(folder), "--json")))
    assert [(run["return"], run["env_steps"], run["options"]["seed"]) for run in runs[2:]] == [
        (2.5, 2000, 2),
        (3.5, 3000, 3),
    ]


@pytest.mark.parametrize("column", ["return", "env-steps", "seed", "episode_return_100"])
def test_runs_are_sorted_by_a_column_an_option_or_a_metric(capsys, folder, column):
    runs = json.loads("\n".join(printed(capsys, "runs", str(folder), "--json", "--sort", column)))
    assert [run["options"]["seed"] for run in runs] == [3, 2, 1, 0]


def test_error_of_unknown_column_lists_the_columns(capsys, folder):
    with pytest.raises(SystemExit):
        main(["runs", str(folder), "--sort", "score"])
    assert "env_steps" in capsys.readouterr().err


@pytest.mark.parametrize("command", HELPFUL)
@pytest.mark.parametrize("width", [80, 140])
def test_command_without_arguments_shows_its_help(capsys, monkeypatch, command, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit, match="2"):
        main([command])
    shown = capsys.readouterr()
    assert shown.out.startswith(f"usage: rein {command}") and not shown.err
    assert max(map(len, shown.out.splitlines())) <= width
    assert "Args:" not in shown.out


def test_usage_fits_in_80_columns(capsys):
    assert max(map(len, printed(capsys, "--help"))) < 80


@pytest.mark.parametrize("width", [80, 140, None])
def test_list_has_one_line_per_recipe_if_the_width_allows_it(capsys, monkeypatch, width):
    if width is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(width))
    lines = printed(capsys, "list")
    assert max(map(len, lines)) <= (width or 1000)
    assert all(line == line.rstrip() for line in lines)
    assert any(line.startswith(" ") for line in lines) == (width == 80)


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def script(request):
    return request.param, completion_script([request.param], ["train", "sweep", "plot", "list"], main)


@pytest.mark.slow  # imports all recipes
def test_completion_script_has_commands_recipes_and_their_options(script):
    shell, text = script
    for word in ("sweep", "cartpole-dqn", "learning-rate", "epsilon-env-steps", "clock", "vector_steps"):
        assert word in text
    if shell == "bash":
        cases = {
            "rein sw": "sweep",
            "rein train cartp": "cartpole cartpole-dqn",
            "rein train cartpole --learning": "--learning-rate",
            "rein sweep cartpole --tri": "--trials",
            "rein plot --clock vec": "vector_steps",
            "rein plot runs": "",
        }
        lines = [
            f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; _rein; echo ${{COMPREPLY[@]}}" for words in cases
        ]
        done = subprocess.run(["bash", "-c", "\n".join([text, *lines])], capture_output=True, text=True, check=True)
        assert dict(zip(cases, done.stdout.splitlines(), strict=True)) == cases


def test_error_of_unknown_shell_lists_the_known_shells(capsys):
    with pytest.raises(SystemExit):
        main(["--completion", "tcsh"])
    assert "bash, zsh, fish" in capsys.readouterr().err
