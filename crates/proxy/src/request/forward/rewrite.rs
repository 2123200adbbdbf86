//! Changes of the request's head before it is sent to the upstream, as the route specifies.

use std::time::Duration;

use super::ForwardPlan;
use crate::request::{context::RequestContext, routing};
use skysail_http::head::{self, RequestHead};
use skysail_policy::{
    config::route::{Forward, HostRewrite},
    grpc, headers,
    retry::AttemptPolicy,
    route::Found,
};

impl ForwardPlan<'_> {
    /// Returns whether the route changes the request's head.
    pub(super) fn changes_head(&self) -> bool {
        let Found { table, host, route, target, .. } = self.found;
        let target = target.is_some_and(|target| !target.headers.request.is_empty());
        let ops = [&table.headers, &host.headers, &route.headers];
        let changed = target || ops.iter().any(|ops| !ops.request.is_empty());
        changed || self.host_rewrite.is_some() || self.forward.rewrite.is_some()
    }
}

impl RequestContext<'_> {
    /// Changes the request's head as the route specifies, in Envoy's order.
    pub(super) fn rewrite(&mut self, plan: &ForwardPlan<'_>) {
        let found = plan.found;
        let target = found.target.map(|target| &target.headers);
        let ops = [target, Some(&found.route.headers), Some(&found.host.headers), Some(&found.table.headers)];
        for ops in ops.into_iter().flatten() {
            if !ops.request.is_empty() {
                let mut head = std::mem::take(self.exchange.request);
                headers::apply_request(&ops.request, &mut head, &self.record());
                *self.exchange.request = head;
            }
        }
        let (request, attempts) = (&mut *self.exchange.request, self.outcome.attempts);
        match plan.host_rewrite {
            Some(HostRewrite::Literal(host)) => set_host(request, plan.forward, host.as_bytes(), attempts),
            Some(HostRewrite::Header(name)) => {
                if let Some(host) = request.header(name).map(<[u8]>::to_vec) {
                    set_host(request, plan.forward, &host, attempts);
                }
            }
            Some(HostRewrite::Auto) | None => {}
        }
        if let Some(rewrite) = &plan.forward.rewrite {
            routing::rewrite_path(request, rewrite, &found.route.matches);
        }
        self.set_expected_timeout(plan);
    }

    /// Sets `x-envoy-expected-rq-timeout-ms`. The first attempt has the whole timeout, a retry the rest of
    /// it. The value is rounded down to milliseconds.
    pub(super) fn set_expected_timeout(&mut self, plan: &ForwardPlan<'_>) {
        let AttemptPolicy { timeout, try_timeout, .. } = plan.limits;
        let is_retry = self.outcome.attempts > 1;
        let spent = if is_retry { self.outcome.started.elapsed() } else { Duration::ZERO };
        let min = Duration::from_millis(1);
        let left = timeout.map(|timeout| timeout.saturating_sub(spent).max(min));
        if let Some(timeout) = [try_timeout, left].into_iter().flatten().min() {
            let request = &mut *self.exchange.request;
            request.set_number("x-envoy-expected-rq-timeout-ms", timeout.as_millis() as u64);
            // `grpc-timeout` must not exceed the timeout of this proxy.
            if self.decision.grpc && plan.forward.grpc_timeout.is_some() {
                grpc::set_timeout(request, timeout);
            }
        }
    }
}

/// Sets the authority that the host rewrite gives, and keeps the original in `x-envoy-original-host` and, if the route
/// says so, `x-forwarded-host`. As in Envoy, the authority stays if the new one is empty or is not a valid `Host`
/// field. `attempts` is the number of attempts so far.
pub(super) fn set_host(head: &mut RequestHead, forward: &Forward, host: &[u8], attempts: u32) {
    let Some(host) = head::as_authority(host) else { return };
    // A retry at another endpoint keeps the original authority that the first attempt has stored.
    if attempts <= 1 {
        head.copy_authority_to("x-envoy-original-host");
        if forward.append_forwarded_host {
            headers::append_forwarded_host(head);
        }
    }
    head.set_authority(host);
}
