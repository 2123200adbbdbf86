//! What becomes of a request's head on its way to the upstream, as routes say.

use std::time::Duration;

use super::ForwardPlan;
use crate::request::story::RequestContext;
use skysail_http::head;
use skysail_policy::{
    config::route::{HostRewrite, Rewrite, RouteMatch},
    grpc, headers,
    retry::TryLimits,
    route::{self, Found},
};

impl ForwardPlan<'_> {
    /// Whether routes have changes for the request's head.
    pub(super) fn changes_head(&self) -> bool {
        let Found { table, host, route, target, .. } = self.found;
        let target = target.is_some_and(|target| !target.headers.request.is_empty());
        let ops = [&table.headers, &host.headers, &route.headers];
        let changed = target || ops.iter().any(|ops| !ops.request.is_empty());
        changed || self.host.is_some() || self.forward.rewrite.is_some()
    }
}

impl RequestContext<'_> {
    /// Changes of the request's head, in Envoy's order.
    pub(super) fn rewrite(&mut self, way: &ForwardPlan<'_>) {
        let found = way.found;
        let target = found.target.map(|target| &target.headers);
        let ops = [target, Some(&found.route.headers), Some(&found.host.headers), Some(&found.table.headers)];
        for ops in ops.into_iter().flatten() {
            if !ops.request.is_empty() {
                let mut head = std::mem::take(self.head);
                headers::apply_request(&ops.request, &mut head, &self.record());
                *self.head = head;
            }
        }
        match way.host {
            Some(HostRewrite::Literal(host)) => self.rename_host(host.as_bytes()),
            Some(HostRewrite::Header(name)) => {
                if let Some(host) = self.head.header(name).map(<[u8]>::to_vec) {
                    self.rename_host(&host);
                }
            }
            Some(HostRewrite::Auto) | None => {}
        }
        if let Some(rewrite) = &way.forward.rewrite {
            self.rewrite_path(rewrite, &found.route.matches);
        }
        self.tell_timeout(way);
    }

    /// Says to the server how long it is waited for. The first try has all of the time, as far as whole milliseconds tell.
    pub(super) fn tell_timeout(&mut self, way: &ForwardPlan<'_>) {
        let TryLimits { timeout, try_timeout, .. } = way.asked;
        let spent = if self.told.attempts > 1 { self.started.elapsed() } else { Duration::ZERO };
        let least = Duration::from_millis(1);
        let left = timeout.map(|timeout| timeout.saturating_sub(spent).max(least));
        let waited = [try_timeout, left].into_iter().flatten().min();
        if let Some(timeout) = waited {
            self.head.set_number("x-envoy-expected-rq-timeout-ms", timeout.as_millis() as u64);
            // The server should not wait for longer than is waited for here.
            if self.grpc && way.forward.grpc_timeout.is_some() {
                grpc::set_timeout(self.head, timeout);
            }
        }
    }

    /// Gives the request another path, and keeps the one it came with.
    pub(crate) fn rewrite_path(&mut self, rewrite: &Rewrite, matched: &RouteMatch) {
        let original = self.head.path().to_owned();
        if let Some(path) = route::rewrite(rewrite, matched, &original) {
            self.head.set("x-envoy-original-path", original.as_bytes());
            self.head.set_path(&path);
        }
    }

    /// Gives the request another authority, and tells the upstream which one the client asked for. It keeps its own
    /// instead of one that is empty, as in Envoy, or that no `Host` field could hold.
    pub(super) fn rename_host(&mut self, host: &[u8]) {
        let Some(host) = head::as_authority(host) else { return };
        // Another try at another endpoint changes nothing about it.
        if self.told.attempts <= 1 {
            let original = self.head.authority().to_owned();
            self.head.set("x-envoy-original-host", original.as_bytes());
        }
        self.head.set_authority(host);
    }
}
