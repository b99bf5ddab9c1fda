"""Verb ``completion``: scripts that call the hidden verb ``__complete``."""

from __future__ import annotations

import argparse

from sparsepretrain.cli._verb import Verb
from sparsepretrain.registry import register

SCRIPTS = {
    "bash": r"""# eval "$(sparsepretrain completion bash)"
_sparsepretrain() {
    local line=${COMP_LINE:0:COMP_POINT} words IFS=$' \t\n'
    read -ra words <<< "$line"
    [[ $line == *" " ]] && words+=("")
    local current=${words[${#words[@]}-1]}
    IFS=$'\n'
    COMPREPLY=($(sparsepretrain __complete "${words[@]:1}" 2>/dev/null))
    # bash breaks words at = and : and replaces only what follows the last of them
    local kept=${current%"${current##*[=:]}"}
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} != *= ]] && COMPREPLY[0]+=" "
}
complete -o nospace -o default -F _sparsepretrain sparsepretrain
""",
    "zsh": r"""# eval "$(sparsepretrain completion zsh)"   (after compinit)
_sparsepretrain() {
    local -a found
    found=(${(f)"$(sparsepretrain __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=} || _files
}
compdef _sparsepretrain sparsepretrain
""",
    "fish": r"""# sparsepretrain completion fish | source
function __sparsepretrain
    set -l typed (commandline -opc)
    sparsepretrain __complete $typed[2..-1] (commandline -ct) 2>/dev/null
end
complete -c sparsepretrain -a '(__sparsepretrain)'
""",
}
"""Shell -> script; the hidden verb ``__complete`` keeps candidates up to date."""


@register("verb", "completion")
class Completion(Verb):
    summary = "print a completion script for bash, zsh or fish"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", choices=list(SCRIPTS))

    def run(self, args: argparse.Namespace) -> int:
        print(SCRIPTS[args.shell], end="")
        return 0
