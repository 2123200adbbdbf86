//! The state of one request. It has four parts, and a phase takes only those that it needs:
//!
//! | part | content |
//! |---|---|
//! | [`RequestScope`] | worker, configuration and counters |
//! | [`Exchange`] | the wire: downstream connection, both heads, body of the request |
//! | [`RequestDecision`] | route, admission, results of the filters |
//! | [`RequestOutcome`] | the record: status, flags, upstream, bytes, times, trace, metadata |

use std::{
    borrow::Cow,
    cell::OnceCell,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    sync::Arc,
    time::{Instant, SystemTime},
};

use serde_json::{Map, Value};

use crate::{
    overload::{Admission, InFlight},
    request::{hop, processor::Processor, spans::Trace},
    telemetry::stats::ManagerStats,
    upstream::pool::{ActiveRequest, Host, LimitGuard, Pool, Upstream},
    worker::{
        Worker,
        downstream::Downstream,
        revalidation::{FilterResults, Revalidation},
    },
};
use skysail_http::{
    compress::Compressor,
    decompress::{Decoding, Decompressor},
    flow::Flow,
    grpc_status,
    grpc_web::WebCall,
    head::{RequestHead, ResponseHead, Version},
    http1::{Framing, write::Persistence},
};
use skysail_policy::{
    config::{
        Cluster, HttpManager, Snapshot,
        http::Filter,
        route::{Action, AppendAction},
    },
    error::Flags,
    matching,
    record::Record,
    route::{Found, NoRoute},
};

/// One request, from its head to its record.
pub(crate) struct RequestContext<'a> {
    pub(crate) scope: RequestScope<'a>,
    pub(crate) exchange: Exchange<'a>,
    pub(crate) decision: RequestDecision<'a>,
    pub(crate) outcome: RequestOutcome<'a>,
    /// Counts the request as in flight for load shedding.
    _in_flight: InFlight<'a>,
}

/// The worker, the configuration and the counters that serve a request.
pub(crate) struct RequestScope<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) manager: &'a HttpManager,
    pub(crate) snapshot: &'a Snapshot,
    /// Storage for a newer snapshot. A request that has waited for its virtual host uses it.
    pub(crate) renewed: &'a OnceCell<Rc<Snapshot>>,
    pub(crate) counters: &'a ManagerStats,
    /// This hop's element of `x-forwarded-client-cert`.
    pub(crate) forwarded_cert: Option<&'a str>,
}

/// A request and its response on the wire.
pub(crate) struct Exchange<'a> {
    pub(crate) downstream: &'a mut Downstream,
    /// Head of the request.
    pub(crate) request: &'a mut RequestHead,
    /// Head of the response.
    pub(crate) response: &'a mut ResponseHead,
    /// Body of the request.
    pub(crate) body: Flow,
    /// Address of the client, from `x-forwarded-for` where the configuration trusts it.
    pub(crate) client: IpAddr,
    /// Whether the connection may serve another request.
    pub(crate) keep_alive: bool,
}

/// Decisions about a request.
pub(crate) struct RequestDecision<'a> {
    /// Decision of load shedding.
    pub(crate) overload: Admission,
    /// The route, or the reason why there is none.
    pub(crate) found: Result<Found<'a>, NoRoute>,
    /// Whether the configuration in effect still admits the request.
    pub(crate) admission: Revalidation,
    /// Recorded results of the filters, for another check of the request after a configuration change.
    pub(crate) filter_results: FilterResults<'a>,
    /// Whether the request is a gRPC or gRPC-Web call.
    pub(crate) grpc: bool,
    /// The form of gRPC-Web, if the client uses it.
    pub(crate) grpc_web: Option<WebCall>,
    /// State of the filters for the response. The first filter that needs it creates it.
    pub(crate) response_filters: Option<Box<ResponseFilters<'a>>>,
    /// Whether the response carries this workload's metadata, because the client's sidecar sent its own.
    pub(crate) sends_metadata: bool,
    /// Whether Lua scripts and external processors have handled the response, or must not.
    pub(crate) has_run_scripts: bool,
}

/// State that filters keep for the response.
#[derive(Default)]
pub(crate) struct ResponseFilters<'a> {
    /// Fields that filters add to the response.
    pub(crate) fields: Vec<ResponseField>,
    /// Number of `fields` from the filters before each filter that changes responses.
    pub(crate) fields_before: Vec<(&'a Filter, usize)>,
    /// The compressors of the response.
    pub(crate) compression: Option<Compression<'a>>,
    /// The decompressors of the response.
    pub(crate) decompressors: Vec<&'a Decompressor>,
    /// Decompression of the response, after its head has been processed.
    pub(crate) decoding: Option<Box<Decoding>>,
    /// External processors that have got the request.
    pub(crate) processors: Vec<Processor<'a>>,
}

/// The compressors of a response, in the order of the configuration.
pub(crate) struct Compression<'a> {
    pub(crate) compressors: Vec<&'a Compressor>,
    /// The client's `accept-encoding`.
    pub(crate) accept: Box<[u8]>,
}

/// A field that a filter adds to the response.
#[derive(Debug, PartialEq)]
pub(crate) struct ResponseField {
    pub(crate) name: Box<str>,
    pub(crate) value: Box<[u8]>,
    /// Treatment of other fields of its name.
    pub(crate) action: AppendAction,
}

impl ResponseField {
    /// Adds the field to a response.
    #[inline]
    pub(crate) fn add_to(&self, response: &mut ResponseHead) {
        match self.action {
            AppendAction::Append => response.append(&self.name, &self.value),
            AppendAction::AddIfAbsent if response.has(&self.name) => {}
            AppendAction::OverwriteIfExists if !response.has(&self.name) => {}
            AppendAction::AddIfAbsent | AppendAction::Overwrite | AppendAction::OverwriteIfExists => {
                response.set(&self.name, &self.value);
            }
        }
    }
}

/// Result of the filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filtered {
    /// The request continues.
    Continue,
    /// A filter has answered the request.
    Answered,
}

/// Values for the record.
pub(crate) struct RequestOutcome<'a> {
    /// Wall-clock time at which the head was complete.
    pub(crate) start: SystemTime,
    /// The same on the monotonic clock.
    pub(crate) started: Instant,
    /// Status of the response; 0 if there was none.
    pub(crate) status: u16,
    /// Status of the failure that was answered; 0 if there was none. Clients of gRPC get 200 instead.
    pub(crate) failed: u16,
    pub(crate) flags: Flags,
    /// Response code details.
    pub(crate) details: Cow<'static, str>,
    /// Cause of an upstream's failure.
    pub(crate) failure: Box<str>,
    /// Number of attempts at an upstream.
    pub(crate) attempts: u32,
    /// Bytes of the request's body.
    pub(crate) received: u64,
    /// Bytes of the response's body.
    pub(crate) sent: u64,
    pub(crate) pool: Option<Rc<Pool>>,
    pub(crate) host: Option<Rc<Host>>,
    pub(crate) upstream: Option<Upstream>,
    /// Counts the request at its upstream while this lives.
    pub(crate) busy: Option<ActiveRequest>,
    /// Counts the retry at its cluster while this lives.
    pub(crate) retry: Option<LimitGuard>,
    /// gRPC status from the trailers of the response.
    pub(crate) grpc_status: Option<u32>,
    /// Whether the upstream connection may serve another request.
    pub(crate) reusable: bool,
    /// Dynamic metadata of the filters, by filter name.
    pub(crate) metadata: Option<Box<Map<String, Value>>>,
    /// Tracing state, if the connection manager traces requests.
    pub(crate) trace: Option<Box<Trace<'a>>>,
}

impl<'a> RequestContext<'a> {
    /// Returns the state of a request whose head has been read. The function is inlined, because the state is
    /// large and would be copied.
    #[inline(always)]
    pub(crate) fn new(
        scope: RequestScope<'a>,
        downstream: &'a mut Downstream,
        request: &'a mut RequestHead,
        response: &'a mut ResponseHead,
        framing: Framing,
    ) -> Self {
        let started = Instant::now();
        let (in_flight, overload) = scope.worker.overload.begin(started);
        Self {
            decision: RequestDecision {
                overload,
                found: Err(NoRoute::NoMatch),
                admission: downstream.origin.admission.clone(),
                filter_results: FilterResults::default(),
                grpc: false,
                grpc_web: None,
                response_filters: None,
                sends_metadata: false,
                has_run_scripts: false,
            },
            exchange: Exchange {
                client: downstream.origin.source.ip(),
                downstream,
                request,
                response,
                body: Flow::new(framing, framing, hop::limits(scope.manager), framing != Framing::None),
                keep_alive: false,
            },
            outcome: RequestOutcome {
                start: SystemTime::now(),
                started,
                status: 0,
                failed: 0,
                flags: Flags::NONE,
                details: Cow::Borrowed(""),
                failure: Box::default(),
                attempts: 0,
                received: 0,
                sent: 0,
                pool: None,
                host: None,
                upstream: None,
                busy: None,
                retry: None,
                grpc_status: None,
                reusable: false,
                metadata: None,
                trace: None,
            },
            scope,
            _in_flight: in_flight,
        }
    }

    /// Returns the record of the request up to now.
    pub(crate) fn record(&self) -> Record<'_> {
        let Self { exchange, decision, outcome, .. } = self;
        let origin = &exchange.downstream.origin;
        let mut record = Record::new(origin.listener.direction, outcome.start);
        record.status = outcome.status;
        record.flags = outcome.flags;
        record.details = &outcome.details;
        record.upstream_failure = &outcome.failure;
        record.grpc = decision.grpc;
        record.bytes_received = outcome.received;
        record.bytes_sent = outcome.sent;
        record.wire_received = outcome.received;
        record.wire_sent = outcome.sent;
        record.attempts = outcome.attempts;
        record.downstream = Some(&*origin.peer);
        record.upstream = outcome.upstream.as_ref().map(|upstream| &upstream.link.peer);
        record.cluster = outcome.pool.as_ref().map(|pool| &pool.cluster).or_else(|| self.routed_cluster());
        record.endpoint = outcome.host.as_ref().map(|host| &host.endpoint);
        let link = outcome.upstream.as_ref().map(|upstream| &upstream.link);
        let selected = outcome.host.as_ref().map(|host| host.endpoint.address);
        record.upstream_remote = link.map(|link| link.remote).or(selected);
        record.upstream_local = link.and_then(|link| link.local);
        record.route_name = decision.found.as_ref().map_or("", |found| &found.route.name);
        record.metadata = outcome.metadata.as_deref();
        record.downstream_local = Some(origin.destination);
        // The port of a client that `x-forwarded-for` names is unknown.
        let port = if exchange.client == origin.source.ip() { origin.source.port() } else { 0 };
        record.downstream_remote = Some(SocketAddr::new(exchange.client, port));
        record.downstream_direct = Some(origin.direct);
        record.server_name = origin.server_name();
        record.span = outcome.trace.as_ref().and_then(|trace| trace.context());
        record
    }

    /// Returns the cluster of the route, for a request that is not forwarded.
    pub(crate) fn routed_cluster(&self) -> Option<&Arc<Cluster>> {
        let found = self.decision.found.ok()?;
        let Action::Forward(forward) = &found.route.action else { return None };
        self.scope.snapshot.clusters.get(forward.cluster(found.target, self.exchange.request)?)
    }

    /// Returns the gRPC status of the response: its own, or the one that its HTTP status maps to.
    pub(crate) fn grpc_status(&self, response: &ResponseHead) -> Option<u32> {
        let own = self.outcome.grpc_status.or_else(|| grpc_status::in_fields(response));
        let mapped = || (self.outcome.status > 0).then(|| grpc_status::from_http(self.outcome.status));
        own.or_else(mapped).filter(|_| self.decision.grpc)
    }
}

impl Exchange<'_> {
    /// Returns the form of the response's connection fields.
    pub(crate) fn persistence(&self) -> Persistence {
        match (self.keep_alive, self.request.version) {
            (false, _) => Persistence::Close,
            (true, Version::Http10) => Persistence::KeepAlive,
            (true, _) => Persistence::Keep,
        }
    }
}

impl<'a> RequestDecision<'a> {
    /// Returns the state of the filters for the response, which it creates if there is none.
    pub(crate) fn response_filters_mut(&mut self) -> &mut ResponseFilters<'a> {
        self.response_filters.get_or_insert_default()
    }

    /// Returns whether the request has a route to an upstream.
    pub(crate) fn is_forwarded(&self) -> bool {
        self.found.is_ok_and(|found| matches!(found.route.action, Action::Forward(_)))
    }
}

/// Adds the dynamic metadata of a filter, for later filters and the record.
pub(crate) fn add_metadata(
    outcome: &mut RequestOutcome<'_>,
    filter: &str,
    found: impl IntoIterator<Item = (String, Value)>,
) {
    let mut found = found.into_iter().peekable();
    if found.peek().is_some() {
        matching::merge_metadata(outcome.metadata.get_or_insert_default(), filter, found);
    }
}

/// Returns the [`AdmittedRequest`](crate::worker::revalidation::AdmittedRequest) of a context on its way to
/// `$link`. This is a macro, because a method would borrow the whole context, whose `admission` changes while
/// the result lives.
macro_rules! admitted_request {
    ($context:ident, $origin:expr, $link:expr) => {
        $crate::worker::revalidation::AdmittedRequest {
            worker: $context.scope.worker,
            origin: $origin,
            manager: $context.scope.manager,
            head: &*$context.exchange.request,
            results: &$context.decision.filter_results,
            found: $context.decision.found.as_ref().ok(),
            link: $link,
            client: $context.exchange.client,
            start: $context.outcome.start,
        }
    };
}
pub(crate) use admitted_request;
