//! The story of a request in its phases: route → authorize → filter → pick → upstream → respond.
//!
//! What is decided is decided before anything is sent. A failure anywhere comes back to [`Story::tell`] as an
//! [`Error`] and is answered in one place, and at the end every request is told in one record. How a request
//! is forwarded, with its tries, is in `forward`.

use std::{
    borrow::Cow,
    future::poll_fn,
    net::IpAddr,
    rc::Rc,
    task::Poll,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    config::{
        HttpManager, RouteTable, Snapshot,
        http::Routes,
        listener::Direction,
        route::{Action, Cors, HeaderOps, Route, VirtualHost},
    },
    context::Worker,
    cors,
    downstream::Downstream,
    error::{Error, Flags, Kind},
    exchange::{Client, Deadlines},
    fault,
    flow::Flow,
    head::{Headers, RequestHead, ResponseHead, Version},
    headers::{self, Hop},
    hop,
    http1::{Connection, Framing, write::Persistence},
    matching,
    overload::{UnderWay, Welcome},
    path::{self, Outcome as Normalized},
    peer::{METADATA, METADATA_ID},
    policy::{self, Subject, Tally, Verdict},
    pool::{Busy, Counted, Host, Pool, Upstream, bump},
    route::{self, Found},
    telemetry::{self, Record, stats::ManagerStats},
    timer,
};

/// One request, from its head to its record.
pub(crate) struct Story<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) manager: &'a HttpManager,
    pub(crate) snapshot: &'a Snapshot,
    counters: &'a ManagerStats,
    pub(crate) downstream: &'a mut Downstream,
    pub(crate) head: &'a mut RequestHead,
    pub(crate) response: &'a mut ResponseHead,
    pub(crate) started: Instant,
    pub(crate) told: Told<'a>,
    /// The connection may serve another request.
    pub(crate) keep: bool,
    /// This hop's element of `x-forwarded-client-cert`.
    forwarded_cert: Option<&'a str>,
    /// Who the client is, proxies in front taken into account.
    client: IpAddr,
    start: SystemTime,
    grpc: bool,
    welcome: Welcome,
    _under_way: UnderWay<'a>,
}

/// What the requests of a connection have in common.
pub(crate) struct Terms<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) manager: &'a HttpManager,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) counters: &'a ManagerStats,
    /// This hop's element of `x-forwarded-client-cert`.
    pub(crate) forwarded_cert: Option<&'a str>,
}

/// What the record says at the end, as it becomes known.
#[derive(Default)]
pub(crate) struct Told<'a> {
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

impl<'a> Story<'a> {
    /// A request whose head has been read.
    pub(crate) fn new(
        terms: Terms<'a>,
        downstream: &'a mut Downstream,
        head: &'a mut RequestHead,
        response: &'a mut ResponseHead,
    ) -> Self {
        let Terms { worker, manager, snapshot, counters, forwarded_cert } = terms;
        let started = Instant::now();
        let (under_way, welcome) = worker.overload.begin(started);
        Self {
            worker,
            manager,
            snapshot,
            counters,
            client: downstream.origin.source.ip(),
            downstream,
            head,
            response,
            started,
            start: SystemTime::now(),
            told: Told::default(),
            keep: false,
            forwarded_cert,
            grpc: false,
            welcome,
            _under_way: under_way,
        }
    }

    /// Tells it from beginning to end; true if the connection may serve another. `last` says that it may not.
    pub(crate) async fn tell(mut self, framing: Framing, connection: Connection, last: bool) -> bool {
        self.keep = !connection.close && !last;
        self.grpc = matching::is_grpc(self.head);
        let mut body = Flow::new(framing, framing, hop::limits(self.manager), framing != Framing::None);
        if let Err(error) = self.serve(&mut body, connection.upgrade).await {
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

    async fn serve(&mut self, body: &mut Flow, upgrade: bool) -> Result<(), Error> {
        match self.welcome {
            Welcome::Yes => {}
            Welcome::IfWanted => {
                let wire = &mut self.downstream.wire;
                if poll_fn(|cx| Poll::Ready(wire.has_ended(cx))).await {
                    return Err(Error::new(Kind::DownstreamClosed));
                }
            }
            Welcome::No => {
                self.counters.rq_overload_close.inc();
                return Err(Error::new(Kind::Overloaded));
            }
        }
        let upgrade = self.receive(upgrade)?;
        let (manager, snapshot) = (self.manager, self.snapshot);
        match path::normalize(manager, self.head) {
            Normalized::Go => {}
            Normalized::Reject => return Err(Error::new(Kind::BadPath)),
            Normalized::Redirect => {
                *self.response = ResponseHead::build(307, &[("location", &path::location(self.head))]);
                self.told.details = Cow::Borrowed("path_normalization_failed");
                return self.answer(b"", body).await;
            }
        }
        let table = match &manager.routes {
            Routes::Inline(table) => Some(&**table),
            Routes::Named(name) => snapshot.routes.get(name).map(|table| &**table),
        };
        let found = table.and_then(|table| route::find(table, self.head, &mut self.worker.dice.borrow_mut()));
        self.told.route = found.as_ref().map_or("", |found| &found.route.name);
        // Refused before it is known whether there is a route, as the filter stands before the router.
        self.authorize(found.as_ref().map(|found| &**found.route))?;
        let (Some(table), Some(found)) = (table, found) else { return Err(Error::new(Kind::RouteNotFound)) };
        let cors = match self.filter(&found, body).await? {
            Filtered::Go(cors) => cors,
            Filtered::Answered => return self.answer_direct(table, &found, b"", body).await,
        };
        match &found.route.action {
            Action::Forward(forward) => self.forward(table, &found, forward, cors, body, upgrade).await,
            Action::Redirect(redirect) => {
                let scheme = if self.is_secure() { "https" } else { "http" };
                let location = route::location(redirect, &found.route.matches, self.head, scheme);
                *self.response = ResponseHead::build(redirect.status, &[("location", &location)]);
                self.answer_direct(table, &found, b"", body).await
            }
            Action::Direct(direct) => {
                *self.response = ResponseHead::build(direct.status, &[]);
                if !direct.body.is_empty() {
                    self.response.append("content-type", b"text/plain");
                }
                self.answer_direct(table, &found, &direct.body, body).await
            }
        }
    }

    /// Before routing: what every hop does to a request's head. Says which upgrade the request asks for.
    fn receive(&mut self, upgrade: bool) -> Result<Option<Box<str>>, Error> {
        if self.head.version == Version::Http10 && !self.manager.accept_http10 {
            return Err(Error::new(Kind::VersionTooLow));
        }
        let wanted = if upgrade { self.head.header("upgrade").map(<[u8]>::to_ascii_lowercase) } else { None };
        // An upgrade to HTTP/2 may be passed over (RFC 9110, 7.8), and is, as by Envoy.
        let wanted = wanted.filter(|name| name != b"h2c").and_then(|name| String::from_utf8(name).ok());
        hop::remove_connection_fields(self.head, wanted.is_some());
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
            tls: peer.tls,
            certified: peer.certificate.is_some(),
            forwarded_cert: self.forwarded_cert,
        };
        self.client = headers::receive(self.manager, hop, self.head, &mut self.worker.dice.borrow_mut());
        Ok(wanted.map(Box::from))
    }

    fn authorize(&self, route: Option<&Route>) -> Result<(), Error> {
        let policies = route.and_then(|route| route.policies.as_ref()).unwrap_or(&self.manager.policies);
        if policies.is_empty() {
            return Ok(());
        }
        let subject = Subject {
            head: Some(self.head),
            peer: &self.downstream.origin.peer,
            source: self.downstream.origin.source,
            remote: self.client,
            destination: self.downstream.origin.destination,
            server_name: self.downstream.origin.server_name(),
        };
        let mut tally = Tally::default();
        let verdict = policy::check(policies, &subject, &mut tally);
        let counters = self.counters;
        counters.rbac_allowed.add(tally.allowed.into());
        counters.rbac_denied.add(tally.denied.into());
        counters.rbac_shadow_allowed.add(tally.shadow_allowed.into());
        counters.rbac_shadow_denied.add(tally.shadow_denied.into());
        match verdict {
            Verdict::Allow => Ok(()),
            Verdict::Deny { details, .. } => Err(Error::new(Kind::Denied(details))),
        }
    }

    /// Faults, CORS, and the demand for TLS.
    async fn filter<'f>(&mut self, found: &Found<'f>, body: &mut Flow) -> Result<Filtered<'f>, Error> {
        if let Some(fault) = found.route.fault.as_ref().filter(|_| self.manager.fault) {
            let decision = fault::decide(fault, self.head, &mut self.worker.dice.borrow_mut());
            let counters = self.counters;
            if let Some(delay) = decision.delay {
                counters.fault_delays.inc();
                self.told.flags.insert(Flags::DI);
                self.pause(delay, body, &mut Deadlines::default()).await?;
            }
            if let Some(kind) = decision.failure() {
                counters.fault_aborts.inc();
                return Err(Error::new(kind));
            }
        }
        let mut marked = None;
        if let Some(cors) = found.route.cors.as_deref().filter(|_| self.manager.cors) {
            match cors::decide(cors, self.head) {
                cors::Decision::Pass => {}
                cors::Decision::Mark => marked = Some(cors),
                cors::Decision::Answer(answer) => {
                    *self.response = answer;
                    return Ok(Filtered::Answered);
                }
            }
        }
        if found.host.require_tls && !self.is_secure() {
            let location = route::https_location(self.head);
            *self.response = ResponseHead::build(301, &[("location", &location)]);
            return Ok(Filtered::Answered);
        }
        Ok(Filtered::Go(marked))
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

    /// Answers by itself; the head is in `response`.
    async fn answer_direct(
        &mut self,
        table: &RouteTable,
        found: &Found<'_>,
        content: &[u8],
        body: &mut Flow,
    ) -> Result<(), Error> {
        self.response_ops(table, found.host, found.route, None);
        self.told.details = Cow::Borrowed("direct_response");
        self.answer(content, body).await
    }

    /// Answers a failure, if the client can still get an answer.
    async fn fail(&mut self, error: &Error, body: &mut Flow) {
        let answer = error.answer();
        self.told.flags.insert(answer.flags);
        self.told.details = answer.details;
        self.told.reusable = false;
        self.told.failure = error.cause.clone().unwrap_or_default();
        if let Some(pool) = &self.told.pool {
            match error.kind {
                Kind::ResponseTimeout => pool.stats.rq_timeout.inc(),
                Kind::TryTimeout => pool.stats.rq_per_try_timeout.inc(),
                _ => {}
            }
        }
        if error.response_started || answer.status == 0 {
            // Only the end of the connection can tell the client that what it has is not all.
            self.downstream.wire.break_off();
            self.keep = false;
            self.told.status = if error.response_started { self.told.status } else { 0 };
            return;
        }
        if self.grpc {
            *self.response = ResponseHead::build(200, &[("content-type", "application/grpc")]);
            hop::set_number(self.response, "grpc-status", answer.grpc.into());
            if !answer.body.is_empty() {
                self.response.append("grpc-message", answer.body.as_bytes());
            }
            _ = self.answer(b"", body).await;
        } else {
            *self.response = ResponseHead::build(answer.status, &[]);
            if !answer.body.is_empty() {
                self.response.append("content-type", b"text/plain");
            }
            _ = self.answer(answer.body.as_bytes(), body).await;
        }
    }

    /// Sends an answer of our own.
    async fn answer(&mut self, content: &[u8], body: &mut Flow) -> Result<(), Error> {
        // Only what is here already is read of a request that was answered without it.
        self.keep &= !self.worker.is_draining();
        if !body.is_read() && !body.skip(&mut self.downstream.wire) {
            self.keep = false;
        }
        hop::finish_response(self.worker, self.manager, self.response, Instant::now());
        self.introduce();
        let framing = match content.len() as u64 {
            0 => Framing::None,
            length => Framing::Length(length),
        };
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
            Poll::Ready(result) => Poll::Ready(result.is_ok()),
            // A client that reads nothing gets no more time than while a request is under way.
            Poll::Pending => timer.poll(cx, deadline).map(|()| false),
        });
        if written.await {
            return Ok(());
        }
        self.keep = false;
        Err(Error::new(Kind::DownstreamClosed).after_response_started())
    }

    /// Header operations on the answer, in Envoy's order.
    pub(crate) fn response_ops(
        &mut self,
        table: &RouteTable,
        host: &VirtualHost,
        route: &Route,
        chosen: Option<&HeaderOps>,
    ) {
        for ops in
            [chosen, Some(&route.headers), Some(&host.headers), Some(&table.headers)].into_iter().flatten()
        {
            if !ops.response.is_empty() {
                let mut response = std::mem::take(self.response);
                headers::apply_response(&ops.response, &mut response, Some(self.head), &self.record());
                *self.response = response;
            }
        }
    }

    /// How the answer's connection fields read.
    pub(crate) fn persistence(&self) -> Persistence {
        match (self.keep, self.head.version) {
            (false, _) => Persistence::Close,
            (true, Version::Http10) => Persistence::KeepAlive,
            (true, _) => Persistence::Keep,
        }
    }

    fn is_secure(&self) -> bool {
        self.head.header("x-forwarded-proto") == Some(b"https")
    }

    /// What is known so far.
    pub(crate) fn record(&self) -> Record<'_> {
        let (told, origin) = (&self.told, &self.downstream.origin);
        let mut record = Record::new(origin.listener.direction, self.start);
        record.status = told.status;
        record.flags = told.flags;
        record.details = &told.details;
        record.upstream_failure = &told.failure;
        record.grpc = self.grpc;
        record.bytes_received = told.received;
        record.bytes_sent = told.sent;
        record.wire_received = told.received;
        record.wire_sent = told.sent;
        record.attempts = told.attempts;
        record.downstream = Some(&*origin.peer);
        record.upstream = told.upstream.as_ref().map(|upstream| &upstream.link.peer);
        record.cluster = told.pool.as_ref().map(|pool| &pool.cluster);
        record.endpoint = told.host.as_ref().map(|host| &host.endpoint);
        record.upstream_remote = told.host.as_ref().map(|host| host.endpoint.address);
        record.upstream_local = told.upstream.as_ref().and_then(|upstream| upstream.link.local);
        record.route_name = told.route;
        record.downstream_local = Some(origin.destination);
        record.downstream_remote = Some(std::net::SocketAddr::new(self.client, origin.source.port()));
        record.downstream_direct = Some(origin.source);
        record.server_name = origin.server_name();
        record
    }

    /// Tells metrics and logs.
    fn report(&self) {
        let mut record = self.record();
        record.duration = self.started.elapsed();
        if self.grpc {
            record.grpc_status = self.told.grpc_status.or_else(|| grpc_status(self.response));
        }
        if record.status >= 500
            && let Some(host) = &self.told.host
        {
            bump(&host.totals.errors);
        }
        if self.manager.stats {
            self.worker.shard.request(&record, self.head);
        }
        if let Some(writer) = &self.worker.log {
            let (request, response) = (Some(&*self.head), Some(&*self.response));
            let context = telemetry::Context { record: &record, request, response };
            for log in &self.manager.access_logs {
                writer.log(log, &context);
            }
        }
    }
}

/// What gRPC says of a call, in its answer's head or trailers.
pub(crate) fn grpc_status(headers: &Headers) -> Option<u32> {
    std::str::from_utf8(headers.header("grpc-status")?).ok()?.parse().ok()
}

/// What the filters make of a request.
enum Filtered<'a> {
    /// It goes on; its answer is marked for CORS if there is a policy here.
    Go(Option<&'a Cors>),
    /// The answer is in `response`.
    Answered,
}
