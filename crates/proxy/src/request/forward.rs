//! Forwarding, the second half of a request's story: pick → upstream → respond, with the tries a policy allows.

mod rewrite;

use std::{
    borrow::Cow,
    rc::Rc,
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};

use crate::{
    request::{
        exchange::{Client, Deadlines},
        hop, mirror,
        story::RequestContext,
        tunnel,
    },
    tcp::Tunnel,
    upstream::{
        self, ApplicationProtocol, Offer, pick,
        pool::{Host, Pool, bump},
    },
    worker::{downstream::Downstream, revalidation::Case},
};
use skysail_http::{
    compress::Compressor,
    flow::Flow,
    grpc_status,
    grpc_web::Through,
    head::{ResponseHead, Version},
    http1::{
        ConnectionOptions, Framing,
        write::{self, Persistence},
    },
    wire::Wire,
};
use skysail_policy::{
    balance::{Want, key},
    config::{
        listener::Direction,
        route::{Forward, HostRewrite},
    },
    error::{self, Error, Flags, Kind},
    grpc, outlier,
    peer::{METADATA, METADATA_ID},
    retry::{self, TryLimits, TryOutcome},
    route::Found,
};

/// Says to a peer that its metadata are remembered for the connection. Sidecars take it off.
const METADATA_KEPT: &str = "x-skysail-peer-metadata-kept";

/// The request as filters saw it, on its way by a link. Borrows only what nobody changes while it is under way.
macro_rules! case {
    ($story:ident, $origin:expr, $link:expr) => {
        Case {
            worker: $story.worker,
            origin: $origin,
            manager: $story.manager,
            head: &*$story.head,
            visits: &$story.visits,
            found: $story.found.as_ref().ok(),
            link: $link,
            client: $story.client,
            start: $story.start,
        }
    };
}

/// What a route and a choice among its targets come to.
struct ForwardPlan<'a> {
    found: &'a Found<'a>,
    forward: &'a Forward,
    pool: Rc<Pool>,
    host: Option<&'a HostRewrite>,
    /// What the route and the client say of time and tries.
    asked: TryLimits<'a>,
    upgrade: bool,
    /// What leads the request to its endpoint, where the balancer hashes.
    hash: Option<u64>,
    /// CONNECT ends here: what follows goes to the endpoint as bytes.
    ends_connect: bool,
}

/// A try that got no answer.
struct TryFailure {
    error: Error,
    /// Some of the request had been sent.
    sent: bool,
    /// The connection had been idle and may have been closed before the request: nothing is known to be wrong.
    stale: bool,
}

impl From<Error> for TryFailure {
    fn from(error: Error) -> Self {
        Self { error, sent: false, stale: false }
    }
}

impl RequestContext<'_> {
    /// Sends the request on, again if the policy says so, and passes the answer back.
    pub(crate) async fn forward(
        &mut self,
        found: &Found<'_>,
        forward: &Forward,
        body: &mut Flow,
        upgrade: bool,
    ) -> Result<(), Error> {
        let pool = self.choose(found, forward)?;
        self.told.pool = Some(pool.clone());
        let host = found.target.and_then(|target| target.host.as_ref()).or(forward.host.as_ref());
        let ends_connect = upgrade && forward.ends_connect && self.head.method() == "CONNECT";
        let waits = if self.grpc { grpc::timeout(self.head) } else { None };
        let timeout = match forward.grpc_timeout.filter(|_| self.grpc) {
            Some(bound) => bound.bound(waits),
            None => forward.timeout,
        };
        let longest = match forward.grpc_duration.filter(|_| waits.is_some()) {
            Some(bound) => bound.bound(waits),
            None => forward.max_duration,
        };
        let asked = retry::asked(self.head, forward.retry.as_deref(), timeout);
        let mut way = ForwardPlan { found, forward, pool, host, asked, upgrade, ends_connect, hash: None };
        if way.changes_head() || self.visits.are_any() {
            // Any answer may be long under way, and meet policies that are not there yet.
            self.visits.keep_routed(self.head);
        }
        self.rewrite(&way);
        self.inject();
        let mut cookies = Vec::new();
        if way.pool.cluster.balancer.hashes() {
            way.hash = key::of(&forward.hash, self.head, self.hash_origin(), &mut cookies);
        }
        let idle_timeout = forward.idle_timeout.or(self.manager.stream_idle_timeout);
        let mut deadlines = Deadlines::new(
            way.asked.timeout,
            way.asked.try_timeout,
            self.manager.request_timeout.map(|timeout| self.started + timeout),
            idle_timeout,
        );
        deadlines.whole = longest.map(|longest| self.started + longest);
        let (framing, connection, complete) = self.tries(&way, body, &mut deadlines).await?;
        if complete && !upgrade && !forward.mirrors.is_empty() {
            mirror::send(self.worker, self.snapshot, &forward.mirrors, self.head, body);
        }
        let now = Instant::now();
        let switched = self.is_switched(&way);
        let upgraded = switched && self.response.status() == 101;
        hop::remove_connection_fields(self.response, upgraded);
        self.meet();
        let elapsed = now.saturating_duration_since(self.started).as_millis();
        self.response.set_number("x-envoy-upstream-service-time", elapsed as u64);
        self.told.status = self.response.status();
        self.told.details = Cow::Borrowed("via_upstream");
        // What has come so far; all of it is added up at the end.
        self.told.received = body.bytes;
        self.response_ops();
        self.told.received = 0;
        for cookie in cookies {
            self.response.append("set-cookie", cookie.as_bytes());
        }
        self.finish(now);
        if switched {
            return self.tunnel(&way, idle_timeout).await;
        }
        self.respond(framing, connection, body, complete, &mut deadlines).await
    }

    fn hash_origin(&self) -> key::Origin {
        let origin = &self.downstream.origin;
        key::Origin { client: self.client, remote: origin.source, local: origin.destination }
    }

    /// Whether the upstream grants what was asked for. If so the answer's head becomes what grants it to the client:
    /// 101 in HTTP/1.1 (RFC 9110, 15.2.2), 2xx in HTTP/2 (RFC 8441, 5) and for CONNECT.
    fn is_switched(&mut self, way: &ForwardPlan<'_>) -> bool {
        let Some(upstream) = self.told.upstream.as_ref().filter(|_| way.upgrade) else { return false };
        let connect = self.head.method() == "CONNECT";
        let success = matches!(self.response.status(), 200..=299);
        let granted = match upstream.wire {
            Wire::Http1(_) if connect => success,
            // Another protocol than the one that was asked for was refused when the head came.
            Wire::Http1(_) => self.response.status() == 101,
            Wire::Http2(_) => success,
        };
        if granted {
            // What follows is no content.
            self.response.remove("content-length");
            match (self.head.version, self.head.header("upgrade")) {
                (Version::Http2, _) => self.response.set_status(200),
                (_, Some(protocol)) if self.response.status() != 101 => {
                    self.response.set_status(101);
                    self.response.set("upgrade", protocol);
                }
                _ => {}
            }
        }
        granted
    }

    /// Whether an answer of HTTP/1.1 with status 101 switches to the one protocol that was asked for (RFC 9110, 15.2.2).
    fn switches(&self, way: &ForwardPlan<'_>) -> bool {
        let [wanted, granted] = [self.head.header("upgrade"), self.response.header("upgrade")];
        let same = wanted.zip(granted).is_some_and(|(wanted, granted)| wanted.eq_ignore_ascii_case(granted));
        way.upgrade && self.head.method() != "CONNECT" && same
    }

    /// The cluster.
    fn choose(&self, found: &Found<'_>, forward: &Forward) -> Result<Rc<Pool>, Error> {
        let missing = || Error::new(Kind::ClusterNotFound(forward.cluster_not_found));
        let name = forward.cluster(found.target, self.head).ok_or_else(missing)?;
        self.worker.pool(name, self.snapshot).ok_or_else(missing)
    }

    /// Tries until there is an answer to pass on, or no more tries. Says also whether the request is complete.
    async fn tries(
        &mut self,
        way: &ForwardPlan<'_>,
        body: &mut Flow,
        deadlines: &mut Deadlines,
    ) -> Result<(Framing, ConnectionOptions, bool), Error> {
        let retry = way.asked.retry().filter(|_| !way.upgrade);
        let mut tried = Vec::new();
        // A connection that went stale while idle costs no try; after it a fresh one is used. A tunnel takes a whole one,
        // unless it is a stream of HTTP/2.
        let mut fresh = way.upgrade && self.offer(way).protocol != ApplicationProtocol::Http2;
        self.told.attempts = 1;
        loop {
            if way.found.host.include_attempt_count {
                self.head.set_number("x-envoy-attempt-count", self.told.attempts.into());
            }
            let avoided = retry.filter(|retry| retry.avoid_previous);
            let attempts = avoided.map_or(0, |retry| retry.host_selection_attempts);
            let want = Want { hash: way.hash, avoid: &tried, attempts };
            let host =
                pick::endpoint(&self.worker.dice, &way.pool, self.downstream.origin.destination, want)?;
            if let (Some(HostRewrite::Auto), Some(name)) = (way.host, &host.endpoint.hostname) {
                self.rename_host(name.as_bytes());
            }
            let begun = way.pool.begun();
            self.begin_try();
            let attempt = self.attempt(way, &host, body, deadlines, fresh).await;
            let is_late =
                |failure: &TryFailure| matches!(failure.error.kind, Kind::ResponseTimeout | Kind::TryTimeout);
            if let Some(begun) = begun
                && attempt.as_ref().map_or_else(is_late, |_| true)
            {
                way.pool.took(&host, begun);
            }
            let replayable = body.is_whole();
            if let Err(failure) = &attempt {
                if failure.stale && replayable && !fresh {
                    fresh = true;
                    continue;
                }
                bump(&host.totals.errors);
                self.end_try(Some(&failure.error), false);
                way.pool.note_failure(&host.endpoint, &failure.error.kind, &self.worker.dice);
            } else if way.pool.cluster.outlier.is_some() {
                let grpc = if self.grpc { grpc_status::in_fields(self.response) } else { None };
                let status = grpc.map_or(self.response.status(), grpc_status::to_http);
                way.pool.note(&host.endpoint, outlier::UpstreamResult::Answered(status), &self.worker.dice);
            }
            let outcome = match &attempt {
                Ok(_) => TryOutcome::Answered(self.response),
                Err(failure) => TryOutcome::Failed { error: &failure.error, request_sent: failure.sent },
            };
            let Some(retry) = retry.filter(|retry| retry::wanted(retry, outcome) && replayable) else {
                return attempt.map_err(|failure| failure.error);
            };
            let spent = self.told.attempts > retry.retries;
            // The last one is over, and makes place for the next.
            self.told.retry = None;
            self.told.retry = if spent { None } else { way.pool.retry() };
            if self.told.retry.is_none() {
                self.told.flags.insert(if spent { Flags::URX } else { Flags::UO });
                return attempt.map_err(|failure| failure.error);
            }
            self.end_try(None, true);
            way.pool.stats.rq_retry.inc();
            tried.push(host.endpoint.address);
            (self.told.upstream, self.told.busy) = (None, None);
            deadlines.next_try();
            let pause = retry::backoff(retry, self.told.attempts, &mut self.worker.dice.borrow_mut());
            self.pause(pause, body, deadlines).await?;
            self.told.attempts += 1;
            self.tell_timeout(way);
            fresh = false;
        }
    }

    /// One try at one endpoint, up to the answer's head.
    async fn attempt(
        &mut self,
        way: &ForwardPlan<'_>,
        host: &Rc<Host>,
        body: &mut Flow,
        deadlines: &mut Deadlines,
        fresh: bool,
    ) -> Result<(Framing, ConnectionOptions, bool), TryFailure> {
        let pool = &way.pool;
        (self.told.upstream, self.told.busy) = (None, None);
        self.told.host = Some(host.clone());
        self.told.busy = Some(pool.begin(host).ok_or_else(|| Error::new(Kind::Overflow))?);
        let offer = self.offer(way);
        let connecting = upstream::get(pool, host, &offer, &self.worker.shared.dialer, fresh);
        let origin = self.downstream.origin.clone();
        let outbound = origin.listener.direction != Direction::Inbound;
        let mut client = Client::new(self.downstream, deadlines, body, self.head.version != Version::Http10);
        let (safe, started) = (hop::is_idempotent(self.head.method()), self.started);
        // What cannot be sent twice goes over no connection that the server has closed meanwhile.
        let pooled = upstream::take(pool, host, &offer)?.and_then(|mut pooled| {
            let usable = !fresh && (safe || !pooled.may_be_stale(started) || pooled.is_quiet_now());
            usable.then_some(pooled)
        });
        let mut upstream = match pooled {
            Some(upstream) => upstream,
            None => client.wait(Box::pin(connecting)).await?,
        };
        if way.ends_connect {
            self.told.upstream = Some(upstream);
            *self.response = ResponseHead::build(200, &[]);
            return Ok((Framing::None, ConnectionOptions::default(), true));
        }
        let connect = self.head.method() == "CONNECT";
        match &upstream.wire {
            // Only extended CONNECT could carry it there, and a server that does not offer it would refuse the stream.
            Wire::Http2(duplex) if way.upgrade && !connect && !duplex.may_connect() => {
                return Err(Error::new(Kind::UpstreamProtocol).into());
            }
            // Clients of HTTP/2 do not say it (RFC 8441, 5), and servers of HTTP/1.1 insist on it (RFC 6455, 4.1).
            Wire::Http1(_) if way.upgrade && !connect && !self.head.has("sec-websocket-key") => {
                let name = self.head.header("upgrade").unwrap_or_default();
                if name.eq_ignore_ascii_case(b"websocket") {
                    let key = self.worker.dice.borrow_mut().u128(..).to_ne_bytes();
                    self.head.set("sec-websocket-key", BASE64.encode(key).as_bytes());
                }
            }
            _ => {}
        }
        let reused = upstream.link.served.get() > 0;
        if !reused {
            upstream.link.peer.set_workload(host.endpoint.workload.clone());
        }
        if let Some(exchange) = self.manager.metadata_exchange.filter(|_| outbound) {
            let local = &self.worker.shared.local;
            if upstream.link.introduced.get() || (exchange.skip_external && pool.cluster.service.is_none()) {
                self.head.remove(METADATA);
                self.head.remove(METADATA_ID);
            } else {
                self.head.set(METADATA, local.metadata.as_bytes());
                self.head.set(METADATA_ID, local.node_id.as_bytes());
            }
        }
        let before = (upstream.wire.sent(), upstream.wire.received());
        let persistence = if way.upgrade && !connect { Persistence::Upgrade } else { Persistence::Keep };
        let case = case!(self, &origin, &upstream.link);
        // It may have waited for long: for a filter, a connection, another try.
        self.admission.end(case.worker, || case.judge());
        if self.admission.ended().is_some() {
            return Err(Error::new(Kind::Revoked).into());
        }
        client.body.begin_again();
        upstream.wire.request(self.head, client.body.framing(), persistence).map_err(Error::from)?;
        let limits = pool.cluster.head_limits();
        let case = case!(self, &origin, &upstream.link);
        let admission = &mut self.admission;
        let revoked = || admission.end(case.worker, || case.judge());
        let method = self.head.method();
        let answer = client.request(&mut upstream.wire, method, &limits, self.response, revoked).await;
        let complete = client.complete;
        // HTTP/2 counts content alone, and its head is on its way at once.
        let sent = matches!(upstream.wire, Wire::Http2(_)) || upstream.wire.sent() > before.0;
        let answered = upstream.wire.received() > before.1;
        self.told.upstream = Some(upstream);
        match answer {
            Ok((framing, connection)) if self.response.status() != 101 || self.switches(way) => {
                Ok((framing, connection, complete))
            }
            Ok(_) => Err(TryFailure { error: Error::new(Kind::UpstreamProtocol), sent, stale: false }),
            Err(error) => {
                let lost = error.kind == Kind::UpstreamClosed && reused && !answered;
                // What a server of HTTP/2 says it has not looked at may go again, whatever it is.
                let refused = error.kind == Kind::UpstreamRefused && reused;
                Err(TryFailure { error, sent, stale: refused || lost && (safe || !sent) })
            }
        }
    }

    /// What will be spoken to the upstream.
    fn offer(&self, way: &ForwardPlan<'_>) -> Offer {
        let offer = if way.ends_connect {
            Offer::BYTES
        } else {
            Offer::http(&way.pool.cluster, self.head, self.manager.istio_alpn)
        };
        offer.for_client(self.downstream.origin.ends())
    }

    /// Takes from the answer what a sidecar says about itself, and says to the client's who we are.
    fn meet(&mut self) {
        if self.manager.metadata_exchange.is_none() {
            return;
        }
        if self.downstream.origin.listener.direction == Direction::Inbound {
            self.introduce();
            return;
        }
        let Some(upstream) = &mut self.told.upstream else { return };
        if let Some(metadata) = self.response.header(METADATA) {
            if let Some(workload) = self.worker.peers.workload(metadata) {
                upstream.link.peer.set_workload(Some(workload));
            }
            upstream.link.introduced.set(self.response.has(METADATA_KEPT));
        }
        for name in [METADATA, METADATA_ID, METADATA_KEPT] {
            self.response.remove(name);
        }
    }

    /// Says to the client's sidecar who we are, if it wants to know.
    pub(crate) fn introduce(&mut self) {
        if self.told.asked {
            let local = &self.worker.shared.local;
            self.response.set(METADATA, local.metadata.as_bytes());
            self.response.set(METADATA_ID, local.node_id.as_bytes());
            self.response.set(METADATA_KEPT, b"1");
        }
    }

    /// Has the answer compressed on its way, if it is one of those that are.
    fn compress(&mut self, compressor: &Compressor, accepted: bool, framing: Framing) -> Option<Through> {
        let length = match framing {
            Framing::None => return None,
            Framing::Length(length) => Some(length),
            Framing::Chunked | Framing::UntilClose => None,
        };
        compressor.begin(self.response, length, accepted).map(Through::Gzip)
    }

    /// Passes the answer on.
    async fn respond(
        &mut self,
        framing: Framing,
        connection: ConnectionOptions,
        request: &mut Flow,
        complete: bool,
        deadlines: &mut Deadlines,
    ) -> Result<(), Error> {
        let old_client = self.head.version == Version::Http10;
        let through = match (self.web, self.compressor) {
            (None, None) => None,
            (Some(web), _) => {
                let through = web.answer(self.response);
                if through.is_none() {
                    // What is not gRPC's no client of gRPC-Web could read.
                    self.told.reusable = false;
                    return self.answer(b"", request).await;
                }
                through
            }
            (None, Some((compressor, accepted))) => self.compress(compressor, accepted, framing),
        };
        let out_framing = match framing {
            Framing::Length(_) if through.is_some() && old_client => Framing::UntilClose,
            Framing::Length(_) if through.is_some() => Framing::Chunked,
            Framing::Chunked | Framing::UntilClose if old_client => Framing::UntilClose,
            Framing::UntilClose => Framing::Chunked,
            framing => framing,
        };
        self.keep &= out_framing != Framing::UntilClose && !self.downstream.origin.side.is_draining();
        // An answer that comes before all of the request may end before it, too. The client must know beforehand.
        self.keep &= request.has_arrived(&self.downstream.wire);
        let persistence = self.persistence();
        let Some(mut upstream) = self.told.upstream.take() else { return Ok(()) };
        self.downstream
            .wire
            .respond(self.response, out_framing, self.head.method(), persistence)
            .map_err(Error::from)?;
        let limits = upstream.link.pool().cluster.head_limits();
        let mut body = Flow::new(framing, out_framing, limits, false);
        if let Some(through) = through {
            body.lead(through);
        }
        request.forget();
        let origin = self.downstream.origin.clone();
        let case = case!(self, &origin, &upstream.link);
        let admission = &mut self.admission;
        let revoked = || admission.end(case.worker, || case.judge());
        let mut client = Client::new(self.downstream, deadlines, request, false);
        client.complete = complete;
        let result = client.respond(&mut upstream.wire, &mut body, revoked).await;
        if let Err(error) = &result
            && !matches!(error.kind, Kind::ResponseTimeout | Kind::Revoked)
        {
            let host = &upstream.link.host;
            upstream.link.pool().note_failure(&host.endpoint, &error.kind, &self.worker.dice);
        }
        let complete = client.complete;
        self.told.sent = body.bytes;
        self.told.grpc_status = body.trailers().and_then(grpc_status::in_fields);
        self.note_trailers(body.trailers());
        self.told.reusable = result.is_ok() && complete && !connection.close;
        self.told.upstream = Some(upstream);
        if !request.is_read() && !request.skip(&mut self.downstream.wire) {
            // The answer came before the end of the request, which nobody wants now.
            self.keep = false;
        }
        result
    }

    /// After a switch the two connections carry whatever was agreed on.
    async fn tunnel(&mut self, way: &ForwardPlan<'_>, idle_timeout: Option<Duration>) -> Result<(), Error> {
        debug_assert!(way.upgrade);
        self.keep = false;
        let Some(mut upstream) = self.told.upstream.take() else { return Ok(()) };
        let Downstream { wire, timer, origin } = &mut *self.downstream;
        let case = case!(self, origin, &upstream.link);
        let admission = &mut self.admission;
        let revoked = || admission.end(case.worker, || case.judge());
        let connect = self.head.method() == "CONNECT";
        let before = (wire.received(), wire.sent());
        match (&mut *wire, &mut upstream.wire) {
            (Wire::Http1(stream), server) => {
                let persistence = if connect { Persistence::Keep } else { Persistence::Upgrade };
                write::response(
                    &mut stream.output,
                    self.response,
                    Framing::None,
                    self.head.method(),
                    persistence,
                );
                if let Wire::Http1(server) = server {
                    Tunnel::default().run(stream, server, timer, idle_timeout, None, revoked).await;
                } else {
                    tunnel::run(wire, server, timer, idle_timeout, revoked).await;
                }
            }
            (Wire::Http2(duplex), server) => {
                duplex.respond(self.response, false)?;
                tunnel::run(wire, server, timer, idle_timeout, revoked).await;
            }
        }
        (self.told.received, self.told.sent) = (wire.received() - before.0, wire.sent() - before.1);
        self.told.upstream = Some(upstream);
        if let Some(refusal) = self.admission.ended() {
            self.told.flags.insert(Flags::RV);
            self.told.details = error::revoked(refusal).into();
            self.note_revoked();
        }
        Ok(())
    }
}
