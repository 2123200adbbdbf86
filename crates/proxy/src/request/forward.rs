//! Forwarding: selects an endpoint, connects, and sends the request. Retries by the retry policy until a response
//! arrives.

mod rewrite;

use std::{
    borrow::Cow,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};

use crate::{
    request::{
        context::{Exchange, RequestContext, RequestScope, admitted_request},
        hop, mirror,
        respond::METADATA_KEPT,
        transfer::{self, Client, Deadlines},
    },
    upstream::{
        self, AlpnOffer, ApplicationProtocol, pick,
        pool::{Host, Pool, Upstream, increment},
    },
};
use skysail_http::{
    grpc_status,
    head::{RequestHead, ResponseHead, Version},
    http1::{ConnectionOptions, Framing, write::Persistence},
    wire::Wire,
};
use skysail_policy::{
    balance::{PickOptions, key},
    config::{
        HttpManager,
        listener::Direction,
        route::{Forward, HostRewrite, RetryPolicy},
    },
    error::{Error, Flags, Kind},
    grpc,
    peer::{METADATA, METADATA_ID},
    retry::{self, AttemptPolicy, AttemptResult},
    route::Found,
};

/// Settings for forwarding a request, from its route and the weighted target that was selected.
struct ForwardPlan<'a> {
    found: &'a Found<'a>,
    forward: &'a Forward,
    pool: Rc<Pool>,
    host_rewrite: Option<&'a HostRewrite>,
    /// Timeouts and retry policy, from the route and from the request's fields.
    limits: AttemptPolicy<'a>,
    /// Maximum duration of the whole exchange; `None`: unlimited.
    max_duration: Option<Duration>,
    /// Maximum time without bytes in either direction; `None`: unlimited.
    idle_timeout: Option<Duration>,
    upgrade: bool,
    /// Hash of the request, if the load balancer uses one.
    hash: Option<u64>,
    /// Whether CONNECT ends here: the bytes that follow go to the endpoint.
    terminates_connect: bool,
}

/// The head of a response from the upstream.
struct UpstreamHead {
    framing: Framing,
    connection: ConnectionOptions,
    /// Whether the whole request has been sent.
    is_sent: bool,
}

/// An attempt without a response.
struct TryFailure {
    error: Error,
    /// Whether some of the request was sent.
    sent: bool,
    /// Whether the server may have closed the reused connection before the request. Such an attempt does not
    /// count.
    stale: bool,
}

impl TryFailure {
    /// Returns whether the upstream did not answer in time.
    fn is_late(&self) -> bool {
        matches!(self.error.kind, Kind::ResponseTimeout | Kind::TryTimeout)
    }
}

impl From<Error> for TryFailure {
    fn from(error: Error) -> Self {
        Self { error, sent: false, stale: false }
    }
}

impl RequestContext<'_> {
    /// Forwards the request, retries it where the policy says so, and forwards the response.
    pub(crate) async fn forward(
        &mut self,
        found: &Found<'_>,
        forward: &Forward,
        upgrade: bool,
    ) -> Result<(), Error> {
        let mut plan = self.plan(found, forward, upgrade)?;
        self.prepare_request(&plan);
        let mut cookies = Vec::new();
        if plan.pool.cluster.balancer.hashes() {
            let origin = hash_origin(&self.exchange);
            plan.hash = key::of(&forward.hash, self.exchange.request, origin, &mut cookies);
        }
        let mut deadlines = self.deadlines(&plan);
        let arrived = self.attempts(&plan, &mut deadlines).await?;
        if arrived.is_sent && !upgrade && !forward.mirrors.is_empty() {
            let Exchange { request, body, .. } = &self.exchange;
            mirror::send(self.scope.worker, self.scope.snapshot, &forward.mirrors, request, body);
        }
        let now = Instant::now();
        let switched = is_switched(&plan, &mut self.exchange, self.outcome.upstream.as_ref());
        self.prepare_response(now, switched);
        for cookie in cookies {
            self.exchange.response.append("set-cookie", cookie.as_bytes());
        }
        let UpstreamHead { framing, connection, mut is_sent } = arrived;
        let state = self.decision.response_filters.as_deref();
        let may_decode = state.is_some_and(|state| !state.decompressors.is_empty());
        if may_decode && framing != Framing::None && !switched {
            self.begin_decoding();
        }
        let mut scripted_body = None;
        if self.scope.manager.processes_responses {
            let body = (!switched).then_some((framing, is_sent));
            match Box::pin(self.filter_response(body, &mut deadlines)).await? {
                None => return Ok(()),
                Some(scripted) => (scripted_body, is_sent) = (scripted.body, scripted.is_sent),
            }
        }
        self.finish_response(now);
        if switched {
            return self.tunnel(plan.idle_timeout).await;
        }
        self.forward_response(framing, connection, is_sent, scripted_body, &mut deadlines).await
    }

    /// Selects the connection pool and the settings of the request.
    #[inline]
    fn plan<'a>(
        &mut self,
        found: &'a Found<'a>,
        forward: &'a Forward,
        upgrade: bool,
    ) -> Result<ForwardPlan<'a>, Error> {
        let request = &*self.exchange.request;
        let pool = select_pool(&self.scope, request, found, forward)?;
        self.outcome.pool = Some(pool.clone());
        let grpc = self.decision.grpc;
        let grpc_timeout = if grpc { grpc::timeout(request) } else { None };
        let timeout = match forward.grpc_timeout.filter(|_| grpc) {
            Some(bound) => bound.bound(grpc_timeout),
            None => forward.timeout,
        };
        let max_duration = match forward.grpc_duration.filter(|_| grpc_timeout.is_some()) {
            Some(bound) => bound.bound(grpc_timeout),
            None => {
                let longest = forward.max_duration.or(self.scope.manager.max_stream_duration);
                longest.filter(|longest| !longest.is_zero())
            }
        };
        Ok(ForwardPlan {
            found,
            forward,
            pool,
            host_rewrite: found.target.and_then(|target| target.host.as_ref()).or(forward.host.as_ref()),
            terminates_connect: upgrade && forward.terminates_connect && request.method() == "CONNECT",
            limits: retry::overrides(self.exchange.request, forward.retry.as_deref(), timeout),
            max_duration,
            idle_timeout: forward.idle_timeout.or(self.scope.manager.stream_idle_timeout),
            upgrade,
            hash: None,
        })
    }

    /// Changes the head of the request as the route and the trace say.
    #[inline]
    fn prepare_request(&mut self, plan: &ForwardPlan<'_>) {
        if plan.changes_head() || self.decision.filter_results.any() {
            // A later configuration may have policies that check the head as it is before these changes.
            self.decision.filter_results.keep_routed_head(self.exchange.request);
        }
        self.rewrite(plan);
        if let Some(trace) = &self.outcome.trace {
            trace.inject(self.exchange.request);
        }
    }

    #[inline]
    fn deadlines(&self, plan: &ForwardPlan<'_>) -> Deadlines {
        let (manager, started) = (self.scope.manager, self.outcome.started);
        let mut deadlines = Deadlines::new(
            plan.limits.timeout,
            plan.limits.try_timeout,
            manager.request_timeout.map(|timeout| started + timeout),
            plan.idle_timeout,
        );
        deadlines.whole = plan.max_duration.map(|duration| started + duration);
        deadlines
    }

    /// Processes the head of the upstream's response, except for the fields that [`Self::finish_response`]
    /// adds.
    fn prepare_response(&mut self, now: Instant, switched: bool) {
        let response = &mut *self.exchange.response;
        let upgraded = switched && response.status() == 101;
        hop::remove_connection_fields(response, upgraded);
        self.exchange_metadata();
        let elapsed = now.saturating_duration_since(self.outcome.started).as_millis();
        let response = &mut *self.exchange.response;
        response.set_number("x-envoy-upstream-service-time", elapsed as u64);
        self.outcome.status = response.status();
        self.outcome.details = Cow::Borrowed("via_upstream");
        // Header operations may refer to the number of bytes received so far. [`Self::serve`] counts all
        // bytes at the end.
        self.outcome.received = self.exchange.body.bytes;
        self.apply_route_ops();
        self.outcome.received = 0;
    }

    /// Sends the request until there is a response to forward, or no attempt is left.
    async fn attempts(
        &mut self,
        plan: &ForwardPlan<'_>,
        deadlines: &mut Deadlines,
    ) -> Result<UpstreamHead, Error> {
        let retry = plan.limits.retry().filter(|_| !plan.upgrade);
        let mut tried = Vec::new();
        // An attempt on a connection that the server closed while it was idle does not count; the next
        // attempt uses a new connection. A tunnel always uses a new connection, unless it is an HTTP/2
        // stream.
        let mut fresh = plan.upgrade
            && offer(plan, self.scope.manager, &self.exchange).protocol != ApplicationProtocol::Http2;
        self.outcome.attempts = 1;
        loop {
            if plan.found.host.include_attempt_count {
                self.exchange.request.set_number("x-envoy-attempt-count", self.outcome.attempts.into());
            }
            let host = match &plan.pool.resolved {
                // Boxed, because few clusters are dynamic.
                Some(_) if self.scope.manager.host_cache.is_some() => {
                    Box::pin(self.resolve_host(plan, deadlines)).await?
                }
                _ => self.pick_host(plan, retry, &tried)?,
            };
            if let (Some(HostRewrite::Auto), Some(name)) = (plan.host_rewrite, &host.endpoint.hostname) {
                rewrite::set_host(
                    self.exchange.request,
                    plan.forward,
                    name.as_bytes(),
                    self.outcome.attempts,
                );
            }
            let begun = plan.pool.latency_start();
            if let Some(trace) = &mut self.outcome.trace {
                trace.begin_attempt(self.scope.worker, self.outcome.attempts, self.exchange.request);
            }
            let attempt = self.attempt(plan, &host, deadlines, fresh).await;
            if let Some(begun) = begun
                && attempt.as_ref().map_or_else(TryFailure::is_late, |_| true)
            {
                plan.pool.record_latency(&host, begun);
            }
            let replayable = self.exchange.body.is_replayable();
            if attempt.as_ref().is_err_and(|failure| failure.stale) && replayable && !fresh {
                fresh = true;
                continue;
            }
            self.note_attempt(plan, &host, &attempt);
            let outcome = match &attempt {
                Ok(_) => AttemptResult::Answered(self.exchange.response),
                Err(failure) => AttemptResult::Failed { error: &failure.error, request_sent: failure.sent },
            };
            let Some(retry) = retry.filter(|retry| retry::should_retry(retry, outcome) && replayable) else {
                return attempt.map_err(|failure| failure.error);
            };
            if !self.begin_retry(plan, retry) {
                return attempt.map_err(|failure| failure.error);
            }
            tried.push(host.endpoint.address);
            deadlines.next_attempt();
            let rng = &self.scope.worker.rng;
            let delay = retry::backoff(retry, self.outcome.attempts, &mut rng.borrow_mut());
            transfer::pause(&mut self.exchange, delay, deadlines).await?;
            self.outcome.attempts += 1;
            self.set_expected_timeout(plan);
            fresh = false;
        }
    }

    /// Picks an endpoint of the cluster. Avoids those that were `tried`, if possible and if the policy says so.
    #[inline]
    fn pick_host(
        &self,
        plan: &ForwardPlan<'_>,
        retry: Option<&RetryPolicy>,
        tried: &[SocketAddr],
    ) -> Result<Rc<Host>, Error> {
        let avoided = retry.filter(|retry| retry.avoid_previous);
        let attempts = avoided.map_or(0, |retry| retry.host_selection_attempts);
        let priority_frequency = retry.map_or(0, |retry| retry.priority_frequency);
        let want = PickOptions { hash: plan.hash, avoid: tried, attempts, priority_frequency };
        let destination = self.exchange.downstream.origin.destination;
        pick::endpoint(&self.scope.worker.rng, &plan.pool, destination, want)
    }

    /// Reports the result of an attempt to outlier detection, metrics and traces.
    #[inline]
    fn note_attempt(
        &mut self,
        plan: &ForwardPlan<'_>,
        host: &Host,
        attempt: &Result<UpstreamHead, TryFailure>,
    ) {
        if let Err(failure) = attempt {
            increment(&host.totals.errors);
            self.end_attempt_span(Some(&failure.error), false);
            plan.pool.note_failure(&host.endpoint, &failure.error.kind, &self.scope.worker.rng);
        } else if let Some(outlier) = &plan.pool.cluster.outlier {
            let response = &*self.exchange.response;
            let grpc = if self.decision.grpc { grpc_status::in_fields(response) } else { None };
            let status = grpc.map_or(response.status(), grpc_status::to_http);
            let result = outlier.result_of(response.status(), status);
            plan.pool.note(&host.endpoint, result, &self.scope.worker.rng);
        }
    }

    /// Begins a retry. Returns false if no attempt is left or the cluster has too many retries.
    fn begin_retry(&mut self, plan: &ForwardPlan<'_>, retry: &RetryPolicy) -> bool {
        let is_spent = self.outcome.attempts > retry.retries;
        // The guard of the previous retry is released first, so that it does not count against this one.
        self.outcome.retry = None;
        self.outcome.retry = if is_spent { None } else { plan.pool.retry() };
        if self.outcome.retry.is_none() {
            self.outcome.flags.insert(if is_spent { Flags::URX } else { Flags::UO });
            return false;
        }
        self.end_attempt_span(None, true);
        plan.pool.stats.rq_retry.inc();
        (self.outcome.upstream, self.outcome.busy) = (None, None);
        true
    }

    /// Returns the endpoint for the host of the request, of a dynamic forward proxy.
    async fn resolve_host(
        &mut self,
        plan: &ForwardPlan<'_>,
        deadlines: &mut Deadlines,
    ) -> Result<Rc<Host>, Error> {
        let authority = self.exchange.request.authority().to_owned();
        let port = if plan.pool.cluster.tls.is_some() { 443 } else { 80 };
        let attempt = self.outcome.attempts - 1;
        let found = async {
            let found = pick::resolved(&plan.pool, &authority, port, attempt).await;
            found.unwrap_or_else(|| Err(Error::new(Kind::NoHealthyUpstream)))
        };
        let interim = self.exchange.request.version != Version::Http10;
        let mut client = Client::new(self.exchange.downstream, deadlines, &mut self.exchange.body, interim);
        client.wait(found).await
    }

    /// Sends the request to one endpoint and waits for the response's head. `fresh` demands a new connection.
    async fn attempt(
        &mut self,
        plan: &ForwardPlan<'_>,
        host: &Rc<Host>,
        deadlines: &mut Deadlines,
        fresh: bool,
    ) -> Result<UpstreamHead, TryFailure> {
        let pool = &plan.pool;
        (self.outcome.upstream, self.outcome.busy) = (None, None);
        self.outcome.host = Some(host.clone());
        self.outcome.busy = Some(pool.begin(host).ok_or_else(|| Error::new(Kind::Overflow))?);
        let offer = offer(plan, self.scope.manager, &self.exchange);
        let connecting = upstream::get(pool, host, &offer, &self.scope.worker.shared.dialer, fresh);
        let origin = self.exchange.downstream.origin.clone();
        let interim = self.exchange.request.version != Version::Http10;
        let mut client = Client::new(self.exchange.downstream, deadlines, &mut self.exchange.body, interim);
        let idempotent = hop::is_idempotent(self.exchange.request.method());
        let started = self.outcome.started;
        // A request that cannot be repeated does not use a pooled connection whose closure the kernel has already
        // received.
        let pooled = upstream::take(pool, host, &offer)?.and_then(|mut pooled| {
            let usable = !fresh && (idempotent || !pooled.may_be_closed(started) || pooled.is_quiet_now());
            usable.then_some(pooled)
        });
        let mut upstream = match pooled {
            Some(upstream) => upstream,
            None => client.wait(Box::pin(connecting)).await?,
        };
        if plan.terminates_connect {
            self.outcome.upstream = Some(upstream);
            *self.exchange.response = ResponseHead::build(200, &[]);
            let connection = ConnectionOptions::default();
            return Ok(UpstreamHead { framing: Framing::None, connection, is_sent: true });
        }
        let request = &mut *self.exchange.request;
        let connect = request.method() == "CONNECT";
        let reused = upstream.link.served.get() > 0;
        if !reused {
            upstream.link.peer.set_workload(host.endpoint.workload.clone());
        }
        prepare_head(&self.scope, request, plan, &upstream, origin.listener.direction)?;
        let before = (upstream.wire.sent(), upstream.wire.received());
        let persistence = if plan.upgrade && !connect { Persistence::Upgrade } else { Persistence::Keep };
        let admitted = admitted_request!(self, &origin, &upstream.link);
        let admission = &mut self.decision.admission;
        // The request may have waited for a long time: in a filter, for a connection, or before a retry.
        admission.deadline(admitted.worker, || admitted.revalidate());
        if admission.expired().is_some() {
            return Err(Error::new(Kind::Revoked).into());
        }
        client.body.restart();
        let request = &*self.exchange.request;
        upstream.wire.request(request, client.body.framing(), persistence).map_err(Error::from)?;
        let limits = pool.cluster.head_limits();
        let admitted = admitted_request!(self, &origin, &upstream.link);
        let revoked = || admission.deadline(admitted.worker, || admitted.revalidate());
        let (method, response) = (request.method(), &mut *self.exchange.response);
        let arrived = client.request(&mut upstream.wire, method, &limits, response, revoked).await;
        let is_sent = client.complete;
        // An HTTP/2 wire counts only the bytes of bodies, and sends the head at once.
        let sent = matches!(upstream.wire, Wire::Http2(_)) || upstream.wire.sent() > before.0;
        let answered = upstream.wire.received() > before.1;
        self.outcome.upstream = Some(upstream);
        match arrived {
            Ok((framing, connection)) if response.status() != 101 || switches(plan, request, response) => {
                Ok(UpstreamHead { framing, connection, is_sent })
            }
            Ok(_) => Err(TryFailure { error: Error::new(Kind::UpstreamProtocol), sent, stale: false }),
            Err(error) => {
                // A server that answers no ping may have processed the request, as the retry policy must allow for.
                let is_stale = error.kind == Kind::UpstreamClosed && reused && !answered;
                // An HTTP/2 server has refused the request without processing it: any method may be retried
                // (RFC 9113, section 8.7).
                let refused = error.kind == Kind::UpstreamRefused && reused;
                Err(TryFailure { error, sent, stale: refused || is_stale && (idempotent || !sent) })
            }
        }
    }

    /// Reads the metadata of the upstream's sidecar from the response, and adds this workload's for the client's
    /// sidecar.
    fn exchange_metadata(&mut self) {
        if self.scope.manager.metadata_exchange.is_none() {
            return;
        }
        if self.exchange.downstream.origin.listener.direction == Direction::Inbound {
            self.add_workload_metadata();
            return;
        }
        let Some(upstream) = &mut self.outcome.upstream else { return };
        let response = &mut *self.exchange.response;
        if let Some(metadata) = response.header(METADATA) {
            if let Some(workload) = self.scope.worker.peers.workload(metadata) {
                upstream.link.peer.set_workload(Some(workload));
            }
            upstream.link.introduced.set(response.has(METADATA_KEPT));
        }
        for name in [METADATA, METADATA_ID, METADATA_KEPT] {
            response.remove(name);
        }
    }
}

/// Returns the connection pool of the cluster that the route selects.
fn select_pool(
    scope: &RequestScope<'_>,
    request: &RequestHead,
    found: &Found<'_>,
    forward: &Forward,
) -> Result<Rc<Pool>, Error> {
    let missing = || Error::new(Kind::ClusterNotFound(forward.cluster_not_found));
    let name = forward.cluster(found.target, request).ok_or_else(missing)?;
    scope.worker.pool(name, scope.snapshot).ok_or_else(missing)
}

/// Returns the protocols to offer to the upstream.
fn offer(plan: &ForwardPlan<'_>, manager: &HttpManager, exchange: &Exchange<'_>) -> AlpnOffer {
    let offer = if plan.terminates_connect {
        AlpnOffer::BYTES
    } else {
        AlpnOffer::http(&plan.pool.cluster, exchange.request, manager.istio_alpn)
    };
    offer.for_client(exchange.downstream.origin.ends())
}

fn hash_origin(exchange: &Exchange<'_>) -> key::Origin {
    let origin = &exchange.downstream.origin;
    key::Origin { client: exchange.client, remote: origin.source, local: origin.destination }
}

/// Adapts the request's head to the upstream connection.
#[inline]
fn prepare_head(
    scope: &RequestScope<'_>,
    request: &mut RequestHead,
    plan: &ForwardPlan<'_>,
    upstream: &Upstream,
    direction: Direction,
) -> Result<(), Error> {
    if plan.upgrade && request.method() != "CONNECT" {
        prepare_upgrade(scope, request, &upstream.wire)?;
    }
    if direction != Direction::Inbound {
        set_metadata(scope, request, &plan.pool, upstream);
    }
    Ok(())
}

/// Adapts the request for an upgrade to the protocol of the upstream connection.
///
/// # Errors
/// The HTTP/2 server does not offer extended CONNECT (RFC 8441) and would refuse the stream.
fn prepare_upgrade(scope: &RequestScope<'_>, request: &mut RequestHead, wire: &Wire) -> Result<(), Error> {
    match wire {
        Wire::Http2(duplex) if !duplex.may_connect() => Err(Error::new(Kind::UpstreamProtocol)),
        // HTTP/2 clients do not send the key (RFC 8441, 5), and HTTP/1.1 servers require it (RFC 6455, 4.1).
        Wire::Http1(_) if !request.has("sec-websocket-key") => {
            let name = request.header("upgrade").unwrap_or_default();
            if name.eq_ignore_ascii_case(b"websocket") {
                let key = scope.worker.rng.borrow_mut().u128(..).to_ne_bytes();
                request.set("sec-websocket-key", BASE64.encode(key).as_bytes());
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Sets this workload's metadata in a request to another sidecar, unless that sidecar already has them from an earlier
/// request on the connection.
#[inline]
fn set_metadata(scope: &RequestScope<'_>, request: &mut RequestHead, pool: &Pool, upstream: &Upstream) {
    let Some(exchange) = scope.manager.metadata_exchange else { return };
    if upstream.link.introduced.get() || (exchange.skip_external && pool.cluster.is_external) {
        request.remove(METADATA);
        request.remove(METADATA_ID);
    } else {
        let local = &scope.worker.shared.local;
        request.set(METADATA, local.metadata.as_bytes());
        request.set(METADATA_ID, local.node_id.as_bytes());
    }
}

/// Returns whether the upstream grants the upgrade. If so, changes the status to the client's form: 101 in HTTP/1.1
/// (RFC 9110, 15.2.2), 2xx in HTTP/2 (RFC 8441, 5) and for CONNECT.
fn is_switched(plan: &ForwardPlan<'_>, exchange: &mut Exchange<'_>, upstream: Option<&Upstream>) -> bool {
    let Some(upstream) = upstream.filter(|_| plan.upgrade) else { return false };
    let (request, response) = (&*exchange.request, &mut *exchange.response);
    let connect = request.method() == "CONNECT";
    let success = matches!(response.status(), 200..=299);
    let granted = match upstream.wire {
        Wire::Http1(_) if connect => success,
        // `switches` has checked the protocol.
        Wire::Http1(_) => response.status() == 101,
        Wire::Http2(_) => success,
    };
    if granted {
        // The bytes that follow are not content.
        response.remove("content-length");
        match (request.version, request.header("upgrade")) {
            (Version::Http2, _) => response.set_status(200),
            (_, Some(protocol)) if response.status() != 101 => {
                response.set_status(101);
                response.set("upgrade", protocol);
            }
            _ => {}
        }
    }
    granted
}

/// Returns whether an HTTP/1.1 response with status 101 switches to the requested protocol (RFC 9110,
/// 15.2.2).
fn switches(plan: &ForwardPlan<'_>, request: &RequestHead, response: &ResponseHead) -> bool {
    let [requested, granted] = [request.header("upgrade"), response.header("upgrade")];
    let same =
        requested.zip(granted).is_some_and(|(requested, granted)| requested.eq_ignore_ascii_case(granted));
    plan.upgrade && request.method() != "CONNECT" && same
}
