"""What the options look like to a reader: `--help`, and docs/flags.md. Both come from the declarations.

python -m forerun.usage > docs/flags.md
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable

from forerun.config import all_options
from forerun.options import Option


def serve_help(program: str, options: Iterable[Option]) -> str:
    lines = [f"Usage: {program} --model-id MODEL [options]", ""]
    for section, members in _by_section(option for option in options if option.flags):
        lines.append("accepted, without effect here:" if section == "idle" else f"{section}:")
        for option in members:
            head = "  " + ", ".join([*option.flags[-1:], *option.flags[:-1]] if option.declared.short else option.flags)
            head += f" <{option.metavar}>" if option.metavar else ""
            lines.append(head)
            lines += textwrap.wrap(_explained(option), 100, initial_indent="        ", subsequent_indent="        ")
        lines.append("")
    lines.append("Every flag is also an environment variable (MODEL_ID, FORERUN_DEVICE, …; see docs/flags.md).")
    lines.append("Flags win over the environment, the environment over --config FILE.toml.")
    return "\n".join(lines)


def markdown(options: Iterable[Option]) -> str:
    groups = dict(_by_section(options))
    idle = groups.pop("idle")
    for section in list(groups):
        idle += [option for option in groups[section] if option.declared.idle]
        groups[section] = [option for option in groups[section] if not option.declared.idle]
    lines = [
        "# Options of `forerun serve`",
        "",
        "Made from the declarations in `forerun/config.py` by `python -m forerun.usage > docs/flags.md`.",
        "",
        "`text-generation-launcher` is the same program. Flags win over the environment, the environment over `--config FILE.toml`, the",
        "file over the defaults. In the file a key is the option's name, at the top (`port = 80`) or under its section (`[serving]`). An",
        "empty variable counts as absent, except `API_KEY`. Options marked * are ours; all others are those of text-generation-inference",
        "and mean the same.",
    ]
    for section, members in groups.items():
        lines += ["", f"## {section}", "", "| option | environment | default | meaning |", "|---|---|---|---|"]
        lines += [_row(option, option.declared.help) for option in members]
    lines += [
        "",
        "## Accepted, without effect",
        "",
        "Each of these is accepted and logged once with its reason.",
        "",
        "| option | environment | default | what it is in TGI | why it does nothing here |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(option, f"{option.declared.help} | {option.declared.idle}") for option in idle]
    return "\n".join(lines) + "\n"


def _by_section(options: Iterable[Option]) -> list[tuple[str, list[Option]]]:
    groups: dict[str, list[Option]] = {}
    for option in options:
        if not option.declared.hidden:
            groups.setdefault(option.section, []).append(option)
    return list(groups.items())


def _row(option: Option, meaning: str) -> str:
    star = " *" if option.declared.origin == "forerun" else ""
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    value = " " + _cell(f"`{option.metavar}`") if option.metavar and option.flags else ""
    variables = ", ".join(f"`{variable}`" for variable in option.variables)
    head = f"{flags}{value}" if flags else f"`{option.name}` (no flag)"
    shown = meaning if option.declared.idle else _cell(meaning)
    return f"| {head}{star} | {variables} | {_default(option)} | {shown} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(option: Option) -> str:
    if option.default in (None, (), ""):
        return ""
    if isinstance(option.default, tuple):
        return ",".join(str(item) for item in option.default)
    return str(option.default).lower() if isinstance(option.default, bool) else str(option.default)


def _explained(option: Option) -> str:
    why = f": {option.declared.idle}" if option.declared.idle else ""
    default = f" [default: {_default(option)}]" if _default(option) and not option.switch else ""
    variables = f" [env: {', '.join(option.variables)}]" if option.variables else ""
    return f"{option.declared.help}{why}{default}{variables}"


if __name__ == "__main__":
    sys.stdout.write(markdown(all_options()))
