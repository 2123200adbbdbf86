//! The story of a request in its phases: route → filter → pick → upstream → respond.
//!
//! What is decided is decided before anything is sent. A failure anywhere comes back to [`RequestContext::tell`] as an
//! [`Error`] and is answered in one place, and at the end every request is told in one record. How a request
//! is forwarded, with its tries, is in `forward`.

mod record;

use std::{
    borrow::Cow,
    cell::OnceCell,
    future::poll_fn,
    net::IpAddr,
    rc::Rc,
    task::Poll,
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Map, Value};

use crate::{
    overload::{
        Admission, UnderWay,
        limit_log::{self, Limit},
    },
    request::{
        exchange::{Client, Deadlines},
        filters::Filtered,
        hop,
        spans::Trace,
    },
    telemetry::stats::ManagerStats,
    upstream::pool::{Busy, Counted, Host, Pool, Upstream},
    worker::{
        Worker,
        downstream::Downstream,
        revalidation::{Revalidation, Visits},
    },
};
use skysail_http::{
    compress::Compressor,
    flow::Flow,
    grpc_status,
    grpc_web::Web,
    head::{RequestHead, ResponseHead, Version},
    http1::{ConnectionOptions, Framing, write::Persistence},
    timer,
};
use skysail_policy::{
    config::{
        HttpManager, RouteTable, Snapshot,
        http::Routes,
        listener::Direction,
        route::{Action, HeaderOp, RedirectPath},
    },
    error::{self, Error, Flags, Kind},
    headers::{self, Hop},
    matching,
    path::{self, Normalization as Normalized},
    peer::{METADATA, METADATA_ID},
    route::{self, Found, Missing},
    state::demand::Standing,
};

/// One request, from its head to its record.
pub(crate) struct RequestContext<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) manager: &'a HttpManager,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) renewed: &'a OnceCell<Rc<Snapshot>>,
    pub(crate) counters: &'a ManagerStats,
    pub(crate) downstream: &'a mut Downstream,
    pub(crate) head: &'a mut RequestHead,
    pub(crate) response: &'a mut ResponseHead,
    pub(crate) started: Instant,
    pub(crate) told: RequestOutcome<'a>,
    /// The connection may serve another request.
    pub(crate) keep: bool,
    /// This hop's element of `x-forwarded-client-cert`.
    forwarded_cert: Option<&'a str>,
    /// Who the client is, proxies in front taken into account.
    pub(crate) client: IpAddr,
    pub(crate) found: Result<Found<'a>, Missing>,
    /// Fields that filters have for the answer.
    pub(crate) marks: Vec<ResponseField>,
    /// What filters found out, by their names.
    pub(crate) metadata: Option<Box<Map<String, Value>>>,
    pub(crate) start: SystemTime,
    pub(crate) grpc: bool,
    /// The client speaks gRPC-Web.
    pub(crate) web: Option<Web>,
    /// Whether it is still admitted.
    pub(crate) admission: Revalidation,
    /// What the filters did with it.
    pub(crate) visits: Visits<'a>,
    /// What may compress the answer, and whether the client accepts that.
    pub(crate) compressor: Option<(&'a Compressor, bool)>,
    /// How it is traced, where requests are.
    pub(crate) trace: Option<Box<Trace<'a>>>,
    welcome: Admission,
    _under_way: UnderWay<'a>,
}

/// What the requests of a connection have in common.
pub(crate) struct ConnectionScope<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) manager: &'a HttpManager,
    pub(crate) snapshot: &'a Snapshot,
    /// A place for a newer one, if the request has to wait for that.
    pub(crate) renewed: &'a OnceCell<Rc<Snapshot>>,
    pub(crate) counters: &'a ManagerStats,
    /// This hop's element of `x-forwarded-client-cert`.
    pub(crate) forwarded_cert: Option<&'a str>,
}

/// A field that a filter has for the answer.
pub(crate) struct ResponseField {
    pub(crate) name: Box<str>,
    pub(crate) value: Box<[u8]>,
    /// Besides others of its name, not instead of them.
    pub(crate) besides: bool,
}

/// What the record says at the end, as it becomes known.
#[derive(Default)]
pub(crate) struct RequestOutcome<'a> {
    pub(crate) status: u16,
    pub(crate) flags: Flags,
    pub(crate) details: Cow<'static, str>,
    pub(crate) failure: Box<str>,
    pub(crate) attempts: u32,
    pub(crate) received: u64,
    pub(crate) sent: u64,
    pub(crate) route: &'a str,
    pub(crate) pool: Option<Rc<Pool>>,
    pub(crate) host: Option<Rc<Host>>,
    pub(crate) upstream: Option<Upstream>,
    /// Counts the request at its upstream until it is over.
    pub(crate) busy: Option<Busy>,
    /// Counts the retry until it is over.
    pub(crate) retry: Option<Counted>,
    /// The status that came after the answer's content.
    pub(crate) grpc_status: Option<u32>,
    /// The upstream connection is good for another request.
    pub(crate) reusable: bool,
    /// The client's sidecar wants to know who we are.
    pub(crate) asked: bool,
}

impl<'a> RequestContext<'a> {
    /// A request whose head has been read.
    pub(crate) fn new(
        terms: ConnectionScope<'a>,
        downstream: &'a mut Downstream,
        head: &'a mut RequestHead,
        response: &'a mut ResponseHead,
    ) -> Self {
        let ConnectionScope { worker, manager, snapshot, renewed, counters, forwarded_cert } = terms;
        let started = Instant::now();
        let (under_way, welcome) = worker.overload.begin(started);
        Self {
            worker,
            manager,
            snapshot,
            renewed,
            counters,
            client: downstream.origin.source.ip(),
            admission: downstream.origin.admission.clone(),
            visits: Visits::default(),
            downstream,
            head,
            response,
            started,
            start: SystemTime::now(),
            told: RequestOutcome::default(),
            keep: false,
            forwarded_cert,
            found: Err(Missing::Route),
            marks: Vec::new(),
            metadata: None,
            grpc: false,
            web: None,
            compressor: None,
            trace: None,
            welcome,
            _under_way: under_way,
        }
    }

    /// Tells it from beginning to end; true if the connection may serve another. `last` says that it may not.
    pub(crate) async fn tell(&mut self, framing: Framing, connection: ConnectionOptions, last: bool) -> bool {
        let wanted = self.wanted_upgrade(connection.upgrade);
        // First, so that everything is decided by what goes on.
        let keep_upgrade = wanted.is_some() && self.head.method() != "CONNECT";
        hop::remove_connection_fields(self.head, keep_upgrade);
        // What follows such a request may be another protocol, even where it is refused, and is never read as HTTP.
        self.keep = !connection.close && !last && wanted.is_none();
        self.grpc = matching::is_grpc(self.head);
        let mut body = Flow::new(framing, framing, hop::limits(self.manager), framing != Framing::None);
        if let Err(error) = self.serve(&mut body, wanted).await {
            self.fail(&error, &mut body).await;
        }
        self.told.received += body.bytes;
        self.report();
        if let Some(upstream) = self.told.upstream.take()
            && self.told.reusable
        {
            upstream.give_back();
        }
        self.keep
    }

    async fn serve(&mut self, body: &mut Flow, upgrade: Option<Box<str>>) -> Result<(), Error> {
        match self.welcome {
            Admission::Yes => {}
            Admission::IfWanted => {
                let wire = &mut self.downstream.wire;
                if poll_fn(|cx| Poll::Ready(wire.has_ended(cx))).await {
                    return Err(Error::new(Kind::DownstreamClosed));
                }
            }
            Admission::No if self.downstream.origin.listener.bypass_overload => {}
            Admission::No => {
                self.counters.rq_overload_close.inc();
                return Err(Error::new(Kind::Overloaded));
            }
        }
        if self.head.version == Version::Http10 && self.head.authority().is_empty() {
            match &self.manager.default_host {
                Some(host) => self.head.set_authority(host),
                None => return Err(Error::new(Kind::MissingHost)),
            }
        }
        let normalized = path::normalize(self.manager, self.head);
        if normalized != Normalized::Go && self.head.has("x-forwarded-proto") {
            // What is refused so early has a route, and its marks, only if a proxy in front has said how it came.
            self.find_route();
        }
        match normalized {
            Normalized::Go => {}
            Normalized::Reject => return Err(Error::new(Kind::BadPath)),
            Normalized::Redirect => {
                let location = path::location(self.head);
                self.told.details = Cow::Borrowed("path_normalization_failed");
                let location = ("location".into(), location.into_bytes().into());
                return self.reply(307, &[location], b"", body).await;
            }
        }
        self.receive();
        self.find_route();
        let standing = self.standing();
        if standing != Standing::Settled {
            Box::pin(self.find_host(standing, body)).await?;
        }
        if let Some(tracing) = &self.manager.tracing {
            self.begin_trace(tracing);
        }
        if let Some(name) = &upgrade {
            self.allow_upgrade(name)?;
        }
        if self.filter(body).await? == Filtered::Answered {
            return Ok(());
        }
        let found = match self.found {
            Ok(found) => found,
            Err(Missing::Route) => return Err(Error::new(Kind::RouteNotFound)),
            Err(Missing::Tls) => {
                let location = route::https_location(self.head);
                self.told.details = Cow::Borrowed("direct_response");
                return self.say(301, &[("location", &location)], b"", body).await;
            }
        };
        match &found.route.action {
            Action::Forward(forward) => self.forward(&found, forward, body, upgrade.is_some()).await,
            Action::Redirect(redirect) => {
                let scheme = self.head.scheme();
                if let Some(RedirectPath::Rewritten(rewrite)) = &redirect.path {
                    self.rewrite_path(rewrite, &found.route.matches);
                }
                let location = route::location(redirect, self.head, scheme);
                self.told.details = Cow::Borrowed("direct_response");
                self.say(redirect.status, &[("location", &location)], b"", body).await
            }
            Action::Direct(direct) => {
                self.told.details = Cow::Borrowed("direct_response");
                self.say(direct.status, &[], &direct.body, body).await
            }
        }
    }

    pub(crate) fn table(&self) -> Option<&'a RouteTable> {
        match &self.manager.routes {
            Routes::Inline(table) => Some(table),
            Routes::Named(name) => self.snapshot.routes.get(name).map(|table| &**table),
        }
    }

    pub(crate) fn find_route(&mut self) {
        let table = self.table();
        let mut dice = self.worker.dice.borrow_mut();
        self.visits.route(dice.get_seed());
        self.found = table.map_or(Err(Missing::Route), |table| route::find(table, self.head, &mut dice));
        self.told.route = self.found.as_ref().map_or("", |found| &found.route.name);
    }

    /// Returns the protocol that the request asks for, in lower case. Several are one that nobody allows: as in Envoy the
    /// whole of the field is its name. `asks` says whether the request asks at all.
    fn wanted_upgrade(&self, asks: bool) -> Option<Box<str>> {
        if self.head.method() == "CONNECT" {
            return Some("connect".into());
        }
        let name = self.head.header("upgrade").filter(|_| asks)?;
        let name = String::from_utf8_lossy(name).to_ascii_lowercase();
        // An upgrade of HTTP/1.1 to HTTP/2 may be ignored (RFC 9110, 7.8), and is, as by Envoy.
        (name != "h2c" || self.head.version == Version::Http2).then(|| name.into())
    }

    /// Refuses an upgrade that neither the route nor the manager passes on, before filters have their say, as Envoy.
    fn allow_upgrade(&self, wanted: &str) -> Result<(), Error> {
        let by_route = match &self.found {
            Ok(Found { route, .. }) if let Action::Forward(forward) = &route.action => {
                forward.upgrades.iter().find(|(name, _)| **name == *wanted)
            }
            Err(Missing::Route) => return Ok(()),
            _ => None,
        };
        let by_manager = || self.manager.upgrades.iter().any(|name| **name == *wanted);
        let allowed = by_route.map_or_else(by_manager, |(_, allowed)| *allowed);
        if allowed { Ok(()) } else { Err(Error::new(Kind::UpgradeRefused)) }
    }

    /// Before routing: what every hop does to a request's head.
    fn receive(&mut self) {
        let origin = &self.downstream.origin;
        let peer = &origin.peer;
        if self.manager.metadata_exchange.is_some() && origin.listener.direction == Direction::Inbound {
            if let Some(metadata) = self.head.header(METADATA) {
                self.told.asked = true;
                peer.set_workload(self.worker.peers.workload(metadata));
                self.head.remove(METADATA);
            }
            self.head.remove(METADATA_ID);
        }
        let hop = Hop {
            source: origin.source.ip(),
            own: hop::own_address,
            tls: peer.tls,
            certified: peer.certificate.is_some(),
            forwarded_cert: self.forwarded_cert,
        };
        self.client = headers::receive(self.manager, hop, self.head, &mut self.worker.dice.borrow_mut());
    }

    /// Lets time pass, unless the client goes away or a deadline comes first.
    pub(crate) async fn pause(
        &mut self,
        delay: Duration,
        body: &mut Flow,
        deadlines: &mut Deadlines,
    ) -> Result<(), Error> {
        let sleep = async {
            timer::sleep(delay).await;
            Ok(())
        };
        Client::new(self.downstream, deadlines, body, false).wait(Box::pin(sleep)).await
    }

    /// Answers as the route says. Headers come before its operations.
    async fn say(
        &mut self,
        status: u16,
        headers: &[(&str, &str)],
        text: &[u8],
        body: &mut Flow,
    ) -> Result<(), Error> {
        *self.response = ResponseHead::build(status, headers);
        self.response_ops();
        self.put_in_words(text, body).await
    }

    /// Answers instead of what the route leads to. Routes that lead on put their marks on that, too; these headers come
    /// instead.
    pub(crate) async fn reply(
        &mut self,
        status: u16,
        headers: &[(Box<str>, Box<[u8]>)],
        text: &[u8],
        body: &mut Flow,
    ) -> Result<(), Error> {
        self.begin_reply(status);
        for (name, _) in headers {
            self.response.remove(name);
        }
        for (name, value) in headers {
            self.response.append(name, value);
        }
        self.put_in_words(text, body).await
    }

    /// The head of such an answer, with the marks of the route.
    pub(crate) fn begin_reply(&mut self, status: u16) {
        *self.response = ResponseHead::build(status, &[]);
        if self.leads_on() {
            self.response_ops();
        }
    }

    /// Says a text: in gRPC's words if the client speaks it.
    pub(crate) async fn put_in_words(&mut self, text: &[u8], body: &mut Flow) -> Result<(), Error> {
        if let Some(web) = self.web {
            self.response.remove("content-type");
            _ = web.answer(self.response);
            if !text.is_empty() {
                self.response.set("grpc-message", percent_encoded(text).as_bytes());
            }
            return self.answer(b"", body).await;
        }
        if self.grpc {
            let status = self.response.status();
            self.response.set_status(200);
            self.response.set("content-type", b"application/grpc");
            if !self.response.has("grpc-status") {
                self.response.set_number("grpc-status", grpc_status::from_http(status).into());
            }
            if !text.is_empty() && self.head.method() != "HEAD" {
                self.response.set("grpc-message", percent_encoded(text).as_bytes());
            }
            return self.answer(b"", body).await;
        }
        if text.is_empty() {
            self.response.remove("content-type");
        } else {
            self.response.set("content-type", b"text/plain");
        }
        self.answer(text, body).await
    }

    /// Answers a failure, if the client can still get an answer.
    async fn fail(&mut self, error: &Error, body: &mut Flow) {
        self.count(&error.kind);
        let mut answer = error.answer();
        if error.kind == Kind::Revoked
            && let Some(refusal) = self.admission.ended()
        {
            answer.details = error::revoked(refusal).into();
            self.keep = false;
        }
        self.told.flags.insert(answer.flags);
        self.told.details = answer.details;
        self.told.reusable = false;
        self.told.failure = error.cause.clone().unwrap_or_default();
        if error.response_started || answer.status == 0 {
            // Only the end of the connection can tell the client that what it has is not all.
            self.downstream.wire.break_off();
            self.keep = false;
            self.told.status = if error.response_started { self.told.status } else { 0 };
            return;
        }
        let grpc = self.grpc.then(|| ("grpc-status".into(), answer.grpc.to_string().into_bytes().into()));
        // Nobody before us should try again: the cluster has enough to do.
        let overloaded = matches!(error.kind, Kind::Overflow);
        let overloaded = overloaded.then(|| ("x-envoy-overloaded".into(), b"true".to_vec().into()));
        let headers: Vec<_> = grpc.into_iter().chain(overloaded).collect();
        let mut words = answer.body;
        if self.told.attempts > 1 {
            words = words.replace("reset reason:", "retried and the latest reset reason:").into();
        }
        if let Err(error) = self.reply(answer.status, &headers, words.as_bytes(), body).await {
            self.count(&error.kind);
        }
    }

    /// Counts a failure that comes of a limit.
    fn count(&self, kind: &Kind) {
        let counters = self.counters;
        let (counter, limit) = match kind {
            Kind::StreamIdle(_) => (&counters.rq_idle_timeout, Limit::StreamIdle),
            Kind::RequestTimeout => (&counters.rq_timeout, Limit::RequestTime),
            Kind::StreamDuration(_) => (&counters.rq_max_duration, Limit::StreamDuration),
            Kind::BodyTooLarge => (&counters.rq_too_large, Limit::Content),
            Kind::Revoked => return self.note_revoked(),
            Kind::ResponseTimeout => {
                return self.told.pool.iter().for_each(|pool| pool.stats.rq_timeout.inc());
            }
            _ => return,
        };
        counter.inc();
        let source = self.downstream.origin.source;
        limit_log::tell(limit, format_args!("{}, client {source}", self.manager.stat_prefix));
    }

    /// Counts and tells of a request that is ended because it would not be admitted any more.
    pub(crate) fn note_revoked(&self) {
        self.counters.rq_revoked.inc();
        let (manager, source) = (&self.manager.stat_prefix, self.downstream.origin.source);
        if let Some(refusal) = self.admission.ended() {
            limit_log::tell(Limit::Admission, format_args!("{manager}, client {source}, {refusal}"));
        }
    }

    /// Sends an answer of our own.
    pub(crate) async fn answer(&mut self, content: &[u8], body: &mut Flow) -> Result<(), Error> {
        // Only what is here already is read of a request that was answered without it.
        self.keep &= !self.downstream.origin.side.is_draining();
        if !body.is_read() && !body.skip(&mut self.downstream.wire) {
            self.keep = false;
        }
        self.finish(Instant::now());
        self.introduce();
        let framing = match content.len() as u64 {
            0 => Framing::None,
            length => Framing::Length(length),
        };
        if let Framing::Length(length) = framing {
            self.response.set_number("content-length", length);
        }
        // An answer to HEAD says the length of what is not sent.
        let silent = self.head.method() == "HEAD";
        let mut content = Flow::whole(if silent { b"" } else { content }, framing, None);
        self.told.sent = content.bytes;
        self.told.status = self.response.status();
        let persistence = self.persistence();
        let Downstream { wire, timer, .. } = &mut *self.downstream;
        wire.respond(self.response, framing, self.head.method(), persistence)?;
        let deadline = self.manager.stream_idle_timeout.map(|timeout| Instant::now() + timeout);
        let written = poll_fn(|cx| match content.poll_send(cx, wire) {
            Poll::Ready(result) => Poll::Ready(result.map_err(|_| Kind::DownstreamClosed)),
            // A client that reads nothing gets no more time than while a request is under way.
            Poll::Pending => timer.poll(cx, deadline).map(|()| Err(Kind::StreamIdle(true))),
        });
        let written = written.await;
        self.keep &= written.is_ok();
        written.map_err(|kind| Error::new(kind).after_response_started())
    }

    /// The route's operations on the answer, in Envoy's order.
    pub(crate) fn response_ops(&mut self) {
        let Ok(found) = self.found else { return };
        let target = found.target.map(|target| &target.headers);
        let ops = [target, Some(&found.route.headers), Some(&found.host.headers), Some(&found.table.headers)];
        for ops in ops.into_iter().flatten() {
            self.change_response(&ops.response);
        }
    }

    /// Operations on the answer.
    pub(crate) fn change_response(&mut self, ops: &[HeaderOp]) {
        if !ops.is_empty() {
            let mut response = std::mem::take(self.response);
            let mut record = self.record();
            record.grpc_status = self.grpc_status(&response);
            headers::apply_response(ops, &mut response, Some(self.head), &record);
            *self.response = response;
        }
    }

    /// The last touches to an answer: what filters have to say, then what every answer has.
    pub(crate) fn finish(&mut self, now: Instant) {
        for ResponseField { name, value, besides } in self.marks.drain(..) {
            if besides {
                self.response.append(&name, &value);
            } else {
                self.response.set(&name, &value);
            }
        }
        self.name_spans();
        hop::finish_response(self.worker, self.manager, self.response, now);
    }

    /// Whether the request has a route to an upstream.
    pub(crate) fn leads_on(&self) -> bool {
        self.found.is_ok_and(|found| matches!(found.route.action, Action::Forward(_)))
    }

    /// How the answer's connection fields read.
    pub(crate) fn persistence(&self) -> Persistence {
        match (self.keep, self.head.version) {
            (false, _) => Persistence::Close,
            (true, Version::Http10) => Persistence::KeepAlive,
            (true, _) => Persistence::Keep,
        }
    }
}

/// As gRPC writes a text in a header (PROTOCOL-HTTP2: `Percent-Encoded`).
fn percent_encoded(text: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text {
        match byte {
            b'%' | ..b' ' | 0x7f.. => encoded.push_str(&format!("%{byte:02X}")),
            _ => encoded.push(char::from(*byte)),
        }
    }
    encoded
}
