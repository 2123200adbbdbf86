//! The HTTP filters of a connection manager, in the order of the configuration. The last filter, the router,
//! is in `forward`.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::Map;
use tracing::warn;

use crate::{
    call,
    request::{
        authorization::{self, AuthorizationRequest, AuthorizationVerdict},
        context::{
            Compression, Exchange, Filtered, RequestContext, RequestDecision, RequestOutcome, RequestScope,
            ResponseField, add_metadata,
        },
        global_limit::LimitCall,
        limit::LimitedRate,
        routing,
        transfer::{self, Deadlines, collect, unless_closed},
    },
};
use skysail_http::{
    compress::Compressor,
    decompress::Decompressor,
    grpc_web::{self, Conversion, WebCall},
    head::{RequestHead, ResponseHead, Version},
    http1::Framing,
};
use skysail_policy::{
    config::{
        authorization::ExternalAuthorization,
        http::{Filter, FilterKind, metadata},
        jwt::{Jwt, JwtProvider, KeySet, Keys},
        lua::LuaSelection,
        policy::Policy,
        processing::ExternalProcessing,
        route::{AppendAction, Cors, Setting},
    },
    cors,
    error::{Error, Flags, Kind},
    fault::{self, FaultDecision},
    jwt::{self, JwtOutcome},
    matching,
    rbac::{self, Subject, Tally, Verdict},
    route::{self, NoRoute},
};

/// The asynchronous part of a filter.
enum FilterAction<'a> {
    /// Delays the request, or fails it.
    InjectFault(FaultDecision),
    /// Answers a CORS preflight.
    AnswerPreflight(ResponseHead),
    /// Refuses a request above the rate limit.
    LimitRate(LimitedRate<'a>),
    /// Waits for the whole body, up to this size.
    BufferBody(usize),
    /// Calls a rate limit service.
    CallRateLimit(LimitCall<'a>),
    /// Calls an external authorization service.
    CallAuthorization(&'a ExternalAuthorization, Option<&'a Setting>),
    /// Verifies tokens, and fetches key sets for that.
    VerifyTokens(&'a Jwt, Option<&'a Setting>),
    /// Passes the request to an external processor.
    Process(&'a Filter, &'a Arc<ExternalProcessing>, Option<&'a Setting>),
    /// Decompresses the request, if the flag is set, and advertises the coding.
    Decompress(&'a Decompressor, bool),
    /// Runs a Lua script.
    RunScript(&'a Filter, LuaSelection<'a>, bool),
}

impl<'a> RequestContext<'a> {
    /// Runs the filters until one answers the request.
    pub(crate) async fn filter(&mut self) -> Result<Filtered, Error> {
        let manager = self.scope.manager;
        for filter in &manager.filters {
            if filter.is_idle() && self.decision.found.is_ok_and(|found| found.route.filters.is_empty()) {
                continue;
            }
            // The future is boxed, because every connection would otherwise reserve memory for it, although
            // actions are rare.
            if let Some(action) = self.run_filter(filter)?
                && Box::pin(self.run_action(action)).await? == Filtered::Answered
            {
                return Ok(Filtered::Answered);
            }
        }
        Ok(Filtered::Continue)
    }

    /// Runs the synchronous part of a filter. Most filters have no other part.
    fn run_filter(&mut self, filter: &'a Filter) -> Result<Option<FilterAction<'a>>, Error> {
        let Self { scope, exchange, decision, outcome, .. } = self;
        let setting = decision.found.ok().and_then(|found| found.route.setting(&filter.name));
        if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
            return Ok(None);
        }
        match (&filter.kind, setting) {
            (FilterKind::Rbac(_), Some(Setting::Rbac(policy))) | (FilterKind::Rbac(policy), _) => {
                authorize(scope, exchange, outcome, policy)?;
            }
            (FilterKind::Fault(_), Some(Setting::Fault(fault))) | (FilterKind::Fault(fault), _) => {
                let fault = fault::decide(fault, exchange.request, &mut scope.worker.rng.borrow_mut());
                let is_any = fault != FaultDecision::default();
                return Ok(is_any.then_some(FilterAction::InjectFault(fault)));
            }
            (FilterKind::RateLimit(_), Some(Setting::RateLimit(limit)))
            | (FilterKind::RateLimit(limit), _) => {
                if !limit.unenforced.is_empty() {
                    decision.filter_results.begin(filter, setting);
                }
                return Ok(self.take_tokens(limit).map(FilterAction::LimitRate));
            }
            (FilterKind::HeaderMutation(config), setting) => {
                let state = decision.response_filters_mut();
                state.fields_before.push((filter, state.fields.len()));
                self.mutate_request(filter, config, setting);
            }
            (FilterKind::Buffer(_), Some(Setting::Buffer(max))) | (FilterKind::Buffer(max), _) => {
                // A body that has ended needs no further buffer.
                if !exchange.body.is_collected() {
                    decision.filter_results.begin(filter, setting);
                    return Ok(Some(FilterAction::BufferBody(*max)));
                }
            }
            (FilterKind::GlobalRateLimit(config), setting) => {
                let by_route = match setting {
                    Some(Setting::GlobalRateLimit(by_route)) => Some(&**by_route),
                    _ => None,
                };
                let Some(call) = self.limit_call(config, by_route) else { return Ok(None) };
                self.decision.filter_results.begin(filter, setting);
                return Ok(Some(FilterAction::CallRateLimit(call)));
            }
            (FilterKind::ExternalAuthorization(config), setting) => {
                decision.filter_results.begin(filter, setting);
                return Ok(Some(FilterAction::CallAuthorization(config, setting)));
            }
            (FilterKind::Jwt(jwt), setting) => {
                decision.filter_results.begin(filter, setting);
                return Ok(Some(FilterAction::VerifyTokens(jwt, setting)));
            }
            // As in Envoy, CORS does not apply to routes with a direct response.
            (FilterKind::Cors, Some(Setting::Cors(cors))) if decision.is_forwarded() => {
                return Ok(apply_cors(cors, exchange.request, decision));
            }
            (FilterKind::Cors, _) => {}
            (FilterKind::Lua(lua), setting) => {
                let selection = lua.select(setting).filter(|(script, _)| script.handles_request);
                if selection.is_some() {
                    decision.filter_results.begin(filter, setting);
                    decision.filter_results.keep_head(exchange.request);
                }
                return Ok(selection.map(|script| FilterAction::RunScript(filter, script, lua.clear_route)));
            }
            (FilterKind::ExternalProcessing(config), setting) => {
                return Ok(Some(FilterAction::Process(filter, config, setting)));
            }
            (FilterKind::Compress(compressor), _) => {
                add_compressor(exchange, decision, compressor);
            }
            (FilterKind::Decompress(decompressor), _) => {
                if decompressor.response.is_some() {
                    decision.response_filters_mut().decompressors.push(decompressor);
                }
                let has_body = exchange.body.framing() != Framing::None;
                let is_coded =
                    has_body && decision.grpc_web.is_none() && exchange.request.has("content-encoding");
                if decompressor.advertise || is_coded {
                    decision.filter_results.begin(filter, setting);
                    return Ok(Some(FilterAction::Decompress(decompressor, is_coded)));
                }
            }
            (FilterKind::GrpcWeb, _) => {
                convert_grpc_web(exchange, decision, filter, setting);
            }
        }
        Ok(None)
    }

    async fn run_action(&mut self, action: FilterAction<'a>) -> Result<Filtered, Error> {
        match action {
            FilterAction::InjectFault(fault) => {
                inject_fault(&self.scope, &mut self.exchange, &mut self.outcome, fault).await
            }
            FilterAction::AnswerPreflight(response) => {
                *self.exchange.response = response;
                self.outcome.details = "cors_response".into();
                self.send_local(b"").await?;
                Ok(Filtered::Answered)
            }
            FilterAction::LimitRate(limit) => self.refuse_rate(limit).await,
            FilterAction::BufferBody(max) => self.buffer_body(max).await,
            FilterAction::CallRateLimit(call) => self.call_rate_limit(call).await,
            FilterAction::CallAuthorization(config, setting) => {
                self.call_authorization(config, setting).await
            }
            FilterAction::VerifyTokens(jwt, setting) => self.verify_tokens(jwt, setting).await,
            FilterAction::Decompress(decompressor, is_coded) => {
                self.decompress_request(decompressor, is_coded).await
            }
            FilterAction::Process(filter, config, setting) => {
                self.process_request(filter, config, setting).await
            }
            FilterAction::RunScript(filter, script, clear_route) => {
                let is_answered = self.run_request_script(filter, script, clear_route).await?;
                Ok(if is_answered { Filtered::Answered } else { Filtered::Continue })
            }
        }
    }

    /// Verifies the tokens of a request, or refuses it.
    async fn verify_tokens(&mut self, jwt: &Jwt, setting: Option<&Setting>) -> Result<Filtered, Error> {
        let Self { scope, exchange, decision, outcome, .. } = self;
        if jwt::is_unclean(jwt, exchange.request) {
            decision.filter_results.keep_head(exchange.request);
            jwt::sanitize(jwt, exchange.request);
        }
        if jwt.bypass_preflight && cors::is_preflight(exchange.request) {
            return Ok(Filtered::Continue);
        }
        let requirement =
            jwt::requirement(jwt, setting, exchange.request, &mut scope.worker.rng.borrow_mut());
        let requirement = match requirement {
            Ok(Some(requirement)) => requirement,
            Ok(None) => return Ok(Filtered::Continue),
            Err(problem) => {
                scope.counters.jwt_denied.inc();
                outcome.details = format!("jwt_authn_access_denied{{{}}}", problem.replace(' ', "_")).into();
                let text = format!("Failed JWT authentication: {problem}");
                self.local_reply(403, &[], text.as_bytes()).await?;
                return Ok(Filtered::Answered);
            }
        };
        let (mut failed, mut fetched) = (Vec::new(), Vec::new());
        let verified = loop {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            match jwt::check(jwt, requirement, exchange.request, now, (&fetched, &failed)) {
                // A request fetches each key set at most once.
                JwtOutcome::NeedsKeys(provider) => {
                    let is_fetched = fetch_keys(scope, exchange, &jwt.providers[provider]).await?;
                    if is_fetched { fetched.push(provider) } else { failed.push(provider) }
                }
                JwtOutcome::Pass(verified) => break Ok(verified),
                JwtOutcome::Refused(status) => break Err(status),
            }
        };
        match verified {
            Ok(verified) => {
                scope.counters.jwt_allowed.inc();
                if !verified.is_empty() {
                    decision.filter_results.keep_head(exchange.request);
                }
                let mut found = Map::new();
                let clear_route = jwt::apply(verified, exchange.request, &mut found);
                decision.filter_results.add_metadata(metadata::JWT, &found);
                add_metadata(outcome, metadata::JWT, found);
                if clear_route {
                    routing::find_route(scope, exchange.request, outcome.metadata.as_deref(), decision);
                }
                Ok(Filtered::Continue)
            }
            Err(status) => {
                scope.counters.jwt_denied.inc();
                let text = status.words();
                outcome.details = format!("jwt_authn_access_denied{{{}}}", text.replace(' ', "_")).into();
                let challenge = jwt::challenge(status, exchange.request);
                let challenge = ("www-authenticate".into(), challenge.as_bytes().into());
                self.local_reply(status.http(), &[challenge], text.as_bytes()).await?;
                Ok(Filtered::Answered)
            }
        }
    }

    /// Asks an external authorization service about the request, unless the configuration skips this request.
    async fn call_authorization(
        &mut self,
        config: &ExternalAuthorization,
        setting: Option<&Setting>,
    ) -> Result<Filtered, Error> {
        let Self { scope, exchange, decision, outcome, .. } = self;
        let metadata = outcome.metadata.as_deref();
        let is_enabled =
            config.enabled_metadata.as_ref().is_none_or(|test| matching::metadata(test, metadata));
        if !is_enabled {
            decision.filter_results.set_inactive();
            return Ok(Filtered::Continue);
        }
        // As in Envoy, a request without a route is refused without a call.
        let has_route = !matches!(decision.found, Err(NoRoute::NoMatch));
        if !has_route {
            decision.filter_results.set_inactive();
        }
        if !has_route || !route::sample(&mut scope.worker.rng.borrow_mut(), config.enabled) {
            return Ok(Filtered::Continue);
        }
        let (extensions, without_body) = match setting {
            Some(Setting::ExternalAuthorization { extensions, without_body }) => {
                (&extensions[..], *without_body)
            }
            _ => (&[][..], false),
        };
        let mut content = None;
        if let Some(settings) = config.body.filter(|_| !without_body) {
            if exchange.request.has("expect") {
                decision.filter_results.keep_head(exchange.request);
            }
            collect(scope.manager, exchange, settings.max_bytes).await?;
            let body = &exchange.body;
            let kept = body.kept().unwrap_or_default();
            let partial = !body.is_collected() || kept.len() > settings.max_bytes;
            if partial && !settings.partial {
                return Err(Error::new(Kind::BodyTooLarge));
            }
            // As in Envoy, a request with trailers only has no body.
            let kept = body.kept().filter(|kept| !kept.is_empty() || body.trailers().is_none());
            content = kept.map(|kept| (kept[..settings.max_bytes.min(kept.len())].to_vec(), partial));
        }
        let head = exchange.request.clone();
        let request = AuthorizationRequest {
            head: &head,
            origin: &exchange.downstream.origin.clone(),
            body: content.as_ref().map(|(content, partial)| (&content[..], *partial)),
            received: exchange.body.bytes,
            extensions,
            start: outcome.start,
        };
        let call = Box::pin(authorization::check_request(scope.worker, scope.snapshot, config, &request));
        let verdict = unless_closed(exchange, async { Ok(call.await) }).await?;
        if verdict.as_ref().map_or(true, AuthorizationVerdict::changes_request) {
            decision.filter_results.keep_head(&head);
        }
        self.apply_verdict(config, verdict).await
    }

    /// Applies the result of a call for external authorization.
    async fn apply_verdict(
        &mut self,
        config: &ExternalAuthorization,
        verdict: Result<AuthorizationVerdict, Error>,
    ) -> Result<Filtered, Error> {
        let Self { scope, exchange, decision, outcome, .. } = self;
        match verdict {
            Ok(AuthorizationVerdict::Allow(mut changes)) => {
                scope.counters.ext_authz_ok.inc();
                changes.apply(exchange.request);
                let clear_route = config.clear_route && changes.change_request();
                decision.response_filters_mut().fields.append(&mut changes.response);
                decision.filter_results.add_metadata(metadata::EXT_AUTHZ, &changes.metadata);
                add_metadata(outcome, metadata::EXT_AUTHZ, changes.metadata);
                if clear_route {
                    routing::find_route(scope, exchange.request, outcome.metadata.as_deref(), decision);
                }
                Ok(Filtered::Continue)
            }
            Ok(AuthorizationVerdict::Deny { status, headers, body: text }) => {
                scope.counters.ext_authz_denied.inc();
                outcome.flags.insert(Flags::UAEX);
                outcome.details = "ext_authz_denied".into();
                self.local_reply(status, &headers, &text).await?;
                Ok(Filtered::Answered)
            }
            Err(error) => {
                scope.counters.ext_authz_error.inc();
                warn!("external authorization by cluster {} failed: {error}", config.cluster);
                if config.failure_allowed {
                    if config.failure_marked {
                        exchange.request.append("x-envoy-auth-failure-mode-allowed", b"true");
                    }
                    return Ok(Filtered::Continue);
                }
                outcome.flags.insert(Flags::UAEX);
                outcome.details = "ext_authz_error".into();
                self.local_reply(config.status_on_error, &[], b"").await?;
                Ok(Filtered::Answered)
            }
        }
    }
}

/// Checks the request against an RBAC policy.
///
/// # Errors
/// The policy denies the request.
fn authorize(
    scope: &RequestScope<'_>,
    exchange: &Exchange<'_>,
    outcome: &mut RequestOutcome<'_>,
    policy: &Arc<Policy>,
) -> Result<(), Error> {
    let origin = &exchange.downstream.origin;
    let subject = Subject {
        head: Some(exchange.request),
        peer: &origin.peer,
        source: origin.direct,
        remote: exchange.client,
        destination: origin.destination,
        server_name: origin.server_name(),
        metadata: outcome.metadata.as_deref(),
    };
    let mut tally = Tally::default();
    let verdict = rbac::check(std::slice::from_ref(policy), &subject, &mut tally);
    let counters = scope.counters;
    counters.rbac_allowed.add(tally.allowed.into());
    counters.rbac_denied.add(tally.denied.into());
    counters.rbac_shadow_allowed.add(tally.shadow_allowed.into());
    counters.rbac_shadow_denied.add(tally.shadow_denied.into());
    add_metadata(outcome, metadata::COMMON, tally.log_metadata());
    add_metadata(outcome, metadata::RBAC, tally.found);
    match verdict {
        Verdict::Allow => Ok(()),
        Verdict::Deny { details, .. } => Err(Error::new(Kind::Denied(details))),
    }
}

/// Delays a request, or fails it.
async fn inject_fault(
    scope: &RequestScope<'_>,
    exchange: &mut Exchange<'_>,
    outcome: &mut RequestOutcome<'_>,
    fault: FaultDecision,
) -> Result<Filtered, Error> {
    if let Some(delay) = fault.delay {
        scope.counters.fault_delays.inc();
        outcome.flags.insert(Flags::DI);
        transfer::pause(exchange, delay, &mut Deadlines::default()).await?;
    }
    let Some(kind) = fault.failure() else { return Ok(Filtered::Continue) };
    scope.counters.fault_aborts.inc();
    Err(Error::new(kind))
}

/// Adds a compressor for the response. `accept-encoding` is read once, because the first compressor may hide it.
fn add_compressor<'a>(
    exchange: &mut Exchange<'_>,
    decision: &mut RequestDecision<'a>,
    compressor: &'a Compressor,
) {
    let accept = || exchange.request.header("accept-encoding").unwrap_or_default().into();
    let begin = || Compression { compressors: Vec::new(), accept: accept() };
    decision.response_filters_mut().compression.get_or_insert_with(begin).compressors.push(compressor);
    if compressor.hide_accept {
        exchange.request.remove("accept-encoding");
    }
}

/// Converts a gRPC-Web call to gRPC.
fn convert_grpc_web<'a>(
    exchange: &mut Exchange<'_>,
    decision: &mut RequestDecision<'a>,
    filter: &'a Filter,
    setting: Option<&'a Setting>,
) {
    if grpc_web::is_call(exchange.request) {
        decision.filter_results.begin(filter, setting);
        decision.filter_results.keep_head(exchange.request);
        decision.grpc_web = grpc_web::request(exchange.request);
    }
    decision.grpc |= decision.grpc_web.is_some();
    if let Some(WebCall { text: true, .. }) = decision.grpc_web {
        exchange.body.convert(Conversion::In(Vec::new()));
    }
}

/// Answers a CORS preflight, or adds the fields of the policy to the response.
fn apply_cors<'a>(
    cors: &Cors,
    head: &RequestHead,
    decision: &mut RequestDecision<'_>,
) -> Option<FilterAction<'a>> {
    match cors::decide(cors, head) {
        cors::CorsDecision::Pass => None,
        cors::CorsDecision::AddFields(fields) => {
            let fields = fields.into_iter();
            let fields =
                fields.map(|(name, value)| ResponseField { name, value, action: AppendAction::Overwrite });
            decision.response_filters_mut().fields.extend(fields);
            None
        }
        cors::CorsDecision::Respond(response) => Some(FilterAction::AnswerPreflight(response)),
    }
}

/// Fetches the key set of a provider, for all workers. Returns whether that succeeded.
async fn fetch_keys(
    scope: &RequestScope<'_>,
    exchange: &mut Exchange<'_>,
    provider: &JwtProvider,
) -> Result<bool, Error> {
    let Keys::Remote(remote) = &provider.keys else { return Ok(true) };
    let mut head = RequestHead::build("GET", &remote.path, &remote.authority, &[]);
    head.version = Version::Http11;
    let fetch = Box::pin(call::send_request(
        scope.worker,
        scope.snapshot,
        &remote.cluster,
        &head,
        b"",
        remote.timeout,
    ));
    let fetched = unless_closed(exchange, async { Ok(fetch.await) }).await?;
    let keys = match fetched {
        Ok(response) if response.head.status() == 200 => KeySet::parse(&response.content),
        Ok(response) => Err(format!("status {}", response.head.status())),
        Err(error) => Err(error.to_string()),
    };
    match keys {
        Ok(keys) => {
            let until = Instant::now() + remote.lifetime;
            remote.fetched.store(Some(Arc::new((until, Arc::new(keys)))));
            Ok(true)
        }
        Err(problem) => {
            let (provider, authority) = (&provider.name, &remote.authority);
            warn!("cannot fetch the key set of {provider} from {authority}{}: {problem}", remote.path);
            Ok(false)
        }
    }
}
