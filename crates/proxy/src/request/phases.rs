//! The phases of a request, in order: route → filter → forward → respond → record.
//!
//! All decisions about the request precede the first byte to the upstream. A failure in any phase is an [`Error`];
//! [`RequestContext::serve`] is the only place that answers it. Every request ends with one record.

use std::{borrow::Cow, future::poll_fn, task::Poll, time::Instant};

use crate::{
    overload::Admission,
    request::{
        context::{Exchange, Filtered, RequestContext, RequestScope},
        hop, on_demand, routing,
        spans::Trace,
    },
};
use skysail_http::http1::ConnectionOptions;
use skysail_policy::{
    config::{
        listener::Direction,
        route::{Action, RedirectPath},
    },
    error::{Error, Kind},
    matching,
    path::{self, Normalization as Normalized},
    route::{self, Found, NoRoute},
    state::demand::HostStatus,
};

impl<'a> RequestContext<'a> {
    /// Serves the request. Returns whether the connection may serve another one; `is_last` says that it may not.
    pub(crate) async fn serve(&mut self, connection: ConnectionOptions, is_last: bool) -> bool {
        let exchange = &mut self.exchange;
        let upgrade = routing::requested_upgrade(exchange.request, connection.upgrade);
        // Connection fields are removed first, so that all decisions apply to the head that is forwarded.
        let keep_upgrade = upgrade.is_some() && exchange.request.method() != "CONNECT";
        hop::remove_connection_fields(exchange.request, keep_upgrade);
        // The bytes after a request for an upgrade may be of another protocol, even after a refusal. They are not read
        // as HTTP.
        exchange.keep_alive = !connection.close && !is_last && upgrade.is_none();
        self.decision.grpc = matching::is_grpc(exchange.request);
        if let Err(error) = self.run_phases(upgrade).await {
            self.answer_failure(&error).await;
        }
        self.outcome.received += self.exchange.body.bytes;
        if self.decision.response_filters.is_some() {
            self.finish_processing();
        }
        let now = Instant::now();
        self.write_record(now);
        if let Some(upstream) = self.outcome.upstream.take()
            && self.outcome.reusable
        {
            upstream.give_back(now);
        }
        self.exchange.keep_alive
    }

    /// Runs the phases up to the response.
    async fn run_phases(&mut self, upgrade: Option<Box<str>>) -> Result<(), Error> {
        if self.decision.overload != Admission::Accept {
            shed_load(&self.scope, &mut self.exchange, self.decision.overload).await?;
        }
        routing::set_default_host(self.scope.manager, self.exchange.request)?;
        let normalized = path::normalize(self.scope.manager, self.exchange.request);
        if normalized != Normalized::Continue {
            return self.refuse_path(normalized).await;
        }
        routing::process_hop_fields(&self.scope, &mut self.exchange, &mut self.decision);
        routing::find_route(&self.scope, self.exchange.request, None, &mut self.decision);
        let host_status = on_demand::host_status(&self.scope, self.exchange.request, &self.decision);
        if host_status != HostStatus::Settled {
            let (scope, exchange, decision) = (&mut self.scope, &mut self.exchange, &mut self.decision);
            Box::pin(on_demand::find_host(scope, exchange, decision, host_status)).await?;
        }
        self.begin_trace();
        if let Some(name) = &upgrade {
            routing::check_upgrade(self.scope.manager, &self.decision.found, name)?;
        }
        if self.filter().await? == Filtered::Answered {
            return Ok(());
        }
        let found = match self.decision.found {
            Ok(found) => found,
            Err(NoRoute::NoMatch) => return Err(Error::new(Kind::RouteNotFound)),
            Err(NoRoute::TlsRequired) => {
                let location = route::https_location(self.exchange.request);
                return self.direct_response(301, &[("location", &location)], b"").await;
            }
        };
        match &found.route.action {
            Action::Forward(forward) => self.forward(&found, forward, upgrade.is_some()).await,
            Action::Redirect(redirect) => {
                let scheme = self.exchange.request.scheme();
                if let Some(RedirectPath::Rewritten(rewrite)) = &redirect.path {
                    routing::rewrite_path(self.exchange.request, rewrite, &found.route.matches);
                }
                let location = route::location(redirect, self.exchange.request, scheme);
                self.direct_response(redirect.status, &[("location", &location)], b"").await
            }
            Action::Direct(direct) => self.direct_response(direct.status, &[], &direct.body).await,
        }
    }

    /// Answers a request whose path the configuration refuses or redirects.
    async fn refuse_path(&mut self, normalized: Normalized) -> Result<(), Error> {
        // As in Envoy, this response gets the header operations of its route only if a proxy in front has set
        // the scheme.
        if self.exchange.request.has("x-forwarded-proto") {
            routing::find_route(&self.scope, self.exchange.request, None, &mut self.decision);
        }
        if normalized == Normalized::Reject {
            return Err(Error::new(Kind::BadPath));
        }
        let location = path::location(self.exchange.request);
        self.outcome.details = Cow::Borrowed("path_normalization_failed");
        let location = ("location".into(), location.into_bytes().into());
        self.local_reply(307, &[location], b"").await
    }

    /// Begins the trace, if the connection manager has tracing.
    #[inline]
    fn begin_trace(&mut self) {
        let manager = self.scope.manager;
        if let Some(tracing) = &manager.tracing {
            let outbound = self.exchange.downstream.origin.listener.direction == Direction::Outbound;
            let route = self.decision.found.ok().map(|Found { route, .. }| route);
            let head = &mut *self.exchange.request;
            let trace = Trace::begin(self.scope.worker, manager, tracing, outbound, route, head);
            self.outcome.trace = Some(Box::new(trace));
        }
    }
}

/// Decides about a request that came while the worker is late or refuses requests.
///
/// # Errors
/// The request is refused, or its client has closed the connection.
#[cold]
async fn shed_load(
    scope: &RequestScope<'_>,
    exchange: &mut Exchange<'_>,
    admission: Admission,
) -> Result<(), Error> {
    match admission {
        Admission::Accept => Ok(()),
        Admission::AcceptIfConnected => {
            let wire = &mut exchange.downstream.wire;
            let has_ended = poll_fn(|cx| Poll::Ready(wire.has_ended(cx))).await;
            if has_ended { Err(Error::new(Kind::DownstreamClosed)) } else { Ok(()) }
        }
        Admission::Reject if exchange.downstream.origin.listener.bypass_overload => Ok(()),
        Admission::Reject => {
            scope.counters.rq_overload_close.inc();
            Err(Error::new(Kind::Overloaded))
        }
    }
}
