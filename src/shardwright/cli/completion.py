"""``shardwright completion SHELL``: what a shell needs to complete commands, options and values."""

# A script of words that are written out, and none that asks this program at every key: starting
# Python takes longer than a reader waits. All of it comes from the parsers, so that no option is
# forgotten; whoever installs another version runs the command again.

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardwright.core.errors import EXIT_OK


class Option(NamedTuple):
    """An option, or an argument, which has no names; its ``values`` where only these are right."""

    names: tuple[str, ...]
    value: str
    values: tuple[str, ...]
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``completion``."""
    parser.epilog = (
        'bash: eval "$(shardwright completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc '
        "after compinit; fish: completion fish > ~/.config/fish/completions/shardwright.fish"
    )
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=", ".join(SHELLS))


def execute(options: argparse.Namespace) -> int:
    """Print the script."""
    from shardwright.cli.main import COMMANDS, parsers

    _, found = parsers(*COMMANDS)
    known = {name: tuple(_options(parser)) for name, parser in found.items()}
    print("\n".join(SHELLS[options.shell](known, COMMANDS)))
    return EXIT_OK


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        values = tuple(map(str, action.choices or ()))
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        value = "" if action.nargs == 0 else metavar
        yield Option(tuple(action.option_strings), value, values, action.help or "")


Known = Mapping[str, tuple[Option, ...]]
Texts = Mapping[str, str]


def _bash(known: Known, texts: Texts) -> Iterator[str]:
    yield "_shardwright() {"
    yield "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words= values="
    yield '  case "${COMP_WORDS[1]} $prev" in'
    for name, options in known.items():
        for option in (each for each in options if each.values and each.names):
            patterns = "|".join(f'"{name} {each}"' for each in option.names)
            yield f"    {patterns}) values='{' '.join(option.values)}';;"
    yield '  esac\n  case "${COMP_WORDS[1]}" in'
    for name, options in known.items():
        words = " ".join(each for option in options for each in option.names)
        alone = " ".join(each for option in options if not option.names for each in option.values)
        yield f"    {name}) [[ $cur == -* ]] && words='{words}' || words='{alone}';;"
    yield "  esac"
    yield f"  [[ $COMP_CWORD == 1 ]] && words='{' '.join(texts)}'"
    yield '  COMPREPLY=($(compgen -W "${values:-$words}" -- "$cur"))'
    yield "}\ncomplete -o default -F _shardwright shardwright"


def _zsh(known: Known, texts: Texts) -> Iterator[str]:
    yield "#compdef shardwright\n_shardwright() {\n  local -a commands=("
    yield from (f"    {_quoted(f'{name}:{text}')}" for name, text in texts.items())
    yield "  )\n  (( CURRENT == 2 )) && { _describe command commands; return }"
    yield "  local command=$words[2]\n  shift words; (( CURRENT-- ))\n  case $command in"
    for name, options in known.items():
        yield f"    {name}) _arguments \\"
        for option in options:
            said = f"[{option.text}]".replace(":", "\\:") if option.names else ""
            takes = f"({' '.join(option.values)})" if option.values else "_files"
            value = f":{option.value.replace(':', '')}:{takes}" if option.value else ""
            for each in option.names or ("*",):
                yield f"      {_quoted(f'{each}{said}{value}')} \\"
        yield "      ;;"
    yield "  esac\n}\ncompdef _shardwright shardwright"


def _fish(known: Known, texts: Texts) -> Iterator[str]:
    start = "complete -c shardwright -n"
    for name, text in texts.items():
        yield f"{start} __fish_use_subcommand -f -a {name} -d {_quoted(text)}"
    for name, options in known.items():
        for option in options:
            flags = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names]
            flags += [f"-x -a {_quoted(' '.join(option.values))}"] if option.values else []
            flags += ["-r"] if option.names and option.value and not option.values else []
            if flags:
                seen = _quoted(f"__fish_seen_subcommand_from {name}")
                yield f"{start} {seen} {' '.join(flags)} -d {_quoted(option.text)}"


def _quoted(text: str) -> str:
    """A text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
