"""Shell completion: the scripts, and the words of the configuration that they offer."""

from __future__ import annotations

from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
    """``group=`` and ``key=`` of the configuration typed so far, or the values of one of them."""
    from sparsepretrain.config.compose import catalogue, compose
    from sparsepretrain.config.freeze import flat

    directories = [Path(b) for a, b in pairwise(typed) if a == "--config-dir"]
    groups = catalogue(directories)
    group, equals, _ = current.partition("=")
    if group in groups and equals:
        return [f"{group}={option}" for option in groups[group]]
    settled = [word for word in typed if "=" in word and not word.startswith("-")]
    try:
        plain = compose(settled, directories)
    except ConfigError:
        plain = compose((), directories)
    if equals:
        return [f"{group}={value}" for value in _values_of(plain, group)]
    return [f"{word}=" for word in (*groups, *flat(plain)) if word != "experiment"]


def recipe_words(current: str) -> list[str]:
    """``task=`` of ``finetune``: the recipes to fine-tune with."""
    from sparsepretrain.config.compose import catalogue

    key, equals, _ = current.partition("=")
    return (
        [f"task={name}" for name in catalogue()["finetune"]]
        if (key, equals) == ("task", "=")
        else []
    )


def values(hint: Any) -> list[str]:
    """What a key of this type can be, where that is a list: words of a Literal, booleans, null."""
    if hint is bool:
        return ["true", "false"]
    if hint is type(None):
        return ["null"]
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    parts = get_args(hint) if isinstance(hint, UnionType) else ()
    return [value for part in parts for value in values(part)]


def setting_words(settings: type, current: str) -> list[str]:
    """``key=`` and ``key=value`` of a dataclass of settings."""
    hints = get_type_hints(settings)
    key, equals, _ = current.partition("=")
    if not equals:
        return [f"{name}=" for name in hints]
    return [f"{key}={value}" for value in values(hints.get(key))]


def _values_of(plain: dict[str, Any], key: str) -> list[str]:
    """Values of a dotted key of the configuration."""
    from sparsepretrain import registry
    from sparsepretrain.config.schema import GROUPS, REGISTERED, Run

    head, *rest = key.split(".")
    hint: Any = Run
    if rest and head in {*GROUPS, *REGISTERED}:
        kind, discriminator = REGISTERED.get(head, (head, "name"))
        name = plain[head][discriminator]
        hint = GROUPS[head][name] if head in GROUPS else registry.get(kind, name).Options  # type: ignore[attr-defined]
    else:
        rest = [head, *rest]
    for part in rest:
        hint = get_type_hints(hint).get(part) if is_dataclass(hint) else None
    return values(hint)
