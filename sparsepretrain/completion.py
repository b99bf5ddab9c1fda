"""Shell completion: the scripts, and the words of the configuration that they offer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from sparsepretrain.errors import ConfigError

COMPLETION = {
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
"""Shell -> script; each asks the hidden verb ``__complete``, so it never goes out of date."""


def override_words(typed: list[str], current: str) -> list[str]:
    """``group=`` and ``key=`` of the configuration typed so far, or the options of a group."""
    from sparsepretrain.config.compose import catalogue, compose
    from sparsepretrain.config.freeze import flat

    directories = [Path(b) for a, b in pairwise(typed) if a == "--config-dir"]
    groups = catalogue(directories)
    group, equals, _ = current.partition("=")
    if equals:
        return [f"{group}={option}" for option in groups.get(group, ())]
    settled = [word for word in typed if "=" in word and not word.startswith("-")]
    try:
        plain = compose(settled, directories)
    except ConfigError:
        plain = compose((), directories)
    return [f"{word}=" for word in (*groups, *flat(plain)) if word != "experiment"]
