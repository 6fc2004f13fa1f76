"""A Jinja environment for templates that nobody vouches for.

A chat template is a program out of a downloaded file. Jinja's immutable sandbox keeps it away from Python; what
is added here keeps it from running for ever or filling the memory: loop rounds and macro calls are counted,
and every value an expression builds is measured before it can be used to build a larger one. Templates are
rewritten after parsing so that neither can be shadowed by a name the template defines.

The surroundings a template may rely on are those of `transformers`: `trim_blocks`, `lstrip_blocks`, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that escapes nothing, `{% generation %}` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 1 << 18
MAX_ELEMENTS = 1 << 18
MAX_VALUE = 1 << 24
MAX_WORK = 1 << 30
MAX_INTEGER_BITS = 4_096
MAX_INDENT = 64
MAX_SOURCE = 1 << 20

# What real templates use. Left out are filters that pad, repeat or format to a width the template names.
_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby"),
    *("indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum"),
    *("title", "tojson", "trim", "unique", "upper"),
)
_REFUSED_METHODS = frozenset(("format", "format_map", "ljust", "rjust", "center", "zfill", "expandtabs"))


class _Budget:
    """What one rendering may still use up."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.work = MAX_WORK

    def charge(self, amount: int) -> None:
        self.work -= amount
        if self.work < 0:
            raise TemplateError("the template does too much work")


_budget: ContextVar[_Budget] = ContextVar("budget")


def measured(value: Any) -> Any:
    """`value`, after checking how many characters and elements it has, at every depth and counted every time."""
    size = elements = 0
    pending = [value]
    while pending:
        item = pending.pop()
        elements += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, (list, tuple, set, frozenset)):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        if size > MAX_VALUE:
            raise TemplateError(f"the template builds a value of more than {MAX_VALUE} characters")
        if elements + len(pending) > MAX_ELEMENTS:
            raise TemplateError(f"the template builds a value of more than {MAX_ELEMENTS} elements")
    _budget.get().charge(elements + (size if isinstance(value, str) else 0))
    return value


class _QuietNamespace(Namespace):
    """A namespace that prints as a constant, as namespaces may hold each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - the attribute Jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the module's docstring. Limits are reported as `jinja2.TemplateError`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.concat = self.join_pieces  # type: ignore[method-assign]
        self.filters = {name: _bounded(self.filters[name]) for name in _FILTERS}
        self.filters |= {
            "tojson": _bounded(_tojson),
            "replace": _bounded(_replace),
            "indent": _bounded(_indent),
            "join": _bounded_join(self.filters["join"]),
        }
        del self.globals["lipsum"]
        self.globals |= {
            "namespace": _QuietNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def render_bounded(self, template: Template, variables: dict[str, Any]) -> str:
        """Render within one budget. Raises whatever the template does."""
        token = _budget.set(_Budget())
        try:
            return self.join_pieces(template.generate(**variables))
        finally:
            _budget.reset(token)

    def compile_bounded(self, source: str) -> Template:
        """Compile `source`; constant expressions are already evaluated here, hence the budget."""
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the template is longer than {MAX_SOURCE} characters")
        token = _budget.set(_Budget())
        try:
            return self.from_string(source)
        finally:
            _budget.reset(token)

    def step(self) -> str:
        """Count one loop round or macro call; called from places that `_parse` puts into the template."""
        budget = _budget.get()
        budget.steps -= 1
        if budget.steps < 0:
            raise TemplateError(f"the template runs more than {MAX_STEPS} loop rounds")
        return ""

    def join_pieces(self, pieces: Iterable[Any]) -> str:
        """Join text pieces; stops as soon as they become too long together."""
        parts: list[str] = []
        size = 0
        for piece in pieces:
            parts.append(str(piece))
            size += len(parts[-1])
            if size > MAX_VALUE:
                raise TemplateError(f"the template writes more than {MAX_VALUE} characters")
        _budget.get().charge(size)
        return "".join(parts)

    def joined(self, *pieces: Any) -> str:
        """The `~` operator."""
        return self.join_pieces(pieces)

    def measured(self, value: Any) -> Any:
        """A list, tuple or dictionary written in the template."""
        return measured(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for body in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            body.body.insert(0, nodes.Output([_call("step", [])]))  # type: ignore[attr-defined]
        _rewrite(tree)
        return tree

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to `is_safe_attribute`, where the sandbox would wrap it: widths are unbounded."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return measured(_plus(left, right))
        if operator == "%":
            _check_percent_format(left)
        elif operator == "**":
            _check_power(left, right)
        else:
            _check_product(left, right)
        return measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            return measured(_replace(owner, *args))
        if isinstance(owner, str) and name == "join" and args:
            return __self.join_pieces(_with_separator(owner, args[0]))
        return measured(super().call(__context, __obj, *args, **kwargs))


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    """A call of an environment's method, which no name in the template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _rewrite(node: nodes.Node) -> None:
    """Route `~` and literal containers below `node` through the environment's checks, in place."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _rewritten(value))
        elif isinstance(value, list):
            value[:] = [_rewritten(item) if isinstance(item, nodes.Node) else item for item in value]


def _rewritten(node: nodes.Node) -> nodes.Node:
    _rewrite(node)
    if isinstance(node, nodes.Concat):
        return _call("joined", node.nodes)
    is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and not is_target:
        return _call("measured", [node])
    return node


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are measured."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, (str, list, tuple, dict)):
                measured(arg)
        return measured(function(*args, **kwargs))

    return bounded


def _bounded_join(join: Callable[..., str]) -> Callable[..., str]:
    """The `join` filter, which takes any iterable and a separator."""

    @wraps(join)
    def bounded(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items = list(value)
        measured(items)
        if len(items) * len(d) > MAX_VALUE:
            raise TemplateError(f"join would write more than {MAX_VALUE} characters")
        return str(measured(join(context, items, d, attribute)))

    return bounded


def _with_separator(separator: str, items: Iterable[str]) -> Iterable[str]:
    for index, item in enumerate(items):
        if index:
            yield separator
        yield item


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    if text.count(old) * len(new) > MAX_VALUE:
        raise TemplateError(f"replace would write more than {MAX_VALUE} characters")
    return text.replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    columns = len(width) if isinstance(width, str) else width
    if not 0 <= columns <= MAX_INDENT:
        raise TemplateError(f"indent by {columns} characters, at most {MAX_INDENT} are allowed")
    return do_indent(text, width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise TemplateError(f"tojson with an indent outside 0 to {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plus(left: Any, right: Any) -> Any:
    if sum(len(side) for side in (left, right) if isinstance(side, (str, list, tuple))) > MAX_VALUE:
        raise TemplateError(f"the template builds a value of more than {MAX_VALUE} characters or elements")
    return left + right


def _check_percent_format(left: Any) -> None:
    if isinstance(left, str) and re.search(r"%[^%a-zA-Z]*(\*|\d{3})", left):
        raise TemplateError("a % format with a width or precision of three digits or more, or *")


def _check_power(left: Any, right: Any) -> None:
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INTEGER_BITS:
        raise TemplateError(f"a power of more than {MAX_INTEGER_BITS} bits")


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if not isinstance(times, int):
            continue
        if isinstance(value, (str, list, tuple)) and len(value) * times > MAX_VALUE:
            raise TemplateError(f"the template repeats a value to more than {MAX_VALUE} characters or elements")
        if isinstance(value, int) and value.bit_length() + times.bit_length() > MAX_INTEGER_BITS:
            raise TemplateError(f"a product of more than {MAX_INTEGER_BITS} bits")


def _raise_exception(message: Any) -> None:
    raise TemplateError("" if isinstance(message, Undefined) else str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256:
        raise TemplateError("a date format of more than 256 characters")
    return datetime.now().strftime(pattern)
