//! The record of a request, from which metrics, access logs and traces are made.

use std::sync::Arc;

use super::RequestContext;
use crate::{call::export, upstream::pool::bump};
use skysail_http::{grpc_status, head::ResponseHead};
use skysail_policy::{
    config::{Cluster, route::Action},
    record::{Context, Record},
};

impl RequestContext<'_> {
    /// Returns the record of the request up to now.
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
        record.cluster = told.pool.as_ref().map(|pool| &pool.cluster).or_else(|| self.intended());
        record.endpoint = told.host.as_ref().map(|host| &host.endpoint);
        let link = told.upstream.as_ref().map(|upstream| &upstream.link);
        let meant = told.host.as_ref().map(|host| host.endpoint.address);
        record.upstream_remote = link.map(|link| link.remote).or(meant);
        record.upstream_local = link.and_then(|link| link.local);
        record.route_name = told.route;
        record.metadata = self.metadata.as_deref();
        record.downstream_local = Some(origin.destination);
        // A client that others tell of has no port.
        let port = if self.client == origin.source.ip() { origin.source.port() } else { 0 };
        record.downstream_remote = Some(std::net::SocketAddr::new(self.client, port));
        record.downstream_direct = Some(origin.direct);
        record.server_name = origin.server_name();
        record.span = self.trace.as_ref().and_then(|trace| trace.context());
        record
    }

    /// The cluster that the route leads to, though the request may never get there.
    fn intended(&self) -> Option<&Arc<Cluster>> {
        let found = self.found.ok()?;
        let Action::Forward(forward) = &found.route.action else { return None };
        self.snapshot.clusters.get(forward.cluster(found.target, self.head)?)
    }

    /// How a call of gRPC has ended, by this answer: as it says, else as its status means.
    pub(super) fn grpc_status(&self, response: &ResponseHead) -> Option<u32> {
        let said = self.told.grpc_status.or_else(|| grpc_status::in_fields(response));
        let meant = || (self.told.status > 0).then(|| grpc_status::from_http(self.told.status));
        said.or_else(meant).filter(|_| self.grpc)
    }

    /// Tells metrics and logs.
    pub(super) fn report(&mut self) {
        self.end_try(None, false);
        let mut record = self.record();
        record.duration = self.started.elapsed();
        record.grpc_status = self.grpc_status(self.response);
        if record.status >= 500
            && let Some(host) = &self.told.host
        {
            bump(&host.totals.errors);
        }
        let (request, response) = (Some(&*self.head), Some(&*self.response));
        let context = Context { record: &record, request, response };
        if let Some(stats) = &self.manager.stats {
            if stats.http.is_empty() {
                self.worker.shard.request(&record, self.head);
            } else {
                self.worker.shard.request_changed(&stats.http, &context);
            }
        }
        self.end_trace(&record);
        export::log(self.worker, &self.manager.access_logs, &context);
    }
}
