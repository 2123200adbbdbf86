//! Statistics of routes with a `stat_prefix`: responses by status, and retries.
//!
//! Names in `/stats` are those of Envoy. The Prometheus labels are virtual host and route; an Envoy splits names of
//! virtual hosts at their dots.

use std::{collections::BTreeMap, sync::Arc};

use super::{Sample, series};
use crate::telemetry::stats::Type;
use skysail_http::map::Map;

/// Maximum number of routes that are kept when the configuration changes.
const MAX_ROUTES: usize = 4_096;
/// Status that stands for all that are not between 100 and 599.
const OTHER_STATUS: u16 = 0;

/// Statistics by virtual host and prefix.
#[derive(Debug, Default)]
pub(super) struct RouteStats(Map<Arc<str>, Map<Arc<str>, Counts>>);

/// Statistics of a route.
#[derive(Debug, Default)]
struct Counts {
    /// Responses by status.
    responses: BTreeMap<u16, u64>,
    retries: u64,
}

impl RouteStats {
    /// Counts a forwarded request with its response and its retries.
    pub(super) fn add(&mut self, host: &Arc<str>, prefix: &Arc<str>, status: u16, retries: u64) {
        if !self.0.get(host).is_some_and(|routes| routes.contains_key(prefix)) {
            self.0.entry(Arc::clone(host)).or_default().entry(Arc::clone(prefix)).or_default();
        }
        if let Some(counts) = self.0.get_mut(host).and_then(|routes| routes.get_mut(prefix)) {
            let status = if (100..600).contains(&status) { status } else { OTHER_STATUS };
            *counts.responses.entry(status).or_default() += 1;
            counts.retries += retries;
        }
    }

    /// Drops all statistics if they are too many. Routes are not looked up: few are kept without that.
    pub(super) fn forget(&mut self) {
        if self.0.values().map(Map::len).sum::<usize>() > MAX_ROUTES {
            self.0.clear();
        }
    }

    /// Adds labels and values to a list.
    pub(super) fn samples(&self, samples: &mut Vec<(String, Vec<Sample>)>) {
        let routes = self.0.iter().flat_map(|(host, routes)| routes.iter().map(move |route| (host, route)));
        for (host, (prefix, counts)) in routes {
            let mut labels = "envoy_virtual_host=\"".to_owned();
            series::escape(host, &mut labels);
            labels.push_str("\",envoy_route=\"");
            series::escape(prefix, &mut labels);
            labels.push('"');
            let mut classes = BTreeMap::<u16, u64>::new();
            for (status, count) in &counts.responses {
                *classes.entry(status / 100).or_default() += count;
                let labels = format!("envoy_response_code=\"{status}\",{labels}");
                samples.push((labels, vec![("envoy_vhost_route_upstream_rq", Type::Counter, *count)]));
            }
            for (class, count) in &classes {
                let labels = format!("envoy_response_code_class=\"{class}\",{labels}");
                samples.push((labels, vec![("envoy_vhost_route_upstream_rq_xx", Type::Counter, *count)]));
            }
            let completed = classes.values().sum();
            let totals = vec![
                ("envoy_vhost_route_upstream_rq_completed", Type::Counter, completed),
                ("envoy_vhost_route_upstream_rq_retry", Type::Counter, counts.retries),
            ];
            samples.push((labels, totals));
        }
    }
}
