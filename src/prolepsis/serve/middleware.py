"""What every request passes on its way to the app, outermost first."""

from starlette.types import ASGIApp

from prolepsis.serve.access_log import AccessLog
from prolepsis.serve.admission import Gate
from prolepsis.serve.answer_counts import CountAnswers
from prolepsis.serve.auth import Auth
from prolepsis.serve.browsers import HostCheck, SecurityHeaders, with_cors
from prolepsis.serve.limits import BodyLimit, HeaderLimit, TimeLimit
from prolepsis.serve.state import ServerState


def guarded(app: ASGIApp, state: ServerState) -> ASGIApp:
    """`app` behind all that `state.options` ask for. Who has no key costs no more than reading the headers."""
    options = state.options
    app = Gate(app, lambda: state.phase, state.admission, state.texts)
    app = BodyLimit(app, options.max_body, options.body_timeout, options.log_prompts)
    app = TimeLimit(app, options.request_timeout, state.requests)
    app = Auth(app, options.api_keys)
    app = with_cors(app, options.cors_origins)
    app = HostCheck(app, options.host, options.allowed_hosts, options.cors_origins)
    app = HeaderLimit(app, options.max_header)
    app = SecurityHeaders(app)
    app = CountAnswers(app, state.answers)
    return AccessLog(app, as_json=options.log_json, prompts=options.log_prompts)
